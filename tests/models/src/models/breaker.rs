//! The circuit breaker: failures and successes of several calls at once, under both sets of rules.

use std::sync::Arc;

use super::breaker::{Breaker, BreakerRules};
use crate::loom_types::{
    atomic::{AtomicUsize, Ordering},
    time,
};

/// A policy call fails while two others succeed. In every order, the next success closes the breaker.
pub(crate) fn closes() {
    time::set(0);
    let breaker = Arc::new(Breaker::new(BreakerRules::POLICY));
    let calls = [true, false, true].map(|ok| {
        let breaker = breaker.clone();
        loom::thread::spawn(move || {
            if ok { breaker.record_success(0) } else { breaker.trip() };
        })
    });
    calls.into_iter().for_each(|call| call.join().unwrap());
    breaker.record_success(0);
    assert!(!breaker.is_open(), "open, and no success will close it");
}

/// After the pause exactly one policy call is let through.
pub(crate) fn lets_one_through() {
    time::set(0);
    let (breaker, through) = (Arc::new(Breaker::new(BreakerRules::POLICY)), Arc::new(AtomicUsize::new(0)));
    breaker.trip();
    assert!(!breaker.try_call());
    time::set(60_000);
    let calls = [(); 3].map(|()| {
        let (breaker, through) = (breaker.clone(), through.clone());
        loom::thread::spawn(move || {
            if breaker.try_call() {
                through.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    calls.into_iter().for_each(|call| call.join().unwrap());
    assert_eq!(through.load(Ordering::Relaxed), 1, "calls that try");
}

/// A request to a worker fails while another succeeds. After the next success, one failure does not open the
/// breaker.
pub(crate) fn closes_probation() {
    time::set(0);
    let breaker = Arc::new(Breaker::new(BreakerRules::WORKER));
    for _ in 0..4 {
        breaker.record_failure(0);
    }
    let outcomes = [true, false].map(|ok| {
        let breaker = breaker.clone();
        loom::thread::spawn(move || {
            if ok { breaker.record_success(0) } else { breaker.record_failure(0) };
        })
    });
    outcomes.into_iter().for_each(|outcome| outcome.join().unwrap());
    time::set(60_000);
    breaker.record_success(0);
    breaker.record_failure(0);
    assert!(!breaker.is_paused(), "on probation after a success");
}
