//! Compiles policy files in processes of their own, so that a file that makes the compiler loop, or take all
//! memory, or overflow its stack costs that process and not the daemon.
//!
//! A process is the daemon's own binary with a hidden command. The first one reads the file from stdin and
//! answers on stdout what it is. It compiles the file, or returns its parts: the large modules of an
//! interpreter,
//! which policies share, and the component without them. A process that sees that part only compiles each
//! part
//! whose code the cache does not have.
//!
//! Each process writes machine code into a directory of its own. The daemon computes the name of the entry
//! from
//! the bytes, and moves the entry of this name into the cache: no file can place code under the name of
//! another.
//! Knows no wasmtime; `compile_child` is the other side.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use pointsman_routing::Digest;

use crate::{outline::Outline, refusal::Refusal};

mod cancel;
mod code_store;
mod private_dir;
mod quarantine;
mod supervise;
pub(crate) mod wire;

pub(crate) use cancel::Cancel;
use code_store::{CodeStore, WorkDir};
use private_dir::PrivateDir;
use quarantine::Quarantine;
pub use quarantine::{QuarantinedFile, clear_quarantine, quarantined_files};
use supervise::Ended;
use wire::{Reply, Request, Task};

/// Shared modules whose code a private directory keeps: those of about five interpreters.
const KEPT_MODULES: usize = 16;

/// Priority of threads and processes that compile: they yield to requests, and on a busy machine a policy of
/// 100 KB still compiles within seconds. At 19 it took a minute.
pub(crate) const COMPILE_NICE: i32 = 10;

/// Limits of the process that compiles one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Address space, bytes.
    pub memory_bytes: u64,
    /// CPU time.
    pub cpu: Duration,
    /// Wall-clock time. Much longer than the CPU time: a process that waits for others is not to blame.
    pub timeout: Duration,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { memory_bytes: 2 << 30, cpu: Duration::from_secs(60), timeout: Duration::from_mins(10) }
    }
}

/// Starts and watches compiler processes.
#[derive(Debug)]
pub(crate) struct CompilerProcess {
    program: PathBuf,
    limits: CompileLimits,
    dir: CacheDir,
    quarantine: Quarantine,
    /// Held for reading while a file is compiled and loaded; a private directory is emptied in between.
    in_use: RwLock<()>,
    /// Entries that a private directory keeps: the modules that policies shared last.
    shared: Mutex<VecDeque<String>>,
    /// Files and parts that were compiled and not found in the cache.
    compiled: AtomicU64,
    /// Whether the daemon is about to end.
    draining: AtomicBool,
}

/// Directory through which the compiler process hands compiled code to the daemon.
#[derive(Debug)]
enum CacheDir {
    /// The configured cache. It keeps its content.
    Kept(PathBuf),
    /// A directory that lasts as long as the engine.
    Private(PrivateDir),
}

/// A compiled file: what it is, and its parts.
pub(crate) struct Compiled {
    pub(crate) outline: Outline,
    /// The component, when it is not the file.
    pub(crate) component: Option<Vec<u8>>,
    /// Modules that the component imports.
    pub(crate) modules: Vec<Vec<u8>>,
}

/// A file to compile.
pub(crate) struct Job<'a> {
    pub(crate) bytes: &'a [u8],
    pub(crate) target: Target,
    pub(crate) cancel: &'a Cancel,
    /// Returns the name of the cache's entry for the code of some bytes.
    pub(crate) key: &'a (dyn Fn(&[u8]) -> String + Sync),
}

/// Options of the processes that compile a file.
struct Manner<'a> {
    /// Whether they lower their priority.
    yields: bool,
    /// Called with the reason when the file ended a process.
    died: &'a dyn Fn(&str),
}

/// Settings of the engine that will run the code, for the child.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Largest file, bytes.
    pub(crate) file_bytes: usize,
    /// Maximum linear memory of an instance, bytes.
    pub(crate) memory_bytes: usize,
    /// Address space of a memory, bytes. `None`: wasmtime's default.
    pub(crate) reservation: Option<u64>,
}

impl CompilerProcess {
    /// Makes a compiler that runs `program`. Without a `cache`, code passes through a private directory.
    ///
    /// # Errors
    /// No directory can be created.
    pub(crate) fn new(
        program: PathBuf,
        limits: CompileLimits,
        cache: Option<&Path>,
    ) -> std::io::Result<Self> {
        let dir = match cache {
            Some(dir) => CacheDir::Kept(std::path::absolute(dir)?),
            None => CacheDir::Private(PrivateDir::create()?),
        };
        let quarantine = match &dir {
            CacheDir::Kept(dir) => Quarantine::load(Some(dir.join(quarantine::FILE_NAME))),
            CacheDir::Private(_) => Quarantine::load(None),
        };
        let made = Self {
            program,
            limits,
            dir,
            quarantine,
            in_use: RwLock::new(()),
            shared: Mutex::default(),
            compiled: AtomicU64::new(0),
            draining: AtomicBool::new(false),
        };
        code_store::remove_abandoned(made.base());
        Ok(made)
    }

    /// Returns the directory of wasmtime's cache.
    pub(crate) fn cache_dir(&self) -> PathBuf {
        code_dir(self.base())
    }

