use std::path::Path;

use pointsman_decision_log::{LOG_NAME, LOG_VERSION};

use self::traffic::{
    DECODE, LINK, PREFILL, TRAFFIC, Traffic, aggregated, pairs, pairs_and_local, with_second_sequences,
};
use super::*;
use crate::fleet::StepTimeSpec;

mod traffic;

fn fitted(requests: &[LoggedRequest]) -> Calibration {
    calibrate_requests(requests, KnownCapacity::default().or_assumed(&mut |_, _| {})).unwrap()
}

fn values(calibration: &Calibration, role: Role) -> [f64; 6] {
    let fit = &calibration.engines.iter().find(|(of, _)| *of == role).unwrap().1;
    let found = fit.coefficients();
    let [c0, c1, c2, c3, c4] = found.step;
    [found.request_overhead, c0, c1, c2, c3, c4]
}

#[track_caller]
fn assert_near(found: &[f64], truth: &[f64], share: f64) {
    for (found, truth) in found.iter().zip(truth) {
        assert!((found - truth).abs() <= share * truth.abs(), "{found} {truth}: {found:?}");
    }
}

#[test]
fn the_coefficients_of_engines_are_recovered_from_requests_that_overlapped() {
    let requests = [aggregated(TRAFFIC, 1), aggregated(TRAFFIC, 2)].concat();
    let calibration = fitted(&requests);
    // Times in a log are whole microseconds, and the schedule depends on the fit, so 2 % are allowed.
    assert_near(&values(&calibration, Role::Aggregated), &PREFILL, 0.02);
    assert_eq!((calibration.fleet.engines.len(), calibration.fleet.engines[0].count), (1, 2));
    let held_out = calibration.held_out.unwrap();
    assert!((190..=210).contains(&held_out.ttft.requests), "{held_out:?}");
    for errors in [held_out.ttft, held_out.itl, held_out.e2e] {
        assert!(errors.median_percent < 1.0 && errors.pearson_r > Some(0.99), "{errors:?}");
    }
    assert!(calibration.warnings.is_empty(), "{:?}", calibration.warnings);
}

#[test]
fn a_gap_and_requests_of_unknown_size_move_the_coefficients_little() {
    let mut requests = aggregated(TRAFFIC, 1);
    // The log lacks 40 consecutive requests. Every 50th request failed, one was retried, and one moved.
    requests.drain(100..140);
    for request in requests.iter_mut().step_by(50) {
        (request.outcome.status, request.output_tokens) = (502, 0);
        request.outcome.ttft_ms = None;
    }
    requests[60].decisions[0].retried = true;
    let mut rest = requests[70].decisions[0].clone();
    rest.at_us = Some(requests[70].arrived_at_us + 600_000_000);
    requests[70].decisions.push(rest);
    requests[90].input_estimated = true;
    requests[91].outcome.ttft_ms = None;
    let calibration = fitted(&requests);
    // The load of the missing requests is missing in the model, so 15 % are allowed.
    let found = values(&calibration, Role::Aggregated);
    assert_near(&[found[1], found[4]], &[PREFILL[1], PREFILL[4]], 0.15);
    let told = calibration.warnings.join("\n");
    for part in [
        "have no counted prompt tokens",
        "failed or have no output",
        "ran beside requests of unknown size",
        "1 requests were not streamed: they have no time to first token, and only count as load",
    ] {
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn requests_that_are_not_streamed_are_load_and_their_counts_do_not_hide_estimates() {
    let not_streamed = |request: &mut LoggedRequest| {
        request.outcome.prompt_reported = Some(request.input_tokens);
        (request.outcome.ttft_ms, request.outcome.itl_ms) = (None, None);
    };
    // I10.10: two of three requests are not streamed, and most others run beside one.
    let mut requests = aggregated(Traffic { count: 900, ..TRAFFIC }, 1);
    let mixed = |requests: &mut [LoggedRequest]| {
        (0..).zip(requests).filter(|(number, _)| number % 3 > 0).for_each(|(_, one)| not_streamed(one));
    };
    mixed(&mut requests);
    let calibration = fitted(&requests);
    assert_near(&values(&calibration, Role::Aggregated), &PREFILL, 0.03);
    let told = calibration.warnings.join("\n");
    assert!(told.contains("600 requests were not streamed") && !told.contains("unknown size"), "{told}");
    // The streamed ones have estimates only.
    requests.iter_mut().step_by(3).for_each(|request| request.input_estimated = true);
    let calibration = fitted(&requests);
    let told = calibration.warnings.join("\n");
    assert!(told.contains("300 requests are fitted with prompt tokens that were estimated"), "{told}");
    // A pair's legs that are not streamed are load on both of its engines.
    let mut requests = pairs(Traffic { count: 450, cached: false, ..TRAFFIC }, true);
    mixed(&mut requests);
    let calibration = fitted(&requests);
    let found = values(&calibration, Role::Decode);
    assert_near(&[found[1], found[2]], &[DECODE[1], DECODE[2]], 0.2);

    requests.iter_mut().skip(30).for_each(not_streamed);
    let error = calibrate_requests(&requests, KnownCapacity::default().or_assumed(&mut |_, _| {}));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("20 are needed (440 requests were not streamed: they have no time"), "{error}");
    requests.iter_mut().for_each(not_streamed);
    let error = calibrate_requests(&requests, KnownCapacity::default().or_assumed(&mut |_, _| {}));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("none of its requests can be used: 450 requests were not streamed"), "{error}");
}

