//! Compiled policies outlive the process: a second engine over the same folder compiles nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use pointsman_policy_runtime::{Limits, PolicyEngine, load};
use pointsman_routing::Origin;
use pointsman_test_guests::{HOSTILE, WEIGHTED_RANDOM};

#[test]
fn a_second_start_finds_policies_compiled() {
    let dir = tempfile::tempdir().unwrap();
    let counts = || {
        let engine = PolicyEngine::with_cache(Limits::default(), dir.path().join("cache")).unwrap();
        for bytes in [HOSTILE, WEIGHTED_RANDOM] {
            load(&engine, bytes, Origin::Embedded, "{}").unwrap();
        }
        engine.cache_counts().unwrap()
    };
    assert_eq!(counts(), (0, 2));
    assert_eq!(counts(), (2, 0));
    assert_eq!(PolicyEngine::new(Limits::default()).unwrap().cache_counts(), None);
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = PolicyEngine::with_cache(Limits::default(), file.path().join("cache")).unwrap_err();
    assert!(format!("{error:#}").contains("cache"), "{error:#}");
}