    fn base(&self) -> &Path {
        match &self.dir {
            CacheDir::Kept(dir) => dir,
            CacheDir::Private(dir) => dir.path(),
        }
    }

    fn store(&self) -> CodeStore {
        CodeStore::new(self.cache_dir())
    }

    /// Returns whether the cache outlives the engine.
    pub(crate) fn keeps_cache(&self) -> bool {
        matches!(self.dir, CacheDir::Kept(_))
    }

    /// Number of files and parts that were compiled because the cache did not have them.
    pub(crate) fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Notes that the daemon is about to end. What ends it may end a compiler process, too, so that no file
    /// is quarantined any more.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Compiles a file in new processes, and passes the result to `load`, which finds the code in the cache.
    ///
    /// # Errors
    /// The refusal of a process, or of the way it ended.
    pub(crate) fn compile<T>(
        &self,
        job: &Job<'_>,
        digest: Digest,
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.quarantine.check(digest, &self.limits)?;
        let died = |how: &str| {
            tracing::warn!(%digest, how, "compiler process died; its file is quarantined");
            self.quarantine.add(digest, how, &self.limits);
        };
        self.run_and_load(job, &Manner { yields: true, died: &died }, load)
    }

    /// Like [`Self::compile`], but for a built-in policy: with the priority of this thread, and never
    /// quarantined.
    pub(crate) fn compile_built_in<T>(
        &self,
        job: &Job<'_>,
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.run_and_load(job, &Manner { yields: false, died: &|_| {} }, load)
    }

    fn run_and_load<T>(
        &self,
        job: &Job<'_>,
        manner: &Manner<'_>,
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let outcome = {
            let _in_use = self.in_use.read();
            self.run(job, manner).and_then(load)
        };
        if let (CacheDir::Private(_), Some(_alone)) = (&self.dir, self.in_use.try_write()) {
            self.store().keep_only(&self.shared.lock());
        }
        outcome
    }

    /// Lets the process examine the file, and compile it if the cache lacks its code.
    fn run(&self, job: &Job<'_>, manner: &Manner<'_>) -> Result<Compiled, Refusal> {
        let whole = (job.key)(job.bytes);
        let task = Task::File { compile: !self.store().has(&whole) };
        let (reply, mut parts) = self.process(task, job.bytes, &whole, job, manner)?;
        let Reply::File { outline, .. } = reply else {
            return Err(Refusal::CompilerDied("the compiler process gave no answer".to_owned()));
        };
        // The component comes first; it is empty when it is the file.
        let component =
            (!parts.is_empty()).then(|| parts.remove(0)).filter(|component| !component.is_empty());
        let modules = parts;
        for part in modules.iter().chain(&component) {
            let key = (job.key)(part);
            if !self.store().has(&key) {
                self.process(Task::Part, part, &key, job, manner)?;
            }
        }
        if matches!(self.dir, CacheDir::Private(_)) {
            note_used(&mut self.shared.lock(), modules.iter().map(|module| (job.key)(module)));
        }
        Ok(Compiled { outline, component, modules })
    }

    /// Runs one process over `bytes`, and takes the entry `key` from what it compiled.
    fn process(
        &self,
        task: Task,
        bytes: &[u8],
        key: &str,
        job: &Job<'_>,
        manner: &Manner<'_>,
    ) -> Result<(Reply, Vec<Vec<u8>>), Refusal> {
        let work = WorkDir::create(self.base()).map_err(|error| {
            let dir = self.base().display();
            Refusal::NotCompiled(format!(
                "the directory {dir} for compiled code cannot be written: {error}; see `compile_cache` in [policies]"
            ))
        })?;
        let request = Request::new(task, job.target, &self.limits, work.path().to_owned(), manner.yields);
        match supervise::run(&self.program, &request, bytes, &self.limits, job.cancel) {
            Ended::Answered(Reply::Refused(refusal), _) => Err(refusal.into()),
            Ended::Answered(reply, parts) => {
                let compiled = matches!(reply, Reply::Part | Reply::File { compiled: true, .. });
                if compiled && self.store().take(work.path(), key) {
                    self.compiled.fetch_add(1, Ordering::Relaxed);
                }
                Ok((reply, parts))
            }
            Ended::Died(how) if self.draining.load(Ordering::Relaxed) => {
                Err(Refusal::NotCompiled(format!("the gateway drains, and {how}")))
            }
            Ended::Died(how) => {
                (manner.died)(&how);
                Err(Refusal::CompilerDied(how))
            }
            Ended::Failed(how) => Err(Refusal::CompilerDied(how)),
            Ended::NotRun(how) => Err(Refusal::NotCompiled(how)),
        }
    }
}

/// Puts `names` last in `kept`, and drops the first ones above the limit.
fn note_used(kept: &mut VecDeque<String>, names: impl Iterator<Item = String>) {
    for name in names {
        kept.retain(|other| *other != name);
        kept.push_back(name);
    }
    let surplus = kept.len().saturating_sub(KEPT_MODULES);
    kept.drain(..surplus);
}

/// Directory of wasmtime's cache in the compile cache. wasmtime removes files there that it does not know.
pub(crate) fn code_dir(cache: &Path) -> PathBuf {
    cache.join("code")
}

#[cfg(test)]
mod tests;
