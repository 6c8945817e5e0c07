//! Compiles policies on two threads of low priority: one for small files and one for large ones. A policy of
//! a few kilobytes does not wait behind one of many megabytes, and the manager's thread stays free for
//! commands.

use std::{
    io,
    path::PathBuf,
    sync::{Arc, mpsc as std_mpsc},
    time::Duration,
};

use pointsman_routing::{Digest, Origin};
use tokio::{sync::mpsc, time::Instant};

use crate::{
    access::{Access, Grant},
    catch_panic::catch_panic,
    engine::PolicyEngine,
    guest_info::truncate,
    loaded::{LoadedPolicy, compile},
    refusal::Refusal,
};

/// Largest small file, bytes. Compiling one takes about a second at most.
const MAX_SMALL_BYTES: usize = 1 << 20;

/// Identifies a loaded policy: code, settings, file, and the state and grants of its slot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PolicyKey {
    digest: Digest,
    settings: String,
    file: Option<PathBuf>,
    /// Address of the slot's state.
    state: usize,
    grants: Arc<[Grant]>,
}

/// A policy to compile and configure.
pub(super) struct CompileJob {
    pub(super) digest: Digest,
    pub(super) bytes: Arc<[u8]>,
    pub(super) settings: String,
    pub(super) origin: Origin,
    pub(super) access: Access,
}

/// Result of a job.
#[derive(Clone)]
pub(super) struct CompileResult {
    pub(super) policy: Result<Arc<LoadedPolicy>, Refusal>,
    pub(super) took: Duration,
}

/// The two threads. After this is dropped they finish their job and end.
pub(super) struct CompileQueue {
    small: std_mpsc::Sender<CompileJob>,
    large: std_mpsc::Sender<CompileJob>,
}

impl CompileJob {
    pub(super) fn key(&self) -> PolicyKey {
        let file = match &self.origin {
            Origin::File(file) => Some(file.clone()),
            Origin::Embedded => None,
        };
        PolicyKey {
            digest: self.digest,
            settings: self.settings.clone(),
            file,
            state: Arc::as_ptr(self.access.state()) as usize,
            grants: self.access.granted().clone(),
        }
    }

    /// Runs the job on this thread.
    pub(super) fn run(&self, engine: &PolicyEngine) -> CompileResult {
        let begun = Instant::now();
        let make =
            || compile(engine, &self.bytes, &self.access)?.configure(self.origin.clone(), &self.settings);
        // A panic over one file must not end the thread.
        let outcome = catch_panic(make).unwrap_or_else(|panic| {
            Err(Refusal::Compile(truncate(format!("the compiler panicked: {panic}"))))
        });
        CompileResult { policy: outcome.map(Arc::new), took: begun.elapsed() }
    }
}

impl CompileQueue {
    /// Starts the threads. They send their results to `results`.
    pub(super) fn start(
        engine: &PolicyEngine,
        results: &mpsc::UnboundedSender<(PolicyKey, CompileResult)>,
    ) -> io::Result<Self> {
        let one = |name: &str| {
            let (sender, jobs) = std_mpsc::channel::<CompileJob>();
            let (engine, results) = (engine.clone(), results.clone());
            std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                // On Linux this changes the calling thread only: compiles yield to requests.
                if let Err(error) = rustix::process::setpriority_process(None, 19) {
                    tracing::debug!(%error, "compile thread keeps its priority");
                }
                while let Ok(job) = jobs.recv() {
                    if results.send((job.key(), job.run(&engine))).is_err() {
                        return;
                    }
                }
            })?;
            Ok::<_, io::Error>(sender)
        };
        Ok(Self { small: one("compile-small")?, large: one("compile-large")? })
    }

    /// Queues a job.
    pub(super) fn submit(&self, job: CompileJob) {
        let thread = if job.bytes.len() <= MAX_SMALL_BYTES { &self.small } else { &self.large };
        // The threads live as long as this queue.
        let _ = thread.send(job);
    }
}
