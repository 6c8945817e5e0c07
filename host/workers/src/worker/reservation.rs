//! Places on a worker that are kept for decode legs whose prefill runs.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use super::Worker;

/// A place on a worker. It counts towards the worker's limit of concurrent requests, but not as load.
/// Dropping it gives the place back.
#[derive(Debug)]
pub struct Reservation {
    places: Arc<AtomicU32>,
}

impl Worker {
    /// Reserves a place.
    #[must_use]
    pub fn reserve(&self) -> Reservation {
        self.state.reserved.fetch_add(1, Ordering::Relaxed);
        Reservation { places: self.state.reserved.clone() }
    }

    /// Number of places that are reserved.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        self.state.reserved.load(Ordering::Relaxed)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.places.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Health, Ineligible, WorkerSpec};

    #[test]
    fn a_reservation_takes_a_place_until_it_is_dropped() {
        let flag = "id=1,role=decode,engine=vllm,url=http://a:1,max_concurrency=2";
        let worker = Worker::new(WorkerSpec::parse_flag(flag).unwrap());
        worker.set_health(Health::Healthy);
        let one = worker.reserve();
        assert_eq!((worker.reserved(), worker.ineligible()), (1, None));
        let two = worker.reserve();
        assert_eq!((worker.reserved(), worker.ineligible()), (2, Some(Ineligible::AtCapacity)));
        assert_eq!(worker.active_requests(), 0, "it is no load");
        drop((one, two));
        assert_eq!((worker.reserved(), worker.ineligible()), (0, None));
    }
}
