//! Compiles policies on a few threads of low priority, so that the manager's thread stays free for commands.
//!
//! A slot has one compile of a small and one of a large file at a time, and large files leave one thread to
//! small ones: a file that takes long holds up its own slot at most, and a policy of a few kilobytes does not
//! wait behind one of many megabytes. Slots without a model are first: their files do not wait for those of
//! hundreds of models. Models take turns: one with many files does not hold back the others. Built-in
//! policies are the exception: their code is compiled once for all slots, and the other jobs that need such
//! code wait for that, each on its thread.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::Arc,
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use pointsman_routing::{Digest, Origin};
use pointsman_workers::ModelName;
use tokio::{sync::mpsc, time::Instant};

use crate::{
    access::{Access, Grant},
    catch_panic::catch_panic,
    compiler_process::{COMPILE_NICE, Cancel},
    engine::PolicyEngine,
    guest_info::truncate,
    loaded::{CompiledPolicy, LoadedPolicy, compile_apart, compile_built_in},
    refusal::Refusal,
};

/// Largest small file, bytes. Compiling one takes about a second at most.
const MAX_SMALL_BYTES: usize = 1 << 20;
/// Settings of a policy that gets none.
pub(super) const NO_SETTINGS: &str = "{}";
/// Number of threads.
const THREADS: usize = 3;

/// Identifies a loaded policy: code, settings, and the state and grants of its slot. It leaves
/// out the file's name: content that moves to another file is not compiled again.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PolicyKey {
    digest: Digest,
    settings: String,
    settings_for: Option<String>,
    /// Address of the slot's state.
    state: usize,
    grants: Arc<[Grant]>,
}

/// A policy to compile and configure.
pub(super) struct CompileJob {
    pub(super) digest: Digest,
    pub(super) bytes: Arc<[u8]>,
    /// Digest of the bytes. That of a formula file is another one.
    pub(super) code: Digest,
    pub(super) is_built_in: bool,
    pub(super) settings: String,
    /// Name of the policy that gets the settings; another one gets `{}`. `None`: any policy.
    pub(super) settings_for: Option<String>,
    pub(super) origin: Origin,
    pub(super) access: Access,
}

/// Compiled policies by digest of their code, and grants.
pub(super) type Compiled = HashMap<(Digest, Arc<[Grant]>), CompiledPolicy>;

/// Code of the built-in policies that jobs asked for. It is compiled once: a formula that is edited, or other
/// settings, configure the same code again.
#[derive(Default)]
struct BuiltInCode {
    compiled: Mutex<HashMap<Digest, CompiledPolicy>>,
    /// Cancelled when the queue is dropped. A file that changes does not cancel such a compile: the code is
    /// the same, and frequent changes would cancel it each time.
    closed: Cancel,
}

/// Result of a job.
#[derive(Clone)]
pub(super) struct CompileResult {
    pub(super) policy: Result<Arc<LoadedPolicy>, Refusal>,
    pub(super) took: Duration,
}

/// A job in the queue.
pub(super) struct Ticket {
    pub(super) number: u64,
    pub(super) cancel: Cancel,
}

/// Result of a job, with the number of its ticket.
pub(super) struct Finished {
    pub(super) key: PolicyKey,
    pub(super) number: u64,
    pub(super) result: CompileResult,
}

/// The threads. When this is dropped, all jobs are cancelled and the threads end.
pub(super) struct CompileQueue(Arc<Shared>);

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    changed: Condvar,
    built_in: BuiltInCode,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Queued>,
    running: Vec<Running>,
    /// For each model, the number of its job that was taken last, while jobs wait.
    turns: HashMap<ModelName, u64>,
    /// Number of jobs that were taken.
    taken: u64,
    /// Number of the next ticket.
    next: u64,
    closed: bool,
}

struct Queued {
    job: CompileJob,
    /// The model of its slot, if it is that of one model.
    model: Option<ModelName>,
    number: u64,
    cancel: Cancel,
}

