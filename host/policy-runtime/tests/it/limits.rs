//! Limits of a policy as a whole, and of what it hands over in a call.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::time::Duration;

use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_policy_runtime::{
    Access, Capacity, Limits, LoadedPolicy, PolicyEngine, Refusal, compile, load,
};
use pointsman_routing::{Call, DecisionContext, Failure, Moment, ObservedOutcome, Origin, Policy, Purpose};
use pointsman_test_bombs as bombs;
use pointsman_test_guests::{ROGUE_LEARNER, ROGUE_WASI_LEARNER, scripted};
use pointsman_workers::{DpRank, Leg, WorkerId};

/// No deadline stops a guest before the limits of these tests do.
fn engine() -> PolicyEngine {
    let limits = Limits {
        deadline: Duration::from_secs(2),
        observe_deadline: Duration::from_secs(2),
        configure_deadline: Duration::from_secs(2),
        ..Limits::default()
    };
    PolicyEngine::new(limits, Capacity { cpus: 1, policies: 2 }).unwrap()
}

fn admit(guest: &[u8], script: &str) -> Result<LoadedPolicy, Refusal> {
    let access = Access::new(&Access::ALL);
    compile(&engine(), &scripted(guest, script), &access)?.configure(Origin::Embedded, "{}")
}

fn select(policy: &LoadedPolicy) -> Result<(), Failure> {
    let call = Call { leg: Leg::Prefill, attempt: 0, rows: 2, seed: 3, now_us: 5 };
    policy.select(&mut DecisionContext::new(Purpose::Route), &call, &[1, 2]).map(drop)
}

#[test]
fn long_texts_are_refused_before_they_are_copied_and_the_policy_serves_again() {
    for deed in ["long-reason", "long-shed", "long-log", "long-error"] {
        let policy = admit(ROGUE_LEARNER, &format!("{deed} 8")).unwrap();
        let failure = loop {
            if let Err(failure) = select(&policy) {
                break failure;
            }
        };
        assert_eq!(failure.kind(), "invalid", "{deed}: {failure}");
        assert!(failure.to_string().contains("128 KiB"), "{deed}: {failure}");
        let begun = tokio::time::Instant::now();
        while select(&policy).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{deed}: no instance came back");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn waiting_in_observe_is_a_failure_and_no_panic() {
    assert_eq!(admit(ROGUE_WASI_LEARNER, "observe-sleep 0").unwrap_err().kind(), "observe");
    let policy = admit(ROGUE_WASI_LEARNER, "observe-sleep 1").unwrap();
    let outcome = ObservedOutcome {
        decision: None,
        seed: 1,
        leg: Leg::Prefill,
        attempt: 0,
        worker: WorkerId(1),
        rank: DpRank(0),
        by_policy: true,
        retried: false,
        status: 200,
        ttft: None,
        itl: None,
        duration: Duration::from_secs(1),
        prompt_tokens: 1,
        output_tokens: 1,
        cached_predicted: None,
        cached_reported: None,
    };
    // The learning thread has no runtime, as this one.
    let observe = || {
        let context = &mut DecisionContext::new(Purpose::Route);
        policy.observe(context, Moment { now_us: 1, seed: 1 }, &[outcome])
    };
    assert_eq!(observe(), Ok(()));
    let failure = observe().unwrap_err();
    assert!(failure.to_string().contains("tried to wait"), "{failure}");
    let begun = tokio::time::Instant::now();
    while observe().is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20), "no instance came back");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_instance_has_two_memories_at_most_however_often_a_module_is_instantiated() {
    let engine = engine();
    let with = |count| bombs::with_instances(LEAST_LOADED, &bombs::memories(1, 1), count);
    let refusal = load(&engine, &with(245), Origin::Embedded, "{}").unwrap_err();
    assert_eq!(refusal.kind(), "exceeds_limit");
    assert!(refusal.to_string().contains("246 memories of all instances; the limit is 2"), "{refusal}");
    // The refused component used up nothing of the limit. With one instance more, a component is accepted.
    let policies: Vec<_> = (0..2).map(|_| load(&engine, &with(1), Origin::Embedded, "{}").unwrap()).collect();
    assert_eq!(policies.len(), 2);
}

#[test]
fn the_memories_of_an_instance_share_one_limit() {
    // Together with the policy's own memory, which starts with a megabyte, and grows when it is used.
    let with = |pages| bombs::with_instances(LEAST_LOADED, &bombs::memories(1, pages), 1);
    let engine = engine();
    assert!(load(&engine, &with(200), Origin::Embedded, "{}").is_ok());
    let refusal = load(&engine, &with(250), Origin::Embedded, "{}").unwrap_err();
    assert_eq!(refusal.kind(), "exceeds_limit", "{refusal}");
    let rogue = bombs::with_instances(&scripted(ROGUE_LEARNER, "leak 0"), &bombs::memories(1, 200), 1);
    let access = Access::new(&Access::ALL);
    let policy = compile(&engine, &rogue, &access).unwrap().configure(Origin::Embedded, "{}").unwrap();
    // Twelve KiB a call: the 13 MiB of the other memory leave less than 200 calls.
    let failure = (0..500).find_map(|_| select(&policy).err());
    assert_eq!(failure.map(|failure| failure.kind()), Some("memory"));
}
