//! Loads policies, and knows which are loaded and which are being compiled. A slot of which one part changed
//! loads that part only. Knows neither files nor slots.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::Duration,
};

use super::compile_queue::{CompileJob, CompileQueue, CompileResult, PolicyKey};
use crate::{engine::PolicyEngine, loaded::LoadedPolicy, refusal::Refusal};

pub(super) struct Compiler {
    pub(super) engine: PolicyEngine,
    loaded: HashMap<PolicyKey, Weak<LoadedPolicy>>,
    /// Compiles on other threads. Without one, [`Compiler::load`] compiles on the caller's.
    queue: Option<CompileQueue>,
    /// Jobs in the queue.
    pending: HashSet<PolicyKey>,
    /// Results, kept until no job is pending: several lanes may wait for the same one.
    finished: HashMap<PolicyKey, CompileResult>,
    /// Time spent on loading since the last [`Compiler::reset_timer`].
    took: Duration,
}

/// Why a policy is not loaded.
pub(super) enum NotLoaded {
    /// It cannot be used.
    Refused(Refusal),
    /// It is being compiled. Ask again when a job has finished.
    Pending,
}

impl Compiler {
    pub(super) fn new(engine: PolicyEngine) -> Self {
        Self {
            engine,
            loaded: HashMap::new(),
            queue: None,
            pending: HashSet::new(),
            finished: HashMap::new(),
            took: Duration::ZERO,
        }
    }

    /// Compiles on the threads of `queue` from now on.
    pub(super) fn use_queue(&mut self, queue: CompileQueue) {
        self.queue = Some(queue);
    }

    /// Whether no job is pending.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Takes the result of a job.
    pub(super) fn finish(&mut self, key: PolicyKey, result: CompileResult) {
        self.pending.remove(&key);
        if let Ok(policy) = &result.policy {
            self.loaded.insert(key.clone(), Arc::downgrade(policy));
        }
        self.finished.insert(key, result);
    }

    /// Drops what no slot runs or waits for.
    pub(super) fn release_unused(&mut self) {
        if self.is_idle() {
            self.finished.clear();
        }
        self.loaded.retain(|_, policy| policy.strong_count() > 0);
    }

    pub(super) fn reset_timer(&mut self) {
        self.took = Duration::ZERO;
    }

    /// Returns the time spent on loading since [`Compiler::reset_timer`].
    pub(super) fn took(&self) -> Duration {
        self.took
    }

    /// Returns the policy that `job` makes: the loaded one, or a new one.
    pub(super) fn load(&mut self, job: CompileJob) -> Result<Arc<LoadedPolicy>, NotLoaded> {
        let key = job.key();
        if let Some(policy) = self.loaded.get(&key).and_then(Weak::upgrade) {
            self.took += self.finished.get(&key).map_or(Duration::ZERO, |result| result.took);
            return Ok(policy);
        }
        if self.pending.contains(&key) {
            return Err(NotLoaded::Pending);
        }
        let CompileResult { policy, took } = match (self.finished.remove(&key), &self.queue) {
            (Some(result), _) => result,
            (None, Some(queue)) => {
                queue.submit(job);
                self.pending.insert(key);
                return Err(NotLoaded::Pending);
            }
            (None, None) => {
                let result = job.run(&self.engine);
                self.finish(key, result.clone());
                result
            }
        };
        self.took += took;
        policy.map_err(NotLoaded::Refused)
    }
}
