//! Advances the epoch every millisecond while a guest runs, and sleeps when none does.
//!
//! No wake-up is lost. The ticker sets `asleep` and then adds 0 to `running`; a guest adds 1 to `running` and
//! then reads `asleep`. Both are read-modify-write operations on `running`, so one comes first: either the
//! ticker sees the guest, or the guest sees `asleep` and wakes the ticker. The loom model in tests/models
//! checks this (`cargo xtask models`).

use std::{sync::OnceLock, time::Duration};

use crate::sync::{
    atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::{self, Thread},
};

/// Time between two ticks.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// Ticks without a guest before the ticker sleeps, so that calls in quick succession need not wake it. All
/// idle ticks are equal, so one is enough for the model checker.
const IDLE_TICKS: u32 = if cfg!(loom) { 1 } else { 3 };

/// Counts running guests, and wakes the ticker's thread when the first one starts.
#[derive(Debug, Default)]
pub(crate) struct Ticker {
    running: AtomicUsize,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

/// Keeps the ticker awake while it lives.
#[derive(Debug)]
pub(crate) struct Running<'a>(&'a Ticker);

impl Ticker {
    /// Registers a guest that starts to run, and wakes the ticker.
    pub(crate) fn running(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::AcqRel);
        if self.asleep.load(Ordering::Acquire)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Running(self)
    }

    /// Calls `tick` every [`TICK`] until it returns `false`. Blocks the thread.
    pub(crate) fn run(&self, mut tick: impl FnMut() -> bool) {
        let _ = self.thread.set(thread::current());
        let mut idle = 0;
        while tick() {
            thread::sleep(TICK);
            idle = if self.running.load(Ordering::Relaxed) == 0 { idle + 1 } else { 0 };
            if idle < IDLE_TICKS {
                continue;
            }
            // Either this addition sees a guest that starts now, or that guest sees `asleep` and unparks this
            // thread.
            self.asleep.store(true, Ordering::Release);
            if self.running.fetch_add(0, Ordering::AcqRel) == 0 {
                // With a timeout: nothing wakes this thread when the engine is dropped.
                thread::park_timeout(Duration::from_secs(1));
            }
            self.asleep.store(false, Ordering::Release);
            idle = 0;
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicU32};

    use super::*;

    #[test]
    fn it_ticks_while_a_guest_runs_and_sleeps_when_none_does() {
        let (ticker, ticks, stop) =
            (Arc::new(Ticker::default()), Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let clock = {
            let (ticker, ticks, stop) = (ticker.clone(), ticks.clone(), stop.clone());
            thread::spawn(move || {
                ticker.run(|| {
                    ticks.fetch_add(1, Ordering::SeqCst);
                    !stop.load(Ordering::SeqCst)
                });
            })
        };
        let ticked_in = |time| {
            let before = ticks.load(Ordering::SeqCst);
            thread::sleep(time);
            ticks.load(Ordering::SeqCst) - before
        };
        thread::sleep(Duration::from_millis(50));
        assert!(ticked_in(Duration::from_millis(200)) <= 1, "asleep");
        for _ in 0..3 {
            let running = ticker.running();
            let before = ticks.load(Ordering::SeqCst);
            let ticked = || ticks.load(Ordering::SeqCst) >= before + 10;
            // Ten milliseconds are enough, but not on a busy machine.
            let mut left = 10_000;
            while !ticked() && left > 0 {
                thread::sleep(TICK);
                left -= 1;
            }
            assert!(ticked(), "awake while a guest runs");
            drop(running);
            thread::sleep(Duration::from_millis(50));
            assert!(ticked_in(Duration::from_millis(100)) <= 1, "asleep again");
        }
        stop.store(true, Ordering::SeqCst);
        drop(ticker.running());
        clock.join().unwrap();
    }
}
