//! Requests that the admission queue wakes.

use std::{
    collections::VecDeque,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::Mutex;

use super::Lab;

/// Numbers of the requests that may be admitted now, in order.
#[derive(Debug, Default)]
pub(super) struct WakeList(Arc<Mutex<VecDeque<usize>>>);

/// Adds one request to the list when the queue wakes it.
struct WakeOne {
    number: usize,
    list: Arc<Mutex<VecDeque<usize>>>,
}

impl Wake for WakeOne {
    fn wake(self: Arc<Self>) {
        self.list.lock().push_back(self.number);
    }
}

impl WakeList {
    /// Adds a request.
    pub(super) fn push(&self, number: usize) {
        self.0.lock().push_back(number);
    }

    fn pop(&self) -> Option<usize> {
        self.0.lock().pop_front()
    }

    fn waker(&self, number: usize) -> Waker {
        Waker::from(Arc::new(WakeOne { number, list: self.0.clone() }))
    }
}

impl Lab<'_> {
    fn next_woken(&self) -> Option<usize> {
        self.gateways.iter().find_map(|gateway| gateway.woken.pop())
    }

    /// Routes the requests that the queue has woken.
    pub(super) fn resume_woken(&mut self) {
        while let Some(number) = self.next_woken() {
            let waker = self.gateways.of(number).woken.waker(number);
            let woken = self.flights.get_mut(&number).and_then(|flight| flight.woken.as_mut());
            if let Some(woken) = woken
                && let Poll::Ready(()) = woken.as_mut().poll(&mut Context::from_waker(&waker))
            {
                self.resume(number);
            }
        }
    }
}
