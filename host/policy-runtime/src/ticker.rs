//! The epoch's clock: ticks every millisecond while some guest runs, and sleeps when none does.
//!
//! No wake-up is lost: the clock says that it sleeps and then changes `running` by nothing, a guest changes `running` and then asks
//! whether the clock sleeps. Changes of one number have an order: either the clock's comes later and tells it of the guest, or
//! the guest's does, and brings with it what the clock said before. `cargo xtask models` tries it.

use std::{sync::OnceLock, time::Duration};

use crate::sync::{
    atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::{self, Thread},
};

/// One tick of the epoch.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// Ticks without a guest after which the clock sleeps: calls that follow closely need not wake it. All idle ticks are alike,
/// so one is enough for the model checker.
const LINGER: u32 = if cfg!(loom) { 1 } else { 3 };

/// Who runs, and whether the clock sleeps.
#[derive(Debug, Default)]
pub(crate) struct Ticker {
    running: AtomicUsize,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

/// A guest may run as long as this is held: the clock ticks.
#[derive(Debug)]
pub(crate) struct Running<'a>(&'a Ticker);

impl Ticker {
    /// A guest begins to run.
    pub(crate) fn running(&self) -> Running<'_> {
        self.running.fetch_add(1, Ordering::AcqRel);
        if self.asleep.load(Ordering::Acquire)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Running(self)
    }

    /// Ticks as long as `tick` answers `true`.
    pub(crate) fn run(&self, mut tick: impl FnMut() -> bool) {
        let _ = self.thread.set(thread::current());
        let mut idle = 0;
        while tick() {
            thread::sleep(TICK);
            idle = if self.running.load(Ordering::Relaxed) == 0 { idle + 1 } else { 0 };
            if idle < LINGER {
                continue;
            }
            // Either this sees the guest that begins now, or that guest sees the clock asleep and wakes it.
            self.asleep.store(true, Ordering::Release);
            if self.running.fetch_add(0, Ordering::AcqRel) == 0 {
                // Not for ever: the engine may be dropped meanwhile, and nobody would say so.
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
            assert!(ticked_in(Duration::from_millis(100)) >= 10, "awake while a guest runs");
            drop(running);
            thread::sleep(Duration::from_millis(50));
            assert!(ticked_in(Duration::from_millis(100)) <= 1, "asleep again");
        }
        stop.store(true, Ordering::SeqCst);
        drop(ticker.running());
        clock.join().unwrap();
    }
}
