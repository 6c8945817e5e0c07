//! The epoch's clock: a guest that runs is ticked for, however it meets the clock's falling asleep.

use super::ticker::Ticker;
use crate::stand_in::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Guests come while the clock falls asleep; each stays until a tick was made for it.
fn run(guests: usize) {
    let ticker = Arc::new(Ticker::default());
    // A bit for each guest that waits, and higher up one for each that had its tick.
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
            // A clock that slept on would leave nobody to be run: the checker calls it a deadlock.
            ticked[guest].wait();
            state.fetch_or(1 << (guest + guests), Ordering::AcqRel);
        })
    });
    let guests: Vec<_> = guests.collect();
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    // The clock ends with its next tick, which nobody waits for but this.
    let _running = ticker.running();
    clock.join().unwrap();
}

/// One guest.
pub(crate) fn wakes() {
    run(1);
}

/// Two, who may meet.
pub(crate) fn wakes_for_two() {
    run(2);
}