#[test]
fn i10_requests_with_several_choices_or_prompts_are_load() {
    for has_one_prompt in [true, false] {
        let traffic = Traffic { count: 600, cached: false, ..TRAFFIC };
        let calibration = fitted(&with_second_sequences(traffic, has_one_prompt));
        // I10.18
        assert_near(&values(&calibration, Role::Aggregated), &PREFILL, 0.03);
        let told = calibration.warnings.join("\n");
        let warning = "200 requests have several prompts or choices, and only count as load";
        assert!(told.contains(warning) && !told.contains("unknown size"), "{told}");
    }
}

#[test]
fn what_a_log_does_not_vary_is_fixed_at_0_and_said_so() {
    // The requests run one at a time and have one length.
    let traffic = Traffic { mean_gap_ms: 6e6, isl: (300, 300), cached: false, ..TRAFFIC };
    let calibration = fitted(&aggregated(traffic, 1));
    let fit = &calibration.engines[0].1;
    let identified = |name: &str| fit.terms.iter().find(|fit| fit.term.name() == name).unwrap().identified;
    assert!(identified("c0") && !identified("c1") && !identified("c4"), "{fit:?}");
    let told = calibration.warnings.join("\n");
    assert!(told.contains("do not vary c1 apart from the other terms; it is fixed at 0"), "{told}");
    // The fit still predicts the requests that it was made from.
    assert!(calibration.held_out.unwrap().e2e.median_percent < 2.0);
}

#[test]
fn a_pair_and_its_link_are_recovered_when_the_decisions_tell_the_end_of_the_prefill() {
    let traffic = Traffic { count: 600, cached: false, ..TRAFFIC };
    let calibration = fitted(&pairs(traffic, true));
    // A prompt that is computed alone takes one step, so only the sum of its fixed parts is known.
    let prefill = values(&calibration, Role::Prefill);
    let lone = |[overhead, c0, c1, c2, c3, c4]: [f64; 6]| {
        [
            overhead + c0 + c1 + 300.0 * (c2 + c3) + 9e4 * c4,
            overhead + c0 + c1 + 1_200.0 * (c2 + c3) + 1.44e6 * c4,
        ]
    };
    assert_near(&lone(prefill), &lone(PREFILL), 0.05);
    let decode = values(&calibration, Role::Decode);
    // The log does not record at which point of a step KV arrived, so some sequences start a step early or
    // late: 10 % are allowed.
    assert_near(&[decode[1], decode[2] + decode[4], decode[3]], &[DECODE[1], DECODE[2], DECODE[3]], 0.1);
    // The log has no prompt that this engine computed.
    assert_eq!(decode[4..], prefill[4..]);
    let links = calibration.fleet.links;
    let per_token_ms = links.bytes_per_token as f64 / links.gigabytes_per_second / 1e6;
    // The log does not record at which point of a step the KV arrived: the error is up to half a decode step.
    assert!(
        (links.latency_ms - LINK[0]).abs() < 0.5 * DECODE[1] && (per_token_ms / LINK[1] - 1.0).abs() < 0.2,
        "{links:?}"
    );
    let held_out = calibration.held_out.unwrap();
    assert!(held_out.ttft.median_percent < 5.0 && held_out.e2e.median_percent < 3.0, "{held_out:?}");

    let calibration = fitted(&pairs(traffic, false));
    let told = calibration.warnings.join("\n");
    assert!(calibration.links.is_none() && told.contains("does not separate the end of a prefill"), "{told}");
    assert!(calibration.held_out.unwrap().ttft.median_percent < 15.0);
}

