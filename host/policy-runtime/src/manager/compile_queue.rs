//! Where files become policies: two threads of low priority beside the manager, one for small files and one for large ones, so
//! that a policy of a few kilobytes, or an operator's command, does not wait for one of many megabytes.

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

/// Bytes of a small file: compiled within a second or so.
const SMALL: usize = 1 << 20;

/// Code, settings and file, and whose state it reaches with which grants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    digest: Digest,
    settings: String,
    file: Option<PathBuf>,
    state: usize,
    grants: Arc<[Grant]>,
}

/// A policy to load.
pub(super) struct Job {
    pub(super) digest: Digest,
    pub(super) bytes: Arc<[u8]>,
    pub(super) settings: String,
    pub(super) origin: Origin,
    pub(super) access: Access,
}

/// What became of a job.
pub(super) struct Made {
    pub(super) outcome: Result<Arc<LoadedPolicy>, Refusal>,
    pub(super) took: Duration,
}

/// The two threads. They end when this is dropped and their job is done.
pub(super) struct CompileQueue {
    small: std_mpsc::Sender<Job>,
    large: std_mpsc::Sender<Job>,
}

impl Job {
    pub(super) fn key(&self) -> Key {
        let file = match &self.origin {
            Origin::File(file) => Some(file.clone()),
            Origin::Embedded => None,
        };
        Key {
            digest: self.digest,
            settings: self.settings.clone(),
            file,
            state: Arc::as_ptr(self.access.state()) as usize,
            grants: self.access.granted().clone(),
        }
    }

    /// Does it, on this thread.
    pub(super) fn run(&self, engine: &PolicyEngine) -> Made {
        let begun = Instant::now();
        let make =
            || compile(engine, &self.bytes, &self.access)?.configure(self.origin.clone(), &self.settings);
        // A compiler that panics over a file must not take the thread with it.
        let outcome = catch_panic(make)
            .unwrap_or_else(|said| Err(Refusal::Compile(truncate(format!("the compiler panicked: {said}")))));
        Made { outcome: outcome.map(Arc::new), took: begun.elapsed() }
    }
}

impl CompileQueue {
    /// Starts the threads; what they made goes to `made`.
    pub(super) fn start(
        engine: &PolicyEngine,
        made: &mpsc::UnboundedSender<(Key, Made)>,
    ) -> io::Result<Self> {
        let one = |name: &str| {
            let (sender, jobs) = std_mpsc::channel::<Job>();
            let (engine, made) = (engine.clone(), made.clone());
            std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                // On Linux this lowers the calling thread alone: a compile yields to requests.
                if let Err(error) = rustix::process::setpriority_process(None, 19) {
                    tracing::debug!(%error, "a compile thread keeps its priority");
                }
                while let Ok(job) = jobs.recv() {
                    if made.send((job.key(), job.run(&engine))).is_err() {
                        return;
                    }
                }
            })?;
            Ok::<_, io::Error>(sender)
        };
        Ok(Self { small: one("pointsman-forge-s")?, large: one("pointsman-forge-l")? })
    }

    pub(super) fn take(&self, job: Job) {
        let thread = if job.bytes.len() <= SMALL { &self.small } else { &self.large };
        // They live as long as this does.
        let _ = thread.send(job);
    }
}
