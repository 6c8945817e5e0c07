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
        clairvoyant: 0,
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
    let stays = &study.summary[1];
    assert!(stays.contains("all 2 comparisons") || stays.starts_with("Of 2 comparisons: "), "{text}");
}

/// Returns a comparison whose arms differ from the first arm by these percentages, one for each of three
/// seeds.
fn with_differences(differences: &[[f64; 3]]) -> Comparison {
    let mut comparison = compared(1.0, StepTimeSpec::Dynamo);
    let ranked = |(number, worse): (usize, &[f64; 3])| Ranked {
        label: format!("arm{number}"),
        value: Some(Figure::of(worse.iter().map(|percent| 100.0 + percent).collect())),
        worse_percent: Some(Figure::of(worse.to_vec())),
        served_share: 1.0,
    };
    comparison.ranking = differences.iter().enumerate().map(ranked).collect();
    comparison
}

#[test]
fn where_no_seed_differs_it_says_that_no_test_is_possible_and_what_to_change() {
    let summary =
        |comparisons: &[Comparison]| Study::new(comparisons.to_vec(), Vec::new(), RankBy::TtftP90).summary;
    let zero = [0.0; 3];
    let setting = with_differences(&[zero]).setting();
    // The same difference with every seed is no test.
    let same = with_differences(&[zero, [3.0; 3], [7.0, 8.0, 9.0]]);
    let unvaried = &summary(&[same.clone(), same.clone()]);
    let impossible = format!(
        "All 3 seeds gave the same difference by p90 TTFT between arm0 (100.0 ms) and arm1 (103.0 ms) on \
         {setting}, so that no test is possible: "
    );
    let unmoved = summary(&[Comparison { jitter_ms: 0.0, ..same.clone() }]).remove(0);
    let advice = "use --jitter-ms of `compare`, which moves arrivals at random.";
    assert_eq!(unmoved, format!("{impossible}{advice}"));
    // Arrivals were moved already.
    let advice = "the load is too small for requests to meet, so that moved arrivals change nothing; use a higher --speed.";
    assert_eq!(unvaried[0], format!("{impossible}{advice}"));
    assert_eq!(unvaried[1], "No arm is measurably the best in any of the 2 comparisons.");
    let page = html::page(&Study::new(vec![same], vec![], RankBy::TtftP90));
    assert!(page.contains("<td>3.0 % worse, not tested</td>"), "{page}");
}

#[test]
fn where_there_is_no_difference_it_says_so_and_what_was_tested() {
    let summary =
        |comparisons: &[Comparison]| Study::new(comparisons.to_vec(), Vec::new(), RankBy::TtftP90).summary;
    let zero = [0.0; 3];
    let two = summary(&[with_differences(&[zero, [3.0, -1.0, 1.0]])]);
    let setting = with_differences(&[zero]).setting();
    assert_eq!(
        two[0],
        format!(
            "No difference found by p90 TTFT between arm0 (100.0 ms) and arm1 (101.0 ms) on {setting}: the 95 % interval of \
             their difference, -4.0 to 6.0 %, includes 0 (Student's t over 3 seeds, compared in pairs)."
        )
    );
    let three =
        &summary(&[with_differences(&[zero, [3.0, -1.0, 1.0], [5.0, -2.0, 2.0], [20.0, 21.0, 22.0]])])[0];
    assert!(
        three.starts_with("No difference found by p90 TTFT among arm0 (100.0 ms), arm1 (101.0 ms) and arm2"),
        "{three}"
    );
    assert!(three.contains("the difference of each to arm0 includes 0"), "{three}");
    assert!(three.ends_with(" The best of the others, arm3, is 21.0 % worse."), "{three}");
    let equal = &summary(&[with_differences(&[zero, zero])])[0];
    assert!(equal.ends_with(": the values are equal with each of 3 seeds."), "{equal}");

    // An interval of 760 % tells nothing: the arm has no place, and another one comes first.
    let wide = [650.0, 1_000.0, 300.0];
    let two = &summary(&[with_differences(&[zero, wide])])[0];
    assert_eq!(
        *two,
        format!(
            "arm0 has a p90 TTFT of 100.0 ms on {setting}. There are too few seeds to tell where arm1 (750.0 ms ± \
             869.5 ms) stands: use --seeds 12."
        )
    );
    let three = &summary(&[with_differences(&[zero, wide, [20.0, 21.0, 22.0]])])[0];
    assert!(
        three.starts_with("arm0 is the best of 2 arms") && three.contains("The second, arm2,"),
        "{three}"
    );
    assert!(three.ends_with(" stands: use --seeds 12."), "{three}");
    let page = html::page(&Study::new(vec![with_differences(&[zero, wide])], vec![], RankBy::TtftP90));
    assert!(page.contains("<tr><td></td>") && page.contains("<td>too few seeds to tell</td>"), "{page}");
    assert!(page.contains("<td>best</td>"), "{page}");

    // Several comparisons: a difference in all of them, in none, or in one.
    let sure = with_differences(&[zero, [10.0, 11.0, 12.0]]);
    let unsure = with_differences(&[zero, [3.0, -1.0, 1.0]]);
    assert_eq!(summary(&[sure.clone(), sure.clone()])[1], "It is the best in all 2 comparisons.");
    let none = summary(&[unsure.clone(), unsure.clone()]);
    assert_eq!(none[1], "No arm is measurably the best in any of the 2 comparisons.");
    let mixed = summary(&[sure, unsure]);
    let settings =
        format!("arm0 is the best in 1 ({setting}) and no arm is measurably the best in 1 ({setting})");
    assert_eq!(mixed[1], format!("Of 2 comparisons: {settings}."));
}