#[test]
fn prompts_that_decode_engines_compute_are_fitted_there_once_there_are_enough() {
    let truth = [3.0, 10.0, 0.5, 0.0005, 0.08, 0.0];
    let traffic = Traffic { count: 600, cached: false, ..TRAFFIC };
    // I10.11
    let calibration = fitted(&pairs_and_local(traffic, true, |place| place % 4 == 0, truth));
    let roles: Vec<_> = calibration.fleet.engines.iter().map(|group| (group.role, group.count)).collect();
    assert_eq!(roles, [(Role::Prefill, 1), (Role::Decode, 1)]);
    let found = values(&calibration, Role::Decode);
    assert_near(&[found[1], found[4]], &[truth[1], truth[4]], 0.1);
    assert!(!calibration.warnings.join("\n").contains("times of prompts"), "{:?}", calibration.warnings);

    let mut few = pairs_and_local(traffic, true, |place| place % 60 == 0, truth);
    // Another worker serves a few requests alone.
    for request in few.iter_mut().take(10) {
        request.decisions.truncate(1);
        (request.decisions[0].slot, request.decisions[0].worker) = ("aggregated".into(), Some(9));
    }
    let calibration = fitted(&few);
    assert_eq!(calibration.fleet.engines.len(), 2);
    let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| values(&calibration, role));
    assert_eq!(decode[4..], prefill[4..]);
    assert_near(&[decode[1]], &[truth[1]], 0.1);
    let told = calibration.warnings.join("\n");
    assert!(told.contains("they computed fewer than 20 prompts that can be fitted"), "{told}");
    assert!(told.contains("aggregated engines: the log has 10 requests that can be fitted and 20"), "{told}");
}

#[test]
fn i10_13_a_log_that_leaves_a_step_without_time_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let mut requests = aggregated(TRAFFIC, 1);
    // A proxy gathers the tokens of an answer, and all requests take as long.
    for request in &mut requests {
        (request.outcome.ttft_ms, request.outcome.itl_ms) = (Some(100.0), Some(0.0));
    }
    write(directory.path(), &[frame(&requests, true)]);
    let error = of_log(directory.path(), None, None).unwrap_err();
    // I10.13
    assert!(
        error.starts_with("aggregated engines: the times of ")
            && error.contains("do not determine how long a step takes (c0 to c4 are 0)")
            && error.contains("(--since, --until)"),
        "{error}"
    );
}

#[test]
fn i10_14_too_few_requests_are_explained_by_those_that_had_not_ended() {
    let directory = tempfile::tempdir().unwrap();
    let mut requests = aggregated(Traffic { count: 80, ..TRAFFIC }, 1);
    for request in &mut requests {
        // Each decodes for longer than the log is.
        (request.output_tokens, request.outcome.itl_ms) = (20, Some(1e5));
        request.input_estimated = true;
    }
    write(directory.path(), &[frame(&requests, true)]);
    let error = of_log(directory.path(), None, None).unwrap_err();
    // I10.14
    assert_eq!(
        error,
        "aggregated engines: the log has 0 requests that can be fitted and 20 are needed (60 requests had not ended \
         when the last quarter began, which checks the fit); log streamed requests over a longer time"
    );
}

fn write(directory: &Path, frames: &[Vec<u8>]) {
    std::fs::write(directory.join("decisions-1.jsonl.zst"), frames.concat()).unwrap();
}

fn frame(requests: &[LoggedRequest], with_header: bool) -> Vec<u8> {
    let header = FileHeader {
        log: LOG_NAME.to_owned(),
        version: LOG_VERSION,
        block_tokens: 32,
        started_at_ms: 0,
        gateway: "0".to_owned(),
    };
    let mut text = if with_header { serde_json::to_string(&header).unwrap() + "\n" } else { String::new() };
    for request in requests {
        text.push_str(&(serde_json::to_string(request).unwrap() + "\n"));
    }
    zstd::bulk::compress(text.as_bytes(), 3).unwrap()
}

fn of_log(directory: &Path, model: Option<&str>, max: Option<u32>) -> Result<Calibration, String> {
    let capacity = KnownCapacity { blocks: Some(8_192), ..KnownCapacity::default() };
    calibrate_log(directory, &LogArgs::default(), model, max, capacity).map_err(|error| format!("{error:#}"))
}

