use super::*;
use crate::{ArrivalUnit, TraceRequest, max_load};
use crate::{
    fleet::EngineGroup,
    generate::{Shape, Workload, generate},
};
use pointsman_workers::Role;
use tokio::time::Duration;

fn with<T>(arms: &[&str], seeds: u64, run: impl FnOnce(&Plan<'_>) -> T) -> T {
    let arms: Vec<Arm> = arms.iter().map(|arm| Arm::parse(arm).unwrap()).collect();
    let shape = Shape::SystemPrompts { prompts: 6 };
    let trace = generate(&Workload { shape, requests: 200, rate: 8.0, burstiness: 1.0, seed: 5 });
    let engines = vec![EngineGroup::new(Role::Aggregated, 4)];
    let fleet = Fleet { block_tokens: 64, engines, ..Fleet::default() };
    let options = RunOptions { jitter: Duration::from_millis(100), ..RunOptions::default() };
    run(&Plan {
        arms: &arms,
        trace: &trace,
        fleet: &fleet,
        fleet_name: "four",
        seeds,
        options,
        slo: Slo::default(),
        rank_by: RankBy::TtftP90,
        clairvoyant: 0,
        threads: 2,
    })
}

fn compared(arms: &[&str], seeds: u64) -> Comparison {
    with(arms, seeds, |plan| compare(plan, &Monitor::default()).unwrap())
}

#[test]
fn arms_are_reported_in_order_with_intervals_over_seeds() {
    let report = compared(&["kv", "round-robin", "random"], 3);
    let labels: Vec<&str> = report.arms.iter().map(|arm| arm.label.as_str()).collect();
    assert_eq!(labels, ["kv", "round-robin", "random"]);
    let [kv, round_robin, _] = report.arms.as_slice() else { panic!("three arms") };
    assert!(kv.figures.hit_rate.mean > round_robin.figures.hit_rate.mean);
    assert!(kv.figures.hit_rate.mean <= report.endless_cache_hit_rate);
    assert_eq!(kv.figures.ttft_p90.values.len(), 3);
    assert!(kv.figures.ttft_p90.plus_minus.is_some_and(|half| half > 0.0));
    let sorted = |values: &[f64]| values.windows(2).all(|pair| pair[0] <= pair[1]);
    assert!(kv.quantiles.ttft.len() == 101 && sorted(&kv.quantiles.ttft));
    assert_eq!(report.ranking.len(), 3);
    let worse = |place: usize| report.ranking[place].worse_percent.as_ref().unwrap().mean;
    assert!(worse(0).abs() < 1e-9 && worse(2) > 0.0);
}

#[test]
fn every_pair_of_arms_tells_how_many_decisions_differ_and_what_they_cost() {
    let report = compared(&["kv", "round-robin", "random"], 2);
    let pairs: Vec<(&str, &str)> =
        report.pairs.iter().map(|pair| (pair.first.as_str(), pair.second.as_str())).collect();
    assert_eq!(pairs, [("kv", "round-robin"), ("kv", "random"), ("round-robin", "random")]);
    for pair in &report.pairs {
        assert!(
            pair.share > 0.3 && pair.requests.mean > 60.0 && pair.ttft_ms.plus_minus.is_some(),
            "{pair:?}"
        );
        let [cost, saved] = [pair.examples.first(), pair.examples.last()].map(|one| one.unwrap().ttft_ms);
        assert!(cost[1] > cost[0] && saved[1] < saved[0], "{pair:?}");
        assert!(pair.examples.iter().all(|one| one.request < 200));
    }
}

#[test]
fn threads_do_not_change_a_report() {
    let text = |report: &Comparison| serde_json::to_string(report).unwrap();
    assert_eq!(text(&compared(&["kv", "random"], 2)), text(&compared(&["kv", "random"], 2)));
}

#[test]
fn equal_arms_idle_knobs_and_single_seeds_are_told() {
    // Without separate engines a decode override has nothing to decide.
    let knob = r#"b=kv-aware+conditional-disagg@{"max-new-tokens": 7}"#;
    let report = compared(&["a=kv-aware+conditional-disagg", knob, "rr=round-robin", "again=round-robin"], 1);
    let told = |part: &str| report.warnings.iter().any(|warning| warning.contains(part));
    assert!(told("\"rr\" and \"again\" made equal decisions for every request"), "{:?}", report.warnings);
    assert!(told("\"a\" and \"b\" made equal decisions: the setting had no effect"), "{:?}", report.warnings);
    assert!(told("one seed"), "{:?}", report.warnings);
}

#[test]
fn arms_that_differ_less_than_their_noise_are_told() {
    let report = compared(&["random", "again=random", "kv"], 3);
    let told = |part: &str| report.warnings.iter().any(|warning| warning.contains(part));
    assert!(told("made equal decisions"), "{:?}", report.warnings);
    let is_tied = tied(&report.ranking).next().is_some();
    assert_eq!(told("no difference found by p90 TTFT between"), is_tied, "{:?}", report.warnings);
}

#[test]
fn an_arm_with_an_interval_wider_than_its_mean_comes_first_only_if_the_next_is_worse_by_more() {
    let mut arms = compared(&["kv", "round-robin"], 3).arms;
    let mut first = |of_kv: [f64; 3], of_round_robin: [f64; 3]| {
        arms[0].figures.ttft_p90 = Figure::of(of_kv.to_vec());
        arms[1].figures.ttft_p90 = Figure::of(of_round_robin.to_vec());
        ranking::rank(&arms, RankBy::TtftP90)[0].label.clone()
    };
    assert_eq!(first([10.0, 20.0, 900.0], [400.0, 410.0, 420.0]), "round-robin");
    assert_eq!(first([10.0, 60.0, 200.0], [4_000.0, 24_000.0, 80_000.0]), "kv");
    assert_eq!(first([300.0, 310.0, 320.0], [400.0, 410.0, 420.0]), "kv");
}

#[test]
fn each_arm_has_the_share_of_every_worker_and_a_warning_when_one_gets_most() {
    // A formula that sends every request to one worker.
    let one = r#"one=formula@{"cost": "worker_id == 1 ? 0 : 1"}"#;
    let report = compared(&["round-robin", one], 2);
    let [even, one] = [&report.arms[0], &report.arms[1]].map(|arm| &arm.workers[0]);
    assert_eq!((even.workers.as_slice(), even.requests), ([0, 1, 2, 3].as_slice(), 200.0));
    assert!(even.shares.iter().all(|share| (share - 0.25).abs() < 0.01) && !even.one_gets_most(), "{even:?}");
    assert!((even.shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
    assert!(one.one_gets_most() && one.busiest.mean > 0.9, "{one:?}");
    let told = |part: &str| report.warnings.iter().filter(|warning| warning.contains(part)).count();
    assert_eq!(told("\"one\": "), 1, "{:?}", report.warnings);
    assert_eq!(
        told("all chose one engine") + told("1 of 4 aggregated workers served"),
        1,
        "{:?}",
        report.warnings
    );
}

#[test]
fn a_stop_before_the_first_seed_is_an_error_and_after_it_a_report_with_fewer_seeds() {
    let monitor = Monitor::default();
    monitor.stop();
    let error = with(&["kv"], 2, |plan| compare(plan, &monitor).unwrap_err().to_string());
    assert!(error.starts_with("interrupted before the first seed"), "{error}");
    let monitor = Monitor::default();
    let report = std::thread::scope(|scope| {
        // Each seed has 200 requests.
        scope.spawn(|| {
            while monitor.requests() < 1_000 {
                std::thread::yield_now();
            }
            monitor.stop();
        });
        with(&["kv"], 1_000, |plan| compare(plan, &monitor).unwrap())
    });
    assert!(report.seeds >= 1 && report.seeds < 1_000, "{}", report.seeds);
    assert!(report.warnings.iter().any(|warning| warning.contains("interrupted: ")), "{:?}", report.warnings);
}

#[test]
fn each_arm_has_its_share_of_what_is_possible_and_of_the_search_when_it_beats_all() {
    let arms = ["kv", "round-robin", "oracle"];
    let with_budget = |clairvoyant: u32| {
        with(&arms, 2, |plan| compare(&Plan { clairvoyant, ..*plan }, &Monitor::default()).unwrap())
    };
    let searched = with_budget(60);
    let bound = &searched.possible.relaxation_ttft_ms;
    let found = searched.possible.clairvoyant.clone().unwrap();
    assert_eq!((found.runs, found.not_beaten.as_deref()), (60, None));
    for arm in &searched.arms {
        for seed in 0..2 {
            let mean = arm.figures.ttft_mean.values[seed];
            assert!(
                (arm.percent_of_relaxation.values[seed] - bound.values[seed] / mean * 100.0).abs() < 1e-9
            );
            let percent = arm.percent_of_clairvoyant.as_ref().unwrap().values[seed];
            assert!((percent - found.ttft_ms.values[seed] / mean * 100.0).abs() < 1e-9);
            assert!(bound.values[seed] <= found.ttft_ms.values[seed] && percent < 100.0, "{arm:?}");
        }
    }
    let shown = crate::text::bounds(&searched.possible);
    assert_eq!(
        shown,
        format!(
            "mean TTFT: no policy is below {:.1} ms; the clairvoyant search found {:.1} ms",
            bound.mean, found.ttft_ms.mean
        )
    );
    // A search with a budget below one step finds nothing and reports that.
    let none = with(&["kv", "random"], 1, |plan| {
        let one = plan.trace.clone().truncated(1);
        compare(&Plan { clairvoyant: 1, trace: &one, ..*plan }, &Monitor::default()).unwrap()
    });
    let not_beaten = none.possible.clairvoyant.clone().unwrap().not_beaten.unwrap();
    assert!(none.arms.iter().all(|arm| arm.percent_of_clairvoyant.is_none()));
    let told = |part: &str| none.warnings.iter().any(|warning| warning.contains(part));
    assert!(told(&format!("found nothing better than \"{not_beaten}\"")), "{:?}", none.warnings);
    assert!(crate::text::bounds(&none.possible).contains("not found, "), "{:?}", none.possible);
    // Without the search, a report differs only in the search's results.
    let mut off = with_budget(0);
    assert_eq!(off.possible.clairvoyant, None);
    off.possible.clairvoyant = searched.possible.clairvoyant.clone();
    for (arm, searched) in off.arms.iter_mut().zip(&searched.arms) {
        assert_eq!(arm.percent_of_clairvoyant, None);
        arm.percent_of_clairvoyant.clone_from(&searched.percent_of_clairvoyant);
    }
    let json = |report: &Comparison| serde_json::to_string(report).unwrap();
    assert_eq!(json(&off), json(&searched));
}

/// Compares an arm that serves nothing, one that refuses what would wait, and one that serves everything.
fn shedding() -> Comparison {
    let shed = r#"shed=formula@{"cost": "active_requests", "shed": {"when": "min(active_requests) > 0"}}"#;
    let nothing = r#"nothing=formula@{"cost": "0", "keep": "label('zone') == 'a'"}"#;
    compared(&[nothing, shed, "least-loaded"], 2)
}

#[test]
fn a_request_without_an_answer_counts_as_infinite_and_an_arm_with_too_many_comes_last() {
    let report = shedding();
    for by in [RankBy::TtftMean, RankBy::TtftP90, RankBy::TtftP99, RankBy::E2eMean, RankBy::E2eP90] {
        let ranking = ranking::rank(&report.arms, by);
        let order: Vec<(&str, bool)> =
            ranking.iter().map(|ranked| (ranked.label.as_str(), ranked.value.is_some())).collect();
        assert_eq!(order, [("least-loaded", true), ("shed", false), ("nothing", false)], "{by:?}");
    }
    assert_eq!(ranking::rank(&report.arms, RankBy::Goodput)[0].label, "least-loaded");
    let json = serde_json::to_value(&report).unwrap();
    assert!(json["ranking"][1]["value"].is_null() && json["ranking"][1]["worse_percent"].is_null(), "{json}");
    assert!(json["arms"][0]["figures"]["ttft_p90"]["mean"].is_null(), "{json}");
    let figures = |place: usize| &report.arms[place].figures;
    assert!(figures(0).ttft_mean.mean.is_infinite() && figures(0).served_share.mean == 0.0);
    // The mean of a shedding arm covers what it answered; its quantiles cover all requests.
    let shed = figures(1);
    assert!(shed.ttft_mean.has_value() && shed.served_share.mean > 0.0 && shed.served_share.mean < 0.9);
    assert!(!shed.ttft_p90.has_value() && !shed.ttft_p99.has_value(), "{shed:?}");
}

#[test]
fn text_and_page_show_no_value_where_too_few_requests_were_answered() {
    let study = crate::Study::new(vec![shedding()], Vec::new(), RankBy::TtftP90);
    let headline = &study.summary[0];
    assert!(headline.starts_with("least-loaded has a p90 TTFT of "), "{headline}");
    for part in [
        "The arms answered different shares of the requests: least-loaded answered 100.00 %",
        "nothing answered 0.00 % of the requests, too few with some seed for a p90 TTFT",
    ] {
        assert!(headline.contains(part), "{part}: {headline}");
    }
    let text = crate::text::study(&study);
    let row = text.lines().find(|line| line.starts_with("nothing ")).unwrap();
    assert!(row.split_whitespace().skip(1).take(7).all(|cell| cell == "-"), "{row}");
    let page = crate::html::page(&study);
    assert!(page.contains("<td>–</td><td>answered 0.00 % of the requests</td>"), "{page}");
    for (place, text) in [("text", &text), ("page", &page)] {
        assert!(!text.contains("inf ") && !text.contains(">inf") && !text.contains("NaN"), "{place}: {text}");
    }
}

/// Compares the default policies with one seed.
fn compared_on(trace: &Trace, fleet: &Fleet, options: RunOptions) -> Comparison {
    let (arms, options) = ([Arm::parse("kv").unwrap()], RunOptions { jitter: Duration::ZERO, ..options });
    with(&[], 1, |plan| {
        compare(&Plan { arms: &arms, trace, fleet, options, ..*plan }, &Monitor::default()).unwrap()
    })
}

fn engines(groups: &[(Role, u32)]) -> Fleet {
    let engines = groups.iter().map(|(role, count)| EngineGroup::new(*role, *count)).collect();
    Fleet { block_tokens: 64, engines, ..Fleet::default() }
}

/// Returns requests of 640 new tokens and this many output tokens, `every_ms` apart.
fn open_loop(requests: u64, every_ms: u64, output_tokens: u32) -> Trace {
    let request = |number: u64| TraceRequest {
        at: Duration::from_millis(number * every_ms),
        input_tokens: 640,
        output_tokens,
        ..TraceRequest::default()
    };
    Trace { block_tokens: 64, requests: (0..requests).map(request).collect(), ..Trace::default() }
}

/// Returns sessions that start `every_ms` apart, with turns of 10 s between an answer and the next request.
fn closed_loop(sessions: u64, turns: u64, every_ms: u64) -> Trace {
    let mut trace = open_loop(sessions * turns, 0, 5);
    for (number, request) in (0..).zip(&mut trace.requests) {
        let session = number / turns;
        request.at = Duration::from_millis(session * every_ms);
        request.session = Some(format!("s{session}"));
        request.delay = (number % turns > 0).then(|| Duration::from_secs(10));
    }
    trace
}

#[test]
fn where_requests_wait_for_answers_the_rate_is_that_of_starts_beside_the_requests_that_were_measured() {
    let (trace, fleet) = (closed_loop(6, 20, 50), engines(&[(Role::Aggregated, 1)]));
    let report = compared_on(&trace, &fleet, RunOptions::default());
    assert_eq!(report.offered_unit, ArrivalUnit::SessionStarts);
    assert!((report.offered_per_s - 24.0).abs() < 1e-9, "{}", report.offered_per_s);
    // 120 requests in 19 pauses of 10 s and some answers.
    let figures = &report.arms[0].figures;
    assert!((0.6..0.64).contains(&figures.requests_per_s.mean), "{figures:?}");
    let shown = format!(
        "1x arrivals (24.00 session starts/s; measured: {:.2} requests/s)",
        figures.requests_per_s.mean
    );
    assert!(report.setting().ends_with(&shown), "{}", report.setting());
    let one = compared_on(&closed_loop(1, 5, 0), &fleet, RunOptions::default()).setting();
    assert!(one.contains("all session starts at once (measured: 0.1"), "{one}");
    let open = compared_on(&open_loop(20, 100, 5), &fleet, RunOptions::default()).setting();
    assert!(open.ends_with("1x arrivals (10.53 requests/s)"), "{open}");
    let fixed = RunOptions { fixed_schedule: true, ..RunOptions::default() };
    let fixed = compared_on(&trace, &fleet, fixed).setting();
    assert!(fixed.contains("1x arrivals (480.00 scheduled requests/s; measured: 0."), "{fixed}");
}

#[test]
fn the_number_of_sessions_bounds_a_load_when_they_start_within_the_time_that_one_takes() {
    let arms = [Arm::parse("kv").unwrap()];
    let fleet = engines(&[(Role::Aggregated, 1)]);
    let found = |trace: &Trace| {
        let plan = |plan: &Plan<'_>| {
            max_load(&Plan { arms: &arms, trace, fleet: &fleet, ..*plan }, 0.95, &Monitor::default()).unwrap()
        };
        with(&[], 2, plan)
    };
    let bounded = found(&closed_loop(6, 20, 50));
    let arm = &bounded.arms[0];
    assert_eq!((bounded.offered, arm.unit, arm.at_least, arm.bounded), (6, ArrivalUnit::SessionStarts, 2, 2));
    assert!((arm.per_s.mean - 24.0 * 64.0).abs() < 1e-6 && arm.requests_per_s.mean < 0.7, "{arm:?}");
    assert!(
        bounded.sentence().contains("The trace's 6 sessions bound the load of kv"),
        "{}",
        bounded.sentence()
    );
    // At 64 times their rate, sessions of one short turn still start over 30 s.
    let free = found(&closed_loop(40, 2, 100_000));
    assert_eq!((free.arms[0].at_least, free.arms[0].bounded), (2, 0), "{free:?}");
}

#[test]
fn a_fleet_that_does_not_keep_up_is_told_and_one_that_does_is_not() {
    let told = |trace: &Trace, fleet: &Fleet| {
        let warnings = compared_on(trace, fleet, RunOptions::default()).warnings;
        warnings.iter().any(|warning| warning.contains("does not keep up"))
    };
    let (one, pair) = (engines(&[(Role::Aggregated, 1)]), engines(&[(Role::Prefill, 1), (Role::Decode, 1)]));
    // An engine takes 33 ms for such a prompt.
    assert!(told(&open_loop(200, 10, 2), &one) && told(&open_loop(200, 10, 2), &pair));
    for (name, trace) in [
        ("idle", open_loop(200, 100, 2)),
        ("answers longer than the trace", open_loop(20, 100, 3_000)),
        ("a session much longer than its start", closed_loop(1, 40, 0)),
        ("sessions that start together", closed_loop(6, 20, 50)),
    ] {
        assert!(!told(&trace, &one) && !told(&trace, &pair), "{name}");
    }
}

#[test]
fn engines_that_serve_no_request_are_told_and_a_table_without_rows_has_no_header() {
    let trace = open_loop(20, 100, 5);
    let report = |groups: &[(Role, u32)]| compared_on(&trace, &engines(groups), RunOptions::default());
    let idle = |report: &Comparison| -> Vec<String> {
        report.warnings.iter().filter(|warning| warning.contains("served no request")).cloned().collect()
    };
    let shown = |report: Comparison| {
        crate::text::study(&crate::Study::new(vec![report], Vec::new(), RankBy::TtftP90))
    };
    let mixed = report(&[(Role::Prefill, 1), (Role::Decode, 1), (Role::Aggregated, 8)]);
    let [warning] = <[String; 1]>::try_from(idle(&mixed)).unwrap();
    assert!(
        warning.starts_with("\"kv\": its 8 aggregated engines served no request: while a prefill"),
        "{warning}"
    );
    assert!(!shown(mixed).contains("share, %"));
    // Without a prefill engine, aggregated and decode engines share the requests.
    let two = report(&[(Role::Decode, 1), (Role::Aggregated, 2)]);
    assert!(idle(&two).is_empty(), "{:?}", two.warnings);
    assert!(shown(two).contains("share, %"));
}

#[test]
fn the_unlimited_cache_is_that_of_the_requests_that_fit_into_an_engine() {
    let request = |at: u64, input_tokens: u32, blocks: &[u64]| TraceRequest {
        at: Duration::from_secs(at),
        input_tokens,
        output_tokens: 2,
        blocks: blocks.iter().copied().collect(),
        ..TraceRequest::default()
    };
    let small = (0..10).map(|number| request(2 * number, 200, &[1, 2, 3]));
    let large = (0..10).map(|number| request(2 * number + 1, 64 * 20, &[1, 2, 3]));
    let mut trace = Trace { block_tokens: 64, requests: small.chain(large).collect(), ..Trace::default() };
    trace.sort();
    let mut fleet = engines(&[(Role::Aggregated, 1)]);
    fleet.engines[0].blocks = Some(16);
    let report = compared_on(&trace, &fleet, RunOptions::default());
    // O8.2: nine of ten find three blocks of 64 tokens.
    let ceiling = 9.0 * 192.0 / 2_000.0;
    assert!((report.endless_cache_hit_rate - ceiling).abs() < 1e-9, "{}", report.endless_cache_hit_rate);
    assert!((report.arms[0].figures.hit_rate.mean - ceiling).abs() < 1e-9);
}