struct Running {
    number: u64,
    slot: usize,
    is_large: bool,
    cancel: Cancel,
}

impl PolicyKey {
    pub(super) fn digest(&self) -> Digest {
        self.digest
    }

    /// Returns the key of the same policy once it is known that it is called `name`.
    pub(super) fn named(self, name: &str) -> Self {
        let is_other = self.settings_for.is_some_and(|meant| meant != name);
        let settings = if is_other { NO_SETTINGS.to_owned() } else { self.settings };
        Self { settings, settings_for: None, ..self }
    }
}

impl CompileJob {
    pub(super) fn key(&self) -> PolicyKey {
        PolicyKey {
            digest: self.digest,
            settings: self.settings.clone(),
            settings_for: self.settings_for.clone(),
            state: self.slot(),
            grants: self.access.granted().clone(),
        }
    }

    /// Runs the job on this thread.
    fn run(&self, engine: &PolicyEngine, cancel: &Cancel, built_in: &BuiltInCode) -> CompileResult {
        self.run_with(|| {
            let compiled =
                if self.is_built_in { built_in.get(self, engine)? } else { self.compile(engine, cancel)? };
            if cancel.is_cancelled() {
                return Err(Refusal::CompilerDied("cancelled: the file changed".to_owned()));
            }
            Ok(compiled)
        })
    }

    /// Like [`Self::run`], with the code of an earlier job that had the same bytes and grants: most slots
    /// start with the same policy.
    pub(super) fn run_sharing(&self, engine: &PolicyEngine, earlier: &mut Compiled) -> CompileResult {
        self.run_with(|| {
            let key = (self.code, self.access.granted().clone());
            if let Some(compiled) = earlier.get(&key) {
                return Ok(compiled.with_access(&self.access));
            }
            let compiled = self.compile(engine, &Cancel::default())?;
            earlier.insert(key, compiled.with_access(&self.access));
            Ok(compiled)
        })
    }

    fn compile(&self, engine: &PolicyEngine, cancel: &Cancel) -> Result<CompiledPolicy, Refusal> {
        if self.is_built_in {
            compile_built_in(engine, &self.bytes, &self.access, cancel)
        } else {
            compile_apart(engine, &self.bytes, &self.access, cancel)
        }
    }

    fn run_with(&self, compile: impl FnOnce() -> Result<CompiledPolicy, Refusal>) -> CompileResult {
        let begun = Instant::now();
        // A panic over one file must not end the thread.
        let outcome = catch_panic(|| {
            let compiled = compile()?.identified_by(self.digest);
            let settings = match &self.settings_for {
                Some(meant) if compiled.name()? != *meant => NO_SETTINGS,
                _ => &self.settings,
            };
            compiled.configure(self.origin.clone(), settings)
        });
        let outcome = outcome.unwrap_or_else(|panic| {
            Err(Refusal::Compile(truncate(format!("the compiler panicked: {panic}"))))
        });
        CompileResult { policy: outcome.map(Arc::new), took: begun.elapsed() }
    }

    /// Identifies the slot, by the address of its state.
    fn slot(&self) -> usize {
        Arc::as_ptr(self.access.state()) as usize
    }

    fn is_large(&self) -> bool {
        self.bytes.len() > MAX_SMALL_BYTES
    }
}

impl CompileQueue {
    /// Starts the threads. They send their results to `results`.
    pub(super) fn start(
        engine: &PolicyEngine,
        results: &mpsc::UnboundedSender<Finished>,
    ) -> io::Result<Self> {
        let queue = Self(Arc::default());
        for number in 0..THREADS {
            let (shared, engine, results) = (queue.0.clone(), engine.clone(), results.clone());
            std::thread::Builder::new().name(format!("compile-{number}")).spawn(move || {
                // On Linux this changes the calling thread only: compiles yield to requests.
                if let Err(error) = rustix::process::setpriority_process(None, COMPILE_NICE) {
                    tracing::debug!(%error, "compile thread keeps its priority");
                }
                while let Some(Queued { job, number, cancel, .. }) = shared.next() {
                    let result = job.run(&engine, &cancel, &shared.built_in);
                    shared.end(number);
                    if !cancel.is_cancelled() {
                        // The manager may have ended.
                        let _ = results.send(Finished { key: job.key(), number, result });
                    }
                }
            })?;
        }
        Ok(queue)
    }