#[test]
fn a_torn_log_is_read_up_to_the_tear_and_an_empty_or_short_one_says_what_is_missing() {
    let directory = tempfile::tempdir().unwrap();
    let error = of_log(directory.path(), None, None).unwrap_err();
    assert!(error.contains("0 files contain no request of that time; log some traffic first"), "{error}");
    write(directory.path(), &[frame(&[], true)]);
    assert!(of_log(directory.path(), None, None).unwrap_err().contains("1 files contain no request"));
    let requests = aggregated(TRAFFIC, 1);
    write(directory.path(), &[frame(&requests[..15], true)]);
    let error = of_log(directory.path(), None, None).unwrap_err();
    assert!(error.contains("aggregated engines: the log has ") && error.contains("20 are needed"), "{error}");
    let second = frame(&requests[300..], false);
    let torn = second[..second.len() / 2].to_vec();
    write(directory.path(), &[frame(&requests[..300], true), torn]);
    let calibration = of_log(directory.path(), None, None).unwrap();
    assert_near(&values(&calibration, Role::Aggregated)[1..2], &PREFILL[1..2], 0.05);
    assert_eq!(calibration.fleet.block_tokens, 32);
    let told = calibration.warnings.join("\n");
    assert!(told.contains("1 files end within a frame") && told.contains("contain --max-num-seqs"), "{told}");
    assert!(!told.contains("--blocks"), "{told}");
    let few = of_log(directory.path(), None, Some(100)).unwrap();
    assert!(few.warnings.iter().any(|one| one.contains("older requests of the log are not used")));
    assert!(few.engines[0].1.requests <= 75);
}

#[test]
fn estimated_prompts_are_fitted_with_a_warning_and_reported_ones_without() {
    let directory = tempfile::tempdir().unwrap();
    let mut requests = aggregated(TRAFFIC, 1);
    // Routing assumed four letters for a token, and the text has three.
    let estimate = |request: &mut LoggedRequest| {
        request.outcome.prompt_reported = Some(request.input_tokens);
        (request.input_estimated, request.input_tokens) = (true, request.input_tokens * 3 / 4);
    };
    requests.iter_mut().for_each(estimate);
    write(directory.path(), &[frame(&requests, true)]);
    let calibration = of_log(directory.path(), None, None).unwrap();
    // I10.7
    assert_near(&values(&calibration, Role::Aggregated), &PREFILL, 0.02);
    assert!(!calibration.warnings.join("\n").contains("estimated"), "{:?}", calibration.warnings);

    requests.iter_mut().for_each(|request| request.outcome.prompt_reported = None);
    write(directory.path(), &[frame(&requests, true)]);
    let calibration = of_log(directory.path(), None, None).unwrap();
    let told = calibration.warnings.join("\n");
    assert!(told.contains("400 requests are fitted with prompt tokens that were estimated"), "{told}");
    // A token of the estimate takes 4/3 of the time of the engine's token.
    assert_near(&values(&calibration, Role::Aggregated)[4..5], &[PREFILL[4] * 4.0 / 3.0], 0.1);
    assert!(calibration.held_out.unwrap().ttft.median_percent < 5.0, "{}", calibration.table());
}

#[test]
fn requests_of_another_model_count_as_load_only_where_it_runs_on_the_same_engine() {
    let directory = tempfile::tempdir().unwrap();
    let mut requests = aggregated(TRAFFIC, 1);
    // The adapter runs on the same engine. The other model has its own engine, which is ten times slower.
    requests.iter_mut().step_by(3).for_each(|request| request.model = "adapter".into());
    let other = aggregated(Traffic { mean_gap_ms: 900.0, ..TRAFFIC }, 2).into_iter().map(|mut request| {
        request.model = "other".into();
        request.outcome.itl_ms = request.outcome.itl_ms.map(|itl| itl * 10.0);
        request
    });
    requests.extend(other);
    write(directory.path(), &[frame(&requests, true)]);
    let error = of_log(directory.path(), None, None).unwrap_err();
    assert!(
        error.contains("has the models adapter (134 requests), m (266 requests), other (400 requests)"),
        "{error}"
    );
    let error = of_log(directory.path(), Some("x"), None).unwrap_err();
    assert!(error.starts_with("--model x: "), "{error}");
    for model in ["m", "adapter"] {
        let calibration = of_log(directory.path(), Some(model), None).unwrap();
        assert_near(&values(&calibration, Role::Aggregated), &PREFILL, 0.02);
        let StepTimeSpec::Linear { .. } = calibration.fleet.engines[0].step_time else { panic!() };
    }
}
