//! Loads policies, and knows which are loaded and which are being compiled. When one part of a slot changed,
//! only that part is loaded. A compile that no lane waits for any more is cancelled. Knows neither files nor
//! slots.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use pointsman_routing::{Digest, Policy as _};
use pointsman_workers::ModelName;

use super::compile_queue::{CompileJob, CompileQueue, CompileResult, Compiled, Finished, PolicyKey, Ticket};
use crate::{
    engine::PolicyEngine,
    loaded::{LoadedPolicy, WeakPolicy},
    refusal::Refusal,
};

pub(super) struct Compiler {
    pub(super) engine: PolicyEngine,
    loaded: HashMap<PolicyKey, WeakPolicy>,
    /// Names of the policies that were loaded, by digest.
    names: HashMap<Digest, Arc<str>>,
    /// Compiles on other threads. Without one, [`Compiler::load`] compiles on the caller's.
    queue: Option<CompileQueue>,
    /// Code that jobs without a queue share.
    compiled: Compiled,
    /// Jobs in the queue.
    pending: HashMap<PolicyKey, Ticket>,
    /// Results that lanes wait for.
    finished: HashMap<PolicyKey, CompileResult>,
    /// Policies asked for since the last [`Compiler::begin`].
    asked: Vec<PolicyKey>,
    /// Time spent on loading since then.
    took: Duration,
    /// The model of the slot whose lane is built.
    model: Option<ModelName>,
}

/// Why a policy is not loaded.
pub(super) enum NotLoaded {
    /// The policy cannot be used.
    Refused(Refusal),
    /// The policy is being compiled. Ask again when a job has finished.
    Pending,
}

impl Compiler {
    pub(super) fn new(engine: PolicyEngine) -> Self {
        Self {
            engine,
            loaded: HashMap::new(),
            names: HashMap::new(),
            queue: None,
            compiled: Compiled::new(),
            pending: HashMap::new(),
            finished: HashMap::new(),
            asked: Vec::new(),
            took: Duration::ZERO,
            model: None,
        }
    }

    /// Compiles on the threads of `queue` from now on.
    pub(super) fn use_queue(&mut self, queue: CompileQueue) {
        self.queue = Some(queue);
        self.compiled = Compiled::new();
    }

    /// Returns whether no job is pending.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// Takes the result of a job. Returns whether it is still wanted.
    pub(super) fn finish(&mut self, finished: Finished) -> bool {
        let Finished { key, number, result } = finished;
        // The job may have been cancelled as it ended, and its policy asked for again.
        if self.pending.get(&key).is_none_or(|ticket| ticket.number != number) {
            return false;
        }
        self.pending.remove(&key);
        self.keep(key, result);
        true
    }

    /// Returns the name of a policy that was loaded before.
    pub(super) fn name(&self, digest: Digest) -> Option<&str> {
        self.names.get(&digest).map(|name| &**name)
    }

    fn keep(&mut self, mut key: PolicyKey, result: CompileResult) {
        if let Ok(policy) = &result.policy {
            let name = &policy.info().name;
            self.names.insert(key.digest(), name.clone());
            key = key.named(name);
            self.loaded.insert(key.clone(), policy.downgrade());
        }
        self.finished.insert(key, result);
    }

    /// Drops what no slot runs, and cancels what no lane waits for: a file that changes all the time must not
    /// leave a compile and its instances behind for each of its contents.
    pub(super) fn release_unwanted(&mut self, wanted: &HashSet<&PolicyKey>) {
        self.pending.retain(|key, ticket| {
            let keep = wanted.contains(key);
            if !keep {
                ticket.cancel.cancel();
            }
            keep
        });
        self.finished.retain(|key, _| wanted.contains(key));
        self.loaded.retain(|_, policy| policy.is_loaded());
    }

    /// Starts the build of one lane of the slot of a model, or of one without a model.
    pub(super) fn begin(&mut self, model: Option<ModelName>) {
        (self.took, self.model) = (Duration::ZERO, model);
        self.asked.clear();
    }

    /// Returns the policies asked for since [`Compiler::begin`].
    pub(super) fn asked(&mut self) -> Vec<PolicyKey> {
        std::mem::take(&mut self.asked)
    }

    /// Returns the time spent on loading since [`Compiler::begin`].
    pub(super) fn took(&self) -> Duration {
        self.took
    }

    /// Returns the policy that `job` makes: the loaded one, or a new one.
    pub(super) fn load(&mut self, job: CompileJob) -> Result<Arc<LoadedPolicy>, NotLoaded> {
        let key = job.key();
        self.asked.push(key.clone());
        if let Some(policy) = self.loaded.get(&key).and_then(|loaded| loaded.upgrade(&job.origin)) {
            self.took += self.finished.get(&key).map_or(Duration::ZERO, |result| result.took);
            return Ok(Arc::new(policy));
        }
        if self.pending.contains_key(&key) {
            return Err(NotLoaded::Pending);
        }
        let CompileResult { policy, took } = match (self.finished.remove(&key), &self.queue) {
            (Some(result), _) => result,
            (None, Some(queue)) => {
                let ticket = queue.submit(job, self.model.clone());
                self.pending.insert(key, ticket);
                return Err(NotLoaded::Pending);
            }
            (None, None) => {
                let result = job.run_sharing(&self.engine, &mut self.compiled);
                self.keep(key, result.clone());
                result
            }
        };
        self.took += took;
        policy.map_err(NotLoaded::Refused)
    }
}
