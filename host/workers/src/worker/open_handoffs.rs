//! Handoffs that no decode worker has consumed: the engine keeps their blocks, although its own answer ended.

use std::sync::{Arc, atomic::Ordering};

use super::Worker;

/// A handoff of a prefill worker, until it is consumed or given up. It is no load, but the worker is not idle
/// (E6.14).
#[derive(Debug)]
pub struct OpenHandoff {
    prefill: Arc<Worker>,
}

impl OpenHandoff {
    /// Counts a handoff of the worker.
    #[must_use]
    pub fn new(prefill: Arc<Worker>) -> Self {
        prefill.state.open_handoffs.fetch_add(1, Ordering::AcqRel);
        Self { prefill }
    }
}

impl Drop for OpenHandoff {
    fn drop(&mut self) {
        self.prefill.state.open_handoffs.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Worker {
    /// Number of handoffs that are open. A request becomes one before its booking ends: read
    /// [`Worker::own_requests`] first.
    #[must_use]
    pub fn open_handoffs(&self) -> u32 {
        self.state.open_handoffs.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Health, WorkerSpec};

    #[test]
    fn e6_an_open_handoff_is_counted_until_it_is_dropped_and_is_no_load() {
        let flag = "id=1,role=prefill,engine=vllm,url=http://a:1,max_concurrency=1";
        let worker = Arc::new(Worker::new(WorkerSpec::parse_flag(flag).unwrap()));
        worker.set_health(Health::Healthy);
        let (one, two) = (OpenHandoff::new(worker.clone()), OpenHandoff::new(worker.clone()));
        // E6.14
        assert_eq!((worker.open_handoffs(), worker.active_requests()), (2, 0));
        assert_eq!(worker.ineligible(), None, "it takes no place");
        drop(one);
        assert_eq!(worker.open_handoffs(), 1);
        drop(two);
        assert_eq!(worker.open_handoffs(), 0);
    }
}
