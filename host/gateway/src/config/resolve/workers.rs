//! Validates the list of workers. Each description was validated when it was read.

use pointsman_workers::WorkerSpec;

use super::Problems;

impl Problems {
    pub(super) fn workers(&mut self, workers: &[WorkerSpec]) -> Vec<WorkerSpec> {
        for (index, worker) in workers.iter().enumerate() {
            let same = workers.iter().take(index).position(|other| other.id == worker.id);
            if let Some(same) = same {
                let id = worker.id;
                let message =
                    format!("`{id}` is already the id of workers[{same}]: give each worker its own");
                self.add(format!("workers[{index}].id"), message);
            }
        }
        workers.to_vec()
    }
}
