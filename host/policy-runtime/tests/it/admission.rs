//! Admission and calls, on real components: what is accepted, what is refused and why, and how a live guest
//! is stopped.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::sync::Arc;

use pointsman_policy_runtime::{
    Access, Capacity, Limits, LoadedPolicy, PolicyEngine, Refusal, SampleCall, compile, inspect, load,
};
use pointsman_routing::{Call, Decision, DecisionContext, Failure, Origin, Plan, Policy, Purpose, World};
use pointsman_test_guests::{CHATTY, HOSTILE, HOSTILE_CORE, LOW_QUEUE};
use pointsman_workers::Leg;

/// No decision is behind the calls of these tests.
fn context() -> DecisionContext<'static> {
    DecisionContext::new(Purpose::Route)
}

fn engine() -> PolicyEngine {
    PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap()
}

fn admit(bytes: &[u8], settings: &str) -> Result<LoadedPolicy, Refusal> {
    load(&engine(), bytes, Origin::Embedded, settings)
}

fn call(rows: u32) -> Call {
    Call { leg: Leg::Prefill, attempt: 0, rows, seed: 3, now_us: 5 }
}

fn kind(bytes: &[u8], settings: &str) -> &'static str {
    admit(bytes, settings).err().map_or("admitted", |refusal| refusal.kind())
}

#[test]
fn components_core_modules_and_wasi_guests_are_admitted() {
    for (bytes, name) in [(HOSTILE, "hostile"), (HOSTILE_CORE, "hostile"), (CHATTY, "chatty")] {
        let policy = admit(bytes, "{}").unwrap();
        assert_eq!((&*policy.info().name, policy.info().world), (name, World::Selector));
        let decision = policy.select(&mut context(), &call(2), &[4, 9]).unwrap();
        assert_eq!(decision, Decision::Choose { row: 0, costs: vec![], reason: None });
    }
}

#[test]
fn a_policy_without_a_version_has_that_of_its_own_crate() {
    // As in the manifest of the guest.
    assert_eq!(&*admit(CHATTY, "{}").unwrap().info().version, "7.8.9");
}

