//! Advances the epoch every millisecond while a guest runs, and sleeps when none does.
//!
//! No wake-up is lost. The ticker sets `asleep` and then adds 0 to `guests`; a guest adds itself to `guests`
//! and then reads `asleep`. Both are read-modify-write operations on `guests`, so one comes first: either the
//! ticker sees the guest, or the guest sees `asleep` and wakes the ticker. The loom model in tests/models
//! checks this.

use std::{sync::OnceLock, time::Duration};

use crate::sync::{
    atomic::{AtomicBool, AtomicU64, Ordering},
    thread::{self, Thread},
};

/// Time between two ticks.
pub(crate) const TICK: Duration = Duration::from_millis(1);

/// A guest that starts. Both halves of `guests` count it.
const START: u64 = 1 | 1 << 32;
/// A guest that ends.
const END: u64 = 1;

/// Counts guests, and wakes the ticker's thread when one starts while it sleeps.
#[derive(Debug, Default)]
pub(crate) struct Ticker {
    /// Upper half: number of guests that have started, which wraps; lower half: number of those that run.
    guests: AtomicU64,
    asleep: AtomicBool,
    thread: OnceLock<Thread>,
}

/// Keeps the ticker awake while it lives.
#[derive(Debug)]
pub(crate) struct Running<'a>(&'a Ticker);

impl Ticker {
    /// Registers a guest that starts to run, and wakes the ticker.
    pub(crate) fn running(&self) -> Running<'_> {
        self.guests.fetch_add(START, Ordering::AcqRel);
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
        let mut started = 0;
        while tick() {
            thread::sleep(TICK);
            let guests = self.guests.load(Ordering::Relaxed);
            // Calls in quick succession keep it awake, although it rarely meets one: to be woken costs each
            // of them more than the tick.
            if running(guests) > 0 || started_by(guests) != started {
                started = started_by(guests);
                continue;
            }
            // Either this addition sees a guest that starts now, or that guest sees `asleep` and unparks this
            // thread.
            self.asleep.store(true, Ordering::Release);
            if self.guests.fetch_add(0, Ordering::AcqRel) == guests {
                // With a timeout: nothing wakes this thread when the engine is dropped.
                thread::park_timeout(Duration::from_secs(1));
            }
            self.asleep.store(false, Ordering::Release);
            started = started_by(self.guests.load(Ordering::Relaxed));
        }
    }
}

/// Number of guests that run.
fn running(guests: u64) -> u64 {
    guests & u64::from(u32::MAX)
}

/// Number of guests that have started, modulo 2^32.
fn started_by(guests: u64) -> u64 {
    guests >> 32
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.guests.fetch_sub(END, Ordering::AcqRel);
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
