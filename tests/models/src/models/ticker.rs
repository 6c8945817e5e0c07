//! The epoch's clock: a guest that starts while the clock falls asleep still gets its ticks.

use std::sync::Arc;

use super::ticker::Ticker;
use crate::loom_types::atomic::{AtomicUsize, Ordering};

/// Starts guests while the clock falls asleep. Each runs until it has seen a tick.
fn run(guests: usize) {
    let ticker = Arc::new(Ticker::default());
    // One bit for each guest that waits, and above them one bit for each guest that has seen its tick.
    let (state, all) = (Arc::new(AtomicUsize::new(0)), ((1 << guests) - 1) << guests);
    let ticked = Arc::new((0..guests).map(|_| loom::sync::Notify::new()).collect::<Vec<_>>());
    let clock = {
        let (ticker, state, ticked) = (ticker.clone(), state.clone(), ticked.clone());
        loom::thread::spawn(move || {
            ticker.run(|| {
                let seen = state.load(Ordering::Acquire);
                let waits = |guest: &usize| seen & 1 << guest != 0 && seen & 1 << (guest + guests) == 0;
                (0..guests).filter(waits).for_each(|guest| ticked[guest].notify());
                seen & all != all
            });
        })
    };
    let guests = (0..guests).map(|guest| {
        let (ticker, state, ticked) = (ticker.clone(), state.clone(), ticked.clone());
        loom::thread::spawn(move || {
            let _running = ticker.running();
            state.fetch_or(1 << guest, Ordering::AcqRel);
            // If the clock stayed asleep, no thread could run, which the checker reports as a deadlock.
            ticked[guest].wait();
            state.fetch_or(1 << (guest + guests), Ordering::AcqRel);
        })
    });
    let guests: Vec<_> = guests.collect();
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    // Wake the clock once more, so that it notices the end.
    let _running = ticker.running();
    clock.join().unwrap();
}

/// Checks one guest.
pub(crate) fn wakes() {
    run(1);
}

/// Checks two guests that may start at the same time.
pub(crate) fn wakes_for_two() {
    run(2);
}
