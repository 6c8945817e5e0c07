//! The breaker of a generation: failures and successes of several calls at once.

use super::breaker::Breaker;
use crate::{
    policy::Failure,
    stand_in::{
        sync::Arc,
        sync::atomic::{AtomicUsize, Ordering},
        time,
    },
};

/// A call fails while another succeeds. Whatever came of it, the next success closes the breaker.
pub(crate) fn closes() {
    time::set(0);
    let breaker = Arc::new(Breaker::new());
    let calls = [true, false, true].map(|ok| {
        let breaker = breaker.clone();
        loom::thread::spawn(move || if ok { breaker.success() } else { breaker.failure(&Failure::Timeout, 9) })
    });
    calls.into_iter().for_each(|call| call.join().unwrap());
    breaker.success();
    assert!(!breaker.is_open(), "open, and no success will close it");
}

/// When the pause is over one call is let through.
pub(crate) fn lets_one_through() {
    time::set(0);
    let (breaker, through) = (Arc::new(Breaker::new()), Arc::new(AtomicUsize::new(0)));
    breaker.failure(&Failure::Timeout, 1);
    assert!(!breaker.allows());
    time::set(60_000);
    let calls = [(); 3].map(|()| {
        let (breaker, through) = (breaker.clone(), through.clone());
        loom::thread::spawn(move || {
            if breaker.allows() {
                through.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    calls.into_iter().for_each(|call| call.join().unwrap());
    assert_eq!(through.load(Ordering::Relaxed), 1, "calls that try");
}
