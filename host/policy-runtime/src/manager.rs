//! The policy manager: the one writer of the slots. Watches the policy folder, admits what appears there, installs it, and
//! rolls back what fails in its first calls.
//!
//! A file's name says its slot (`prefill.wasm`, `<model>/decode.wasm`, …); its content decides whether anything changed.
//! It runs on a thread of its own, of low priority, where compiling blocks nobody.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use pointsman_routing::{Program, Slot, SlotEvent};
use tokio::sync::{mpsc, watch};

use crate::{access::Access, engine::PolicyEngine, refusal::Refusal};

mod folder;
mod slots;
mod status;

use folder::Folder;
use slots::Managed;
pub use status::{ManagerStatus, RefusalRecord, ReloadCount, SlotState, SlotStatus};

/// How a fresh generation is watched.
#[derive(Clone, Copy, Debug)]
pub struct Probation {
    /// Its first calls, in which failures lead to a rollback.
    pub calls: u64,
    /// Share of failed calls, 0 to 1, above which it is rolled back. A call that had to be stopped at its deadline is
    /// enough by itself.
    pub failure_share: f64,
}

impl Default for Probation {
    fn default() -> Self {
        Self { calls: 1_000, failure_share: 0.05 }
    }
}

/// One slot to manage.
#[derive(Debug)]
pub struct SlotConfig {
    /// The slot.
    pub slot: Arc<Slot>,
    /// Its file, relative to the folder.
    pub file: PathBuf,
    /// JSON object handed to `configure`.
    pub settings: String,
    /// What its policies may reach; the state behind it is kept through reloads.
    pub access: Access,
    /// What serves while there is no file.
    pub default: Program,
}

/// What to manage.
#[derive(Debug)]
pub struct ManagerConfig {
    /// The policy folder; none: slots keep their defaults.
    pub dir: Option<PathBuf>,
    /// The slots.
    pub slots: Vec<SlotConfig>,
    /// How fresh generations are watched.
    pub probation: Probation,
    /// Quiet time after a change before files are read.
    pub debounce: Duration,
    /// How often files are read whatever the watch says.
    pub rescan: Duration,
}

/// A running manager. Dropping it ends its thread; the slots keep serving.
#[derive(Debug)]
pub struct PolicyManager {
    status: Arc<ArcSwap<ManagerStatus>>,
    changed: watch::Receiver<u64>,
    stop: Arc<tokio::sync::Notify>,
}

impl PolicyManager {
    /// Reads the folder once, so that what lies there serves from the first request on, and then goes on watching it.
    ///
    /// # Errors
    /// The operating system gives no thread, or the folder cannot be watched.
    pub fn start(
        engine: &PolicyEngine,
        config: ManagerConfig,
        events: mpsc::UnboundedReceiver<SlotEvent>,
    ) -> std::io::Result<Self> {
        let (folder, changes) = Folder::open(config.dir.clone())?;
        let (publish, changed) = watch::channel(0);
        let status = Arc::new(ArcSwap::from_pointee(ManagerStatus::default()));
        let managed = config.slots.into_iter().map(Managed::new).collect();
        let mut worker = Worker {
            engine: engine.clone(),
            folder,
            managed,
            probation: config.probation,
            status: status.clone(),
            publish,
            counts: Vec::new(),
            strays: Vec::new(),
        };
        worker.scan();
        let stop = Arc::new(tokio::sync::Notify::new());
        let stopped = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        std::thread::Builder::new().name("pointsman-policies".to_owned()).spawn(move || {
            // On Linux this lowers the calling thread alone: a compile yields to requests.
            if let Err(error) = rustix::process::setpriority_process(None, 19) {
                tracing::debug!(%error, "the policy thread keeps its priority");
            }
            runtime.block_on(async {
                tokio::select! {
                    () = worker.run(changes, events, config.debounce, config.rescan) => {}
                    () = stopped.notified() => {}
                }
            });
        })?;
        Ok(Self { status, changed, stop })
    }

    /// What every slot runs, and what was refused and why.
    #[must_use]
    pub fn status(&self) -> Arc<ManagerStatus> {
        self.status.load_full()
    }

    /// Changes with every status.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }
}

impl Drop for PolicyManager {
    fn drop(&mut self) {
        self.stop.notify_one();
    }
}

struct Worker {
    engine: PolicyEngine,
    folder: Folder,
    managed: Vec<Managed>,
    probation: Probation,
    status: Arc<ArcSwap<ManagerStatus>>,
    publish: watch::Sender<u64>,
    counts: Vec<ReloadCount>,
    /// Files that are no slot's.
    strays: Vec<PathBuf>,
}

impl Worker {
    async fn run(
        &mut self,
        mut changes: mpsc::UnboundedReceiver<()>,
        mut events: mpsc::UnboundedReceiver<SlotEvent>,
        debounce: Duration,
        rescan: Duration,
    ) {
        loop {
            tokio::select! {
                Some(event) = events.recv() => self.failed(&event),
                Some(()) = changes.recv() => {
                    settle(&mut changes, debounce).await;
                    self.scan();
                }
                () = tokio::time::sleep(rescan) => self.scan(),
            }
        }
    }

    /// Reads every slot's file and acts on what is new.
    fn scan(&mut self) {
        let mut changed = false;
        for place in 0..self.managed.len() {
            let Some(managed) = self.managed.get_mut(place) else { continue };
            let Some(outcome) = managed.scan(&self.folder, &self.engine) else { continue };
            changed = true;
            self.count(outcome);
        }
        changed |= self.note_strays();
        if changed || *self.publish.borrow() == 0 {
            self.publish();
        }
    }

    fn failed(&mut self, event: &SlotEvent) {
        let probation = self.probation;
        let managed = self.managed.iter_mut().find(|managed| managed.is_of(event));
        if managed.is_some_and(|managed| managed.failed(event, probation)) {
            self.count(("rolled_back", event.failure.kind()));
            self.publish();
        }
    }

    fn note_strays(&mut self) -> bool {
        let strays = self.folder.strays(self.managed.iter().map(Managed::file));
        let fresh: Vec<PathBuf> =
            strays.iter().filter(|stray| !self.strays.contains(stray)).cloned().collect();
        let names: Vec<String> =
            self.managed.iter().map(|managed| managed.file().display().to_string()).collect();
        for stray in &fresh {
            let refusal = Refusal::NoSlot(names.join(", "));
            tracing::warn!(file = %stray.display(), kind = refusal.kind(), %refusal, "policy refused");
            self.count(("refused", refusal.kind()));
        }
        let changed = strays != self.strays;
        self.strays = strays;
        changed
    }

    fn count(&mut self, (result, reason): (&'static str, &'static str)) {
        match self.counts.iter_mut().find(|count| count.result == result && count.reason == reason) {
            Some(count) => count.count += 1,
            None => self.counts.push(ReloadCount { result, reason, count: 1 }),
        }
    }

    fn publish(&mut self) {
        self.status.store(Arc::new(ManagerStatus {
            slots: self.managed.iter().map(Managed::status).collect(),
            reloads: self.counts.clone(),
            strays: self.strays.iter().map(|stray| stray.display().to_string()).collect(),
        }));
        self.publish.send_modify(|version| *version += 1);
    }
}

/// Waits until changes have been quiet for `quiet`, or ten times that has passed.
async fn settle(changes: &mut mpsc::UnboundedReceiver<()>, quiet: Duration) {
    let limit = tokio::time::Instant::now() + quiet * 10;
    while tokio::time::Instant::now() < limit {
        match tokio::time::timeout(quiet, changes.recv()).await {
            Ok(Some(())) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