    /// Queues a job of the slot of a model, or of one without a model.
    pub(super) fn submit(&self, job: CompileJob, model: Option<ModelName>) -> Ticket {
        let mut jobs = self.0.jobs.lock();
        let (number, cancel) = (jobs.next, Cancel::default());
        jobs.next += 1;
        jobs.waiting.push_back(Queued { job, model, number, cancel: cancel.clone() });
        self.0.changed.notify_all();
        Ticket { number, cancel }
    }
}

impl Drop for CompileQueue {
    fn drop(&mut self) {
        let mut jobs = self.0.jobs.lock();
        jobs.closed = true;
        jobs.waiting.clear();
        jobs.running.iter().for_each(|running| running.cancel.cancel());
        self.0.built_in.closed.cancel();
        self.0.changed.notify_all();
    }
}

impl BuiltInCode {
    /// Returns the code of a job's policy for its slot. Compiles it if no job did before; other jobs of
    /// built-in policies wait meanwhile.
    fn get(&self, job: &CompileJob, engine: &PolicyEngine) -> Result<CompiledPolicy, Refusal> {
        let mut compiled = self.compiled.lock();
        if let Some(compiled) = compiled.get(&job.code) {
            return Ok(compiled.with_access(&job.access));
        }
        let fresh = job.compile(engine, &self.closed)?;
        // Built-in policies have the same grants in every slot. A kept one must not keep a slot's state.
        compiled.insert(job.code, fresh.with_access(&Access::new(&Access::ALL)));
        Ok(fresh)
    }
}

impl Shared {
    /// Waits for a job that may run now. `None` if the queue was dropped.
    fn next(&self) -> Option<Queued> {
        let mut jobs = self.jobs.lock();
        loop {
            if jobs.closed {
                return None;
            }
            jobs.waiting.retain(|queued| !queued.cancel.is_cancelled());
            if let Some(queued) = jobs.take() {
                return Some(queued);
            }
            self.changed.wait(&mut jobs);
        }
    }

    /// Notes that a job has ended.
    fn end(&self, number: u64) {
        self.jobs.lock().running.retain(|running| running.number != number);
        self.changed.notify_all();
    }
}

impl Jobs {
    /// Takes the first job whose slot has none of its kind running, and that leaves a thread to small files;
    /// those of slots without a model before all others, and then those of the model that had no turn for the
    /// longest time. A cancelled job does not count as running: it ends soon.
    fn take(&mut self) -> Option<Queued> {
        let large = self.running.iter().filter(|running| running.is_large).count();
        let may_run = |queued: &Queued| {
            let (slot, is_large) = (queued.job.slot(), queued.job.is_large());
            let mut same = self.running.iter().filter(|one| one.slot == slot && one.is_large == is_large);
            same.all(|one| one.cancel.is_cancelled()) && (!is_large || large + 1 < THREADS)
        };
        let ready = self.waiting.iter().enumerate().filter(|(_, queued)| may_run(queued));
        let turn = |(_, queued): &(usize, &Queued)| {
            queued.model.as_ref().map(|model| self.turns.get(model).copied().unwrap_or(0))
        };
        let (place, _) = ready.min_by_key(turn)?;
        let queued = self.waiting.remove(place)?;
        self.taken += 1;
        if self.waiting.is_empty() {
            self.turns.clear();
        } else if let Some(model) = queued.model.clone() {
            self.turns.insert(model, self.taken);
        }
        self.running.push(Running {
            number: queued.number,
            slot: queued.job.slot(),
            is_large: queued.job.is_large(),
            cancel: queued.cancel.clone(),
        });
        Some(queued)
    }
}

#[cfg(test)]
mod tests;
