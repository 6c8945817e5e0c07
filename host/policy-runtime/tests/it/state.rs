//! State of a policy, on a real component: granted or refused, shared, kept through reloads, untouched
//! by probes and previews.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::sync::Arc;

use pointsman_policy_runtime::{
    Access, Capacity, Grant, Limits, LoadedPolicy, PolicyEngine, Refusal, compile, inspect,
};
use pointsman_routing::{Call, Decision, DecisionContext, Generation, Origin, Policy, Purpose};
use pointsman_test_guests::{CHATTY, TENANT_LIMIT};
use pointsman_workers::Leg;

const SETTINGS: &str = r#"{"requests":3,"window-ms":1000}"#;
const GRANTED: [Grant; 2] = [Grant::Log, Grant::State];

fn engine() -> PolicyEngine {
    PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap()
}

fn load(engine: &PolicyEngine, access: &Access) -> LoadedPolicy {
    compile(engine, TENANT_LIMIT, access).unwrap().configure(Origin::Embedded, SETTINGS).unwrap()
}

fn call(now_us: u64) -> Call {
    Call { leg: Leg::Prefill, attempt: 0, rows: 1, seed: 3, now_us }
}

/// Returns whether tenant 7 is let in at this time.
fn let_in(policy: &LoadedPolicy, now_us: u64) -> bool {
    let_in_for(Purpose::Route, policy, now_us)
}

fn let_in_for(purpose: Purpose, policy: &LoadedPolicy, now_us: u64) -> bool {
    let_in_by(&mut DecisionContext::new(purpose), policy, now_us)
}

fn let_in_by(context: &mut DecisionContext<'_>, policy: &LoadedPolicy, now_us: u64) -> bool {
    match policy.select(context, &call(now_us), &[7, 0, 0]).unwrap() {
        Decision::Choose { .. } => true,
        Decision::Shed(reason) => {
            assert_eq!(reason.status, 429);
            false
        }
        Decision::Abstain => unreachable!("it has an opinion"),
    }
}

fn refusal(bytes: &[u8], grants: &[Grant]) -> Refusal {
    compile(&engine(), bytes, &Access::new(grants)).unwrap_err()
}

#[test]
fn an_import_that_is_not_granted_refuses_the_policy_and_names_the_grant() {
    let refused = refusal(TENANT_LIMIT, &Access::DEFAULT);
    assert_eq!(refused.kind(), "not_granted");
    let text = "imports `pointsman:policy/state@0.1.1`, and the slot does not grant it; \
                add \"state\" to the slot's `grants`";
    assert_eq!(refused.to_string(), text);
    let refused = refusal(CHATTY, &[Grant::Log, Grant::State]);
    assert!(refused.to_string().ends_with("add \"wasi\" to the slot's `grants`"), "{refused}");
    let inspection = inspect(TENANT_LIMIT, SETTINGS, Limits::default()).unwrap();
    assert_eq!(
        (inspection.needs, inspection.policy.unwrap().name.as_str()),
        (vec![Grant::State], "tenant-limit")
    );
}

#[test]
fn invariant_9_state_is_the_slot_s_and_outlives_instances_and_reloads() {
    let (engine, access) = (engine(), Access::new(&GRANTED));
    let policy = Arc::new(load(&engine, &access));
    assert_eq!(access.state().usage(), (0, 0), "configure and the probe left nothing");
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let policy = policy.clone();
            std::thread::spawn(move || let_in(&policy, 2_000_000))
        })
        .collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()), "three may come");
    assert!(!let_in(&policy, 2_500_000), "whichever instance answers the fourth");
    drop(policy);
    let reloaded = load(&engine, &access);
    assert!(!let_in(&reloaded, 2_600_000), "the count is still there");
    assert!(let_in(&reloaded, 3_000_000), "another window");
    let elsewhere = load(&engine, &Access::new(&GRANTED));
    assert!(let_in(&elsewhere, 2_700_000), "another slot");
}

#[test]
fn f2_a_preview_sees_what_is_there_and_changes_nothing() {
    let access = Access::new(&GRANTED);
    let policy = load(&engine(), &access);
    assert!(let_in(&policy, 2_000_000) && let_in(&policy, 2_000_000));
    let before = access.state().usage();
    let previewed = |now_us| let_in_for(Purpose::Preview, &policy, now_us);
    assert!((0..10).all(|_| previewed(2_000_000)), "each would be the third");
    assert!(previewed(9_000_000));
    assert_eq!(access.state().usage(), before);
    assert!(let_in(&policy, 2_000_000), "the third");
    assert!(!let_in(&policy, 2_000_000), "the fourth");
    assert!(!previewed(2_000_000), "a preview of what would be refused");
}

#[test]
fn t7_each_generation_of_a_shadow_has_a_state_of_its_own() {
    let access = Access::new(&GRANTED);
    let policy = load(&engine(), &access);
    let shadowed = |generation| {
        let mut context = DecisionContext::new(Purpose::Shadow).with_generation(Generation(generation));
        let_in_by(&mut context, &policy, 2_000_000)
    };
    // T7.1
    assert_eq!([2; 4].map(shadowed), [true, true, true, false]);
    assert_eq!(access.state().usage(), (0, 0), "the slot's state is as it was");
    assert!(let_in_for(Purpose::Preview, &policy, 2_000_000), "a preview sees the slot's");
    assert!((0..3).all(|_| let_in(&policy, 2_000_000)) && !let_in(&policy, 2_000_000));
    // T7.2
    assert_eq!([3; 4].map(shadowed), [true, true, true, false]);
    assert_eq!([2; 5].map(shadowed), [true; 5], "late calls of a shadow that was replaced leave nothing");
    assert!(!shadowed(3));
    assert_eq!(access.state().usage().0, 1);
}
