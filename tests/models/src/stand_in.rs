//! What the host's rooms are built on, as the model checker has it. Time stands still but where a model moves it.

pub(crate) mod sync {
    /// Counting references is no protocol of ours.
    pub(crate) use std::sync::{Arc, OnceLock};

    pub(crate) use loom::sync::atomic;

    pub(crate) use super::time::Instant;
}

pub(crate) mod thread {
    pub(crate) use loom::thread::{Thread, current};

    use super::time::Duration;

    pub(crate) fn sleep(_: Duration) {
        loom::thread::yield_now();
    }

    /// For ever: what is woken only by its time-out is not woken.
    pub(crate) fn park_timeout(_: Duration) {
        loom::thread::park();
    }
}

pub(crate) mod time {
    use std::{
        ops::Add,
        sync::atomic::{AtomicU64, Ordering},
    };

    pub(crate) use std::time::Duration;

    static NOW_MS: AtomicU64 = AtomicU64::new(0);

    /// A moment.
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

    impl Add<Duration> for Instant {
        type Output = Self;

        fn add(self, more: Duration) -> Self {
            Self(self.0 + more)
        }
    }

    /// Sets the clock of all.
    pub(crate) fn set(now_ms: u64) {
        NOW_MS.store(now_ms, Ordering::Relaxed);
    }
}

/// A lock that nobody dies in.
#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(loom::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) fn read(&self) -> loom::sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(|error| error.into_inner())
    }

    pub(crate) fn write(&self) -> loom::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(|error| error.into_inner())
    }
}

/// A pointer that is swapped: who loads it sees what was done before it was stored, and no more than that.
#[derive(Debug)]
pub(crate) struct ArcSwap<T> {
    /// All that were ever stored; not part of the model.
    all: std::sync::Mutex<Vec<sync::Arc<T>>>,
    at: sync::atomic::AtomicUsize,
}

impl<T: Default> Default for ArcSwap<T> {
    fn default() -> Self {
        Self { all: std::sync::Mutex::new(vec![sync::Arc::default()]), at: sync::atomic::AtomicUsize::new(0) }
    }
}

impl<T> ArcSwap<T> {
    pub(crate) fn load(&self) -> sync::Arc<T> {
        let at = self.at.load(sync::atomic::Ordering::Acquire);
        self.all.lock().unwrap_or_else(|error| error.into_inner())[at].clone()
    }

    pub(crate) fn store(&self, new: sync::Arc<T>) {
        let mut all = self.all.lock().unwrap_or_else(|error| error.into_inner());
        all.push(new);
        let at = all.len() - 1;
        drop(all);
        self.at.store(at, sync::atomic::Ordering::Release);
    }
}