#[test]
fn every_step_of_admission_refuses_with_its_own_reason() {
    let truncated = &HOSTILE[..HOSTILE.len() / 2];
    let empty_component = wat::parse_str("(component)").unwrap();
    let bare_module = wat::parse_str("(module)").unwrap();
    let needy_module = wat::parse_str(r#"(module (import "env" "clock" (func)))"#).unwrap();
    let foreign = wat::parse_str(r#"(component (import "wasi:http/types@0.2.0" (instance)))"#).unwrap();
    let newer = String::from_utf8_lossy(HOSTILE).contains("policy@0.1.1");
    assert!(newer, "the contract's version is in the binary");
    let other_version = replace(HOSTILE, b"@0.1.1", b"@0.2.0");
    let cases: [(&[u8], &str, &str); 16] = [
        (&HOSTILE_CORE[..HOSTILE_CORE.len() / 2], "{}", "not_a_component"),
        (b"not wasm at all", "{}", "not_wasm"),
        (b"", "{}", "not_wasm"),
        (truncated, "{}", "malformed"),
        (&empty_component, "{}", "wrong_world"),
        (&bare_module, "{}", "wrong_world"),
        (&needy_module, "{}", "not_a_component"),
        (&foreign, "{}", "wrong_world"),
        (&other_version, "{}", "wrong_version"),
        (HOSTILE, r#"{"mode":"no-such"}"#, "configure"),
        (HOSTILE, r#"{"mode":"slow-configure"}"#, "configure"),
        (HOSTILE, r#"{"mode":"unknown-fact"}"#, "unknown_fact"),
        (HOSTILE, r#"{"mode":"trap"}"#, "probe"),
        (HOSTILE, r#"{"mode":"spin"}"#, "probe"),
        (HOSTILE, r#"{"mode":"row"}"#, "probe"),
        (HOSTILE, r#"{"mode":"memory"}"#, "not_deterministic"),
    ];
    for (bytes, settings, expected) in cases {
        assert_eq!(kind(bytes, settings), expected, "{settings} {} bytes", bytes.len());
    }
    let tight =
        PolicyEngine::new(Limits { file_bytes: 1_000, ..Limits::default() }, Capacity::detect()).unwrap();
    let refusal = load(&tight, HOSTILE, Origin::Embedded, "{}").unwrap_err();
    assert_eq!(refusal.to_string(), format!("the file has {} bytes; the limit is 1000", HOSTILE.len()));
}

fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let places: Vec<usize> =
        (0..out.len() - from.len()).filter(|at| &bytes[*at..*at + from.len()] == from).collect();
    for at in places {
        out[at..at + from.len()].copy_from_slice(to);
    }
    out
}

#[test]
fn a_live_guest_s_failure_is_named_and_a_fresh_instance_takes_its_place() {
    let cases = [("trap", "trap"), ("spin", "timeout"), ("hog", "memory"), ("error", "error")];
    for (mode, expected) in cases {
        // The probe makes 6 calls on one instance and touches the others once.
        let policy = admit(HOSTILE, &format!(r#"{{"mode":"{mode}","after":8}}"#)).unwrap();
        let outcomes: Vec<_> = (0..200).map(|_| policy.select(&mut context(), &call(2), &[1, 2])).collect();
        let failures: Vec<_> =
            outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).map(Failure::kind).collect();
        let first = outcomes.iter().position(Result::is_err).unwrap();
        assert_eq!(first, 7, "{mode}: one touch and seven good calls");
        assert!(failures.contains(&expected), "{mode}: {failures:?}");
        assert!(
            failures.iter().all(|kind| *kind == expected || *kind == "not_ready"),
            "{mode}: {failures:?}"
        );
        let served = outcomes[first..].iter().filter(|outcome| outcome.is_ok()).count();
        assert!(mode == "error" || served > 0, "{mode}: no instance came back");
    }
}

#[test]
fn an_instance_whose_memory_grows_is_replaced_before_a_call_fails_by_it() {
    let policy = admit(HOSTILE, r#"{"mode":"leak"}"#).unwrap();
    for _ in 0..20_000 {
        match policy.select(&mut context(), &call(2), &[1, 2]) {
            Ok(_) => {}
            Err(Failure::NotReady) => std::thread::yield_now(),
            Err(failure) => unreachable!("{failure}"),
        }
    }
    assert!(policy.memory_bytes() < 16 * 1024 * 1024);
}

#[test]
fn a_loop_is_stopped_in_time() {
    let policy = admit(HOSTILE, r#"{"mode":"spin","after":8}"#).unwrap();
    let mut took = Vec::new();
    while took.len() < 40 {
        let started = tokio::time::Instant::now();
        match policy.select(&mut context(), &call(2), &[1, 2]) {
            Err(Failure::Timeout { .. }) => took.push(started.elapsed()),
            Err(Failure::NotReady) => std::thread::yield_now(),
            other => assert!(other.is_ok(), "{other:?}"),
        }
    }
    took.sort_unstable();
    let median = took[took.len() / 2];
    println!("a loop was stopped after {median:?} (median of {}), {:?} at most", took.len(), took.last());
    // The deadline is 2 ms of CPU time. The bound is for a machine that gives this thread a tenth of its time
    // for a while: without the deadline no call would end.
    assert!(median.as_secs() < 5, "{median:?}");
}

#[test]
fn calls_from_many_threads_do_not_meet() {
    let policy = Arc::new(admit(pointsman_embedded_policies::LEAST_LOADED, "{}").unwrap());
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let policy = policy.clone();
            std::thread::spawn(move || {
                // Columns: requests, prefill tokens, queue, is it known. Row 1 has the fewest requests.
                (0..2_000)
                    .filter(|_| policy.select(&mut context(), &call(2), &[0, 5, 3, 0, 0, 0, 0, 1, 1]).is_ok())
                    .count()
            })
        })
        .collect();
    let served: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(served, 8_000);
}

#[test]
fn the_embedded_policies_are_admitted_and_answer() {
    let scorer = admit(pointsman_embedded_policies::KV_AWARE, "{}").unwrap();
    assert_eq!(scorer.info().world, World::Scorer);
    let planner = admit(pointsman_embedded_policies::CONDITIONAL_DISAGG, "{}").unwrap();
    assert_eq!(planner.decide(&mut context(), &call(0), &[], &[], &[]), Ok(Plan::Remote));
    assert_eq!(planner.decode_config(&mut context(), &call(0), &[]).unwrap().overlap_score_credit, Some(0.0));
    let filter = admit(LOW_QUEUE, r#"{"threshold":5}"#).unwrap();
    let mut kept = vec![];
    filter.keep(&mut context(), &call(3), &[9, 5, 0, 1, 1, 1], &mut kept).unwrap();
    assert_eq!(kept, [1, 2]);
    assert!(filter.select(&mut context(), &call(1), &[0]).is_err_and(|failure| failure.kind() == "invalid"));
}

/// The formula of docs/tune.md. Times depend on the machine; `cargo bench` measures them.
#[test]
fn a_formula_takes_less_than_seventy_instructions_for_each_of_many_candidates() {
    let settings = r#"{"cost": "2 * ratio(engine_queue, max(engine_queue))
        + ratio(request_blocks - cached_blocks_device, request_blocks)"}"#
        .replace('\n', " ");
    let limits = Limits { deadline: std::time::Duration::from_secs(1), ..Limits::default() };
    let engine = PolicyEngine::counting(limits, Capacity::detect()).unwrap();
    let compiled = compile(&engine, pointsman_embedded_policies::FORMULA, &Access::default()).unwrap();
    let policy = compiled.configure(Origin::Embedded, &settings).unwrap();
    let instructions =
        |rows| policy.instructions(&SampleCall::ordinary(&policy.info().wants, rows)).unwrap().unwrap();
    let (few, many) = (instructions(64), instructions(1_024));
    assert!(few < 10_000 && many < 70 * 1_024, "{few}, {many}");
}

#[test]
fn n7_a_refusal_does_not_show_what_is_in_a_file() {
    for (bytes, shown) in [
        (&b"root:$6$secret:19"[..], "17 bytes of an unknown type"),
        (b"", "empty"),
        (b"\x7fELF\x02\x01secret", "a native program or library (ELF)"),
        (b"\0asm\x63\0\0\0secret", "cut off, or of another version of WebAssembly"),
        (b"(component $secret)", "WebAssembly text"),
    ] {
        let refusal = admit(bytes, "{}").err().unwrap();
        // N7.17
        let text = format!("not WebAssembly: the file is {shown}; expected a component");
        assert!(refusal.to_string().starts_with(&text), "{refusal}");
        assert!(!refusal.to_string().contains("secret"), "{refusal}");
    }
}

#[test]
fn inspect_tells_what_a_file_is() {
    let inspection = inspect(HOSTILE_CORE, "{}", Limits::default()).unwrap();
    assert!(inspection.core_module);
    assert_eq!((inspection.world, inspection.contract.as_str()), (World::Selector, "pointsman:policy@0.1.1"));
    assert_eq!(inspection.policy.unwrap().worker_facts, ["active-requests"]);
    assert!(
        inspect(CHATTY, "{}", Limits::default())
            .unwrap()
            .imports
            .iter()
            .any(|import| import.starts_with("wasi:"))
    );
}