#[test]
fn ten_arms_have_ten_colours_and_the_ranking_says_where_there_is_no_difference() {
    let arms: Vec<Arm> = (0..10).map(|arm| Arm::parse(&format!("arm{arm}=random")).unwrap()).collect();
    let shape = Shape::SystemPrompts { prompts: 6 };
    let trace = generate(&Workload { shape, requests: 60, rate: 8.0, burstiness: 1.0, seed: 5 });
    let engines = vec![EngineGroup::new(Role::Aggregated, 4)];
    let fleet = Fleet { block_tokens: 64, engines, ..Fleet::default() };
    let options = RunOptions { jitter: Duration::from_millis(100), ..RunOptions::default() };
    let plan = Plan {
        arms: &arms,
        trace: &trace,
        fleet: &fleet,
        fleet_name: "four",
        seeds: 2,
        options,
        slo: Slo::default(),
        rank_by: RankBy::TtftP90,
        clairvoyant: 0,
        threads: 2,
    };
    let comparison = compare(&plan, &Monitor::default()).unwrap();
    let page = html::page(&Study::new(vec![comparison], Vec::new(), RankBy::TtftP90));
    let squares = |place: usize| page.matches(&format!("color:var(--arm-{place})\">&#9632;")).count();
    // Each colour appears in the ranking and above the figures.
    assert!((0..10).all(|place| squares(place) == 2), "{page}");
    assert_eq!(page.matches("<td>no difference found</td>").count(), 9);
    assert!(page.contains("@media(prefers-color-scheme:dark)"), "{page}");
    assert_eq!(
        page.matches("worker ").count() > 10,
        page.contains("Share of requests of 4 aggregated workers")
    );
    // No attribute of the page sets a colour of its own.
    let body = &page[page.find("<body>").unwrap()..];
    assert!(!body.contains("\"#") && !body.contains(":#"), "{body}");
}

#[test]
fn the_page_has_every_plot_with_names_escaped_and_loads_nothing() {
    let both = [1.0, 2.0].map(|speed| compared(speed, StepTimeSpec::Dynamo));
    let page = html::page(&Study::new(both.to_vec(), Vec::new(), RankBy::TtftP90));
    for part in [
        "Goodput over load",
        "Share of what is possible over load",
        "<td>share of what is possible, %</td>",
        "mean TTFT: no policy is below ",
        "Time to first token",
        "Inter-token latency",
        "unlimited cache",
        "Decisions that differ",
        "four &lt;engines&gt;",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // Without the search, the page has no row for it.
    assert!(!page.contains("of the clairvoyant search, %"));
    for forbidden in ["http://", "https://", "<script", "<link", "four <engines>", "NaN", "inf"] {
        assert!(!page.contains(forbidden), "{forbidden}");
    }
}

#[test]
fn goodput_over_load_is_a_file_of_its_own() {
    let both = [1.0, 2.0].map(|speed| compared(speed, StepTimeSpec::Dynamo));
    let svg = |comparisons: &[Comparison]| {
        html::goodput_svg(&Study::new(comparisons.to_vec(), Vec::new(), RankBy::TtftP90))
    };
    let drawn = svg(&both).unwrap();
    assert!(
        drawn.starts_with("<svg ") && drawn.contains(" xmlns=\"http://www.w3.org/2000/svg\"><style>:root{")
    );
    assert_eq!(drawn.matches("<circle ").count(), 4, "two arms at two loads: {drawn}");
    assert!(svg(&both[..1]).is_none());
}

#[test]
fn a_ranking_that_changes_by_more_than_noise_is_told() {
    let mut first = compared(1.0, StepTimeSpec::Dynamo);
    let mut other = compared(1.0, StepTimeSpec::BlisLlama8bH100);
    assert_eq!(other.step_time, "blis-llama-8b-h100");
    for ranked in first.ranking.iter_mut().chain(&mut other.ranking) {
        ranked.value.as_mut().unwrap().plus_minus = Some(0.0);
    }
    let order = |report: &Comparison| -> Vec<String> {
        report.ranking.iter().map(|ranked| ranked.label.clone()).collect()
    };
    if order(&first) == order(&other) {
        assert!(ranking_changes(&[first.clone(), other.clone()], RankBy::TtftP90).is_empty());
        // The arms of the second report are exchanged.
        let (a, b) = (other.ranking[0].label.clone(), other.ranking[1].label.clone());
        (other.ranking[0].label, other.ranking[1].label) = (b, a);
    }
    let changes = ranking_changes(&[first, other], RankBy::TtftP90);
    assert!(
        changes[0].contains("step time dynamo") && changes[0].contains("blis-llama-8b-h100"),
        "{changes:?}"
    );
}
