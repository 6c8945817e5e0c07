//! The model checker's versions of what the host's `crate::sync` modules re-export. Time passes only when a
//! model sets it.

use std::sync::Arc;

pub(crate) use loom::sync::atomic;
pub(crate) use time::Instant;

/// Threads that run on the checker's scheduler.
pub(crate) mod thread {
    use std::time::Duration;

    pub(crate) use loom::thread::{Thread, current};

    pub(crate) fn sleep(_: Duration) {
        loom::thread::yield_now();
    }

    /// Parks without a time-out, so that a model in which only the time-out ends the wait is a deadlock.
    pub(crate) fn park_timeout(_: Duration) {
        loom::thread::park();
    }
}

/// A clock that all threads share.
pub(crate) mod time {
    use std::{
        sync::atomic::{AtomicU64, Ordering},
        time::Duration,
    };

    static NOW_MS: AtomicU64 = AtomicU64::new(0);

    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Instant(Duration);

    impl Instant {
        pub(crate) fn now() -> Self {
            Self(Duration::from_millis(NOW_MS.load(Ordering::Relaxed)))
        }

        pub(crate) fn elapsed(&self) -> Duration {
            Self::now().0.saturating_sub(self.0)
        }
    }

    /// Sets the clock.
    pub(crate) fn set(now_ms: u64) {
        NOW_MS.store(now_ms, Ordering::Relaxed);
    }
}

/// A pointer swap with the weakest ordering that `arc-swap` promises: a load sees everything before the
/// store that it reads, and no more.
#[derive(Debug)]
pub(crate) struct ArcSwap<T> {
    /// Every value ever stored. A plain mutex, because this is not part of the model.
    values: std::sync::Mutex<Vec<Arc<T>>>,
    current: atomic::AtomicUsize,
}

impl<T: Default> Default for ArcSwap<T> {
    fn default() -> Self {
        Self { values: std::sync::Mutex::new(vec![Arc::default()]), current: atomic::AtomicUsize::new(0) }
    }
}

impl<T> ArcSwap<T> {
    pub(crate) fn new(value: Arc<T>) -> Self {
        Self { values: std::sync::Mutex::new(vec![value]), current: atomic::AtomicUsize::new(0) }
    }

    pub(crate) fn load(&self) -> Arc<T> {
        let current = self.current.load(atomic::Ordering::Acquire);
        self.values.lock().unwrap_or_else(|error| error.into_inner())[current].clone()
    }

    pub(crate) fn store(&self, new: Arc<T>) {
        let mut values = self.values.lock().unwrap_or_else(|error| error.into_inner());
        values.push(new);
        let current = values.len() - 1;
        drop(values);
        self.current.store(current, atomic::Ordering::Release);
    }
}
