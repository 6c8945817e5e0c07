use super::*;
use crate::{
    arm::Arm,
    fleet::{EngineGroup, Fleet, StepTimeSpec},
    generate::{Shape, Workload, generate},
    html,
    monitor::Monitor,
    report::{Plan, Slo, compare},
    run::RunOptions,
    text,
};
use pointsman_workers::Role;
use std::time::Duration;

fn compared(speed: f64, step_time: StepTimeSpec) -> Comparison {
    let arms: Vec<Arm> = ["kv", "round-robin"].iter().map(|arm| Arm::parse(arm).unwrap()).collect();
    let shape = Shape::SystemPrompts { prompts: 6 };
    let trace = generate(&Workload { shape, requests: 150, rate: 8.0, burstiness: 1.0, seed: 5 });
    let engines = vec![EngineGroup::new(Role::Aggregated, 4)];
    let fleet = Fleet { block_tokens: 64, engines, ..Fleet::default() }.with_step_time(step_time);
    let plan = Plan {
        arms: &arms,
        trace: &trace,
        fleet: &fleet,
        fleet_name: "four <engines>",
        seeds: 3,
        options: RunOptions { speed, jitter: Duration::from_millis(100), ..RunOptions::default() },
        slo: Slo::default(),
        rank_by: RankBy::TtftP90,
        threads: 2,
    };
    compare(&plan, &Monitor::default()).unwrap()
}

#[test]
fn the_first_paragraph_says_which_arm_by_how_much_and_how_sure() {
    let both = [1.0, 2.0].map(|speed| compared(speed, StepTimeSpec::Dynamo));
    let study = Study::new(both.to_vec(), Vec::new(), RankBy::TtftP90);
    let text = text::study(&study);
    let best = study.comparisons[0].ranking[0].label.clone();
    let start = format!("{best} is the best of 2 arms by p90 TTFT, ");
    assert!(study.summary[0].starts_with(&start), "{:?}", study.summary);
    for part in ["95 % interval", "3 seeds", "requests/s"] {
        assert!(study.summary[0].contains(part), "{:?}", study.summary);
    }
    assert!(study.summary[1].contains("all 2 comparisons") || study.summary[1].contains("1 of 2"), "{text}");
}

#[test]
fn the_page_has_every_plot_with_names_escaped_and_loads_nothing() {
    let both = [1.0, 2.0].map(|speed| compared(speed, StepTimeSpec::Dynamo));
    let page = html::page(&Study::new(both.to_vec(), Vec::new(), RankBy::TtftP90));
    for part in [
        "Goodput over load",
        "Time to first token",
        "Inter-token latency",
        "endless cache",
        "Decisions that differ",
        "four &lt;engines&gt;",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for forbidden in ["http://", "https://", "<script", "<link", "four <engines>", "NaN", "inf"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
}

#[test]
fn a_ranking_that_changes_by_more_than_noise_is_told() {
    let mut first = compared(1.0, StepTimeSpec::Dynamo);
    let mut other = compared(1.0, StepTimeSpec::BlisLlama8bH100);
    assert_eq!(other.step_time, "blis-llama-8b-h100");
    for ranked in first.ranking.iter_mut().chain(&mut other.ranking) {
        ranked.value.plus_minus = Some(0.0);
    }
    let order = |report: &Comparison| -> Vec<String> {
        report.ranking.iter().map(|ranked| ranked.label.clone()).collect()
    };
    if order(&first) == order(&other) {
        assert!(ranking_changes(&[first.clone(), other.clone()], RankBy::TtftP90).is_empty());
        // Exchanges the arms of the second report.
        let (a, b) = (other.ranking[0].label.clone(), other.ranking[1].label.clone());
        (other.ranking[0].label, other.ranking[1].label) = (b, a);
    }
    let changes = ranking_changes(&[first, other], RankBy::TtftP90);
    assert!(
        changes[0].contains("step time dynamo") && changes[0].contains("blis-llama-8b-h100"),
        "{changes:?}"
    );
}
