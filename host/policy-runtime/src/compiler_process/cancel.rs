//! Cancels a compile whose result is no longer wanted.

use std::sync::{Arc, mpsc};

use parking_lot::Mutex;

/// Cancels one compile. Clones cancel the same one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    cancelled: bool,
    /// Told about the cancellation. It belongs to the thread that waits for the process.
    waiter: Option<mpsc::Sender<Event>>,
}

/// Messages for the thread that waits for the process.
#[derive(Debug)]
pub(super) enum Event {
    /// All of the process's output.
    Output(Vec<u8>),
    Cancelled,
}

impl Cancel {
    /// Cancels the compile, now or when it starts.
    pub(crate) fn cancel(&self) {
        let mut state = self.0.lock();
        state.cancelled = true;
        if let Some(waiter) = state.waiter.take() {
            // The waiter may have just ended.
            let _ = waiter.send(Event::Cancelled);
        }
    }

    /// Returns whether the compile was cancelled.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.lock().cancelled
    }

    /// Sends [`Event::Cancelled`] to `waiter` when the compile is cancelled, which may be before.
    pub(super) fn tell(&self, waiter: mpsc::Sender<Event>) {
        let mut state = self.0.lock();
        if state.cancelled {
            let _ = waiter.send(Event::Cancelled);
        } else {
            state.waiter = Some(waiter);
        }
    }
}
