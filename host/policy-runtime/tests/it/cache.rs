//! Compiled policies outlive the process: a second engine over the same folder compiles nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use pointsman_policy_runtime::{Capacity, Limits, PolicyEngine, load};
use pointsman_routing::Origin;
use pointsman_test_guests::{HOSTILE, WEIGHTED_RANDOM};

#[test]
fn a_second_start_finds_policies_compiled() {
    let dir = tempfile::tempdir().unwrap();
    let counts = || {
        let engine =
            PolicyEngine::with_cache(Limits::default(), Capacity::detect(), dir.path().join("cache"))
                .unwrap();
        for bytes in [HOSTILE, WEIGHTED_RANDOM] {
            load(&engine, bytes, Origin::Embedded, "{}").unwrap();
        }
        let usage = engine.usage();
        (usage.cache_hits, usage.cache_misses)
    };
    assert_eq!(counts(), (0, 2));
    assert_eq!(counts(), (2, 0));
}

#[test]
fn instances_are_counted_while_they_live_and_their_memory_at_its_most() {
    let capacity = Capacity { cpus: 3, policies: 1 };
    let engine = PolicyEngine::new(Limits::default(), capacity).unwrap();
    let policy = load(&engine, HOSTILE, Origin::Embedded, "{}").unwrap();
    let usage = engine.usage();
    assert_eq!(usage.instances, 6, "two for each CPU; those of admission are gone");
    assert!((64 * 1024..=16 << 20).contains(&usage.memory_peak_bytes), "{usage:?}");
    drop(policy);
    // They are dropped by the maintenance thread.
    for _ in 0..1_000 {
        if engine.usage().instances == 0 {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{:?}", engine.usage());
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = PolicyEngine::with_cache(Limits::default(), Capacity::detect(), file.path().join("cache"))
        .unwrap_err();
    assert!(format!("{error:#}").contains("cache"), "{error:#}");
}
