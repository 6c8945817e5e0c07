//! Compiles policy files in a process of its own, so that a file that makes the compiler loop, or take all
//! memory, or overflow its stack costs that process and not the daemon.
//!
//! The process is the daemon's own binary with a hidden command. It reads the file from stdin, writes the
//! machine code into the compile cache, and answers on stdout what the file is. The daemon then finds the
//! code in the cache. Knows no wasmtime; `compile_child` is the other side.

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::RwLock;
use pointsman_routing::Digest;

use crate::{outline::Outline, refusal::Refusal};

mod cancel;
mod private_dir;
mod quarantine;
mod supervise;
pub(crate) mod wire;

pub(crate) use cancel::Cancel;
use private_dir::PrivateDir;
use quarantine::Quarantine;
pub use quarantine::{QuarantinedFile, clear_quarantine, quarantined_files};
use supervise::Ended;
use wire::{Reply, Request};

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
    /// Wall-clock time.
    pub timeout: Duration,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { memory_bytes: 2 << 30, cpu: Duration::from_secs(60), timeout: Duration::from_secs(120) }
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
    /// Files that were compiled and not found in the cache.
    compiled: AtomicU64,
}

/// Where compiled code goes from one process to the other.
#[derive(Debug)]
enum CacheDir {
    /// The configured cache. It keeps its content.
    Kept(PathBuf),
    /// A directory that lasts as long as the engine.
    Private(PrivateDir),
}

/// A compiled file: what it is, and its component when the file is a core module.
pub(crate) struct Compiled {
    pub(crate) outline: Outline,
    pub(crate) encoded: Option<Vec<u8>>,
}

/// Settings of the engine that will run the code, for the child.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Largest file, bytes.
    pub(crate) file_bytes: usize,
    /// Most linear memory of an instance, bytes.
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
        Ok(Self { program, limits, dir, quarantine, in_use: RwLock::new(()), compiled: AtomicU64::new(0) })
    }

    /// Returns the directory of wasmtime's cache.
    pub(crate) fn cache_dir(&self) -> PathBuf {
        code_dir(match &self.dir {
            CacheDir::Kept(dir) => dir,
            CacheDir::Private(dir) => dir.path(),
        })
    }

    /// Whether the cache outlives the engine.
    pub(crate) fn keeps_cache(&self) -> bool {
        matches!(self.dir, CacheDir::Kept(_))
    }

    /// Number of files that were compiled because the cache did not have them.
    pub(crate) fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Compiles a file in a new process, and passes the result to `load`, which finds the code in the cache.
    ///
    /// # Errors
    /// The refusal of the process, or of the way it ended.
    pub(crate) fn compile<T>(
        &self,
        bytes: &[u8],
        digest: Digest,
        target: Target,
        cancel: &Cancel,
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        self.quarantine.check(digest, &self.limits)?;
        let request = Request::new(target, &self.limits, self.cache_dir(), true);
        let died = |how: &str| {
            tracing::warn!(%digest, how, "compiler process died; its file is quarantined");
            self.quarantine.add(digest, how, &self.limits);
        };
        self.run_and_load(bytes, &request, cancel, died, load)
    }

    /// Like [`Self::compile`], but for a built-in policy: with the priority of this thread, and never
    /// quarantined.
    pub(crate) fn compile_built_in<T>(
        &self,
        bytes: &[u8],
        target: Target,
        cancel: &Cancel,
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let request = Request::new(target, &self.limits, self.cache_dir(), false);
        self.run_and_load(bytes, &request, cancel, |_| {}, load)
    }

    /// Runs a process, passes its result to `load`, and tells `died` how the file ended it.
    fn run_and_load<T>(
        &self,
        bytes: &[u8],
        request: &Request,
        cancel: &Cancel,
        died: impl FnOnce(&str),
        load: impl FnOnce(Compiled) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let outcome = {
            let _in_use = self.in_use.read();
            self.run(bytes, request, cancel, died).and_then(load)
        };
        if let (CacheDir::Private(dir), Some(_alone)) = (&self.dir, self.in_use.try_write()) {
            dir.empty();
        }
        outcome
    }

    fn run(
        &self,
        bytes: &[u8],
        request: &Request,
        cancel: &Cancel,
        died: impl FnOnce(&str),
    ) -> Result<Compiled, Refusal> {
        match supervise::run(&self.program, request, bytes, &self.limits, cancel) {
            Ended::Answered(Reply::Compiled { outline, cached, .. }, encoded) => {
                self.compiled.fetch_add(u64::from(!cached), Ordering::Relaxed);
                Ok(Compiled { outline, encoded })
            }
            Ended::Answered(Reply::Refused(refusal), _) => Err(refusal.into()),
            Ended::Died(how) => {
                died(&how);
                Err(Refusal::CompilerDied(how))
            }
            // Another try may succeed: on a busy machine a small file can take this long.
            Ended::Failed(how) => Err(Refusal::CompilerDied(how)),
        }
    }
}

/// Directory of wasmtime's cache in the compile cache. wasmtime removes files there that it does not know.
pub(crate) fn code_dir(cache: &Path) -> PathBuf {
    cache.join("code")
}
