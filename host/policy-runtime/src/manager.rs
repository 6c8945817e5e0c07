//! The policy manager: the one writer of the slots. Watches the policy folder, admits what appears there, installs it, and
//! rolls back what fails in its first calls.
//!
//! A file's name says its slot and lane (`prefill.wasm`, `prefill.canary.wasm`, `<model>/decode.wasm`, …); `parts/NAME.wasm` are
//! parts that specs name. Content decides whether anything changed. It runs on a thread of its own,
//! as operators' commands and failures do; compiling is done beside it (`compile_queue`), and what was made is installed if it is still
//! what the folder says.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use pointsman_routing::{Program, Slot, SlotEvent, SlotKind};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    access::Access,
    engine::PolicyEngine,
    meter::Usage,
    refusal::Refusal,
    spec::{LaneSpec, SlotSpec},
    state::State,
    trust::TrustRules,
};

mod command;
mod compile_queue;
mod folder;
mod managed_lane;
mod managed_slot;
mod manager_task;
mod program_builder;
mod status;

use command::Order;
pub use command::{Change, Command, CommandError, Report, SlotName};
use compile_queue::CompileQueue;
use folder::Folder;
use managed_lane::Content;
pub use managed_lane::Source;
use managed_slot::ManagedSlot;
use manager_task::ManagerTask;
use program_builder::{BuildError, ProgramBuilder};
pub use status::{
    ChangeRecord, LaneStatus, ManagerStatus, MemoryStatus, PartStatus, RefusalRecord, ReloadCount, SlotState,
    SlotStatus,
};

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
    /// What it runs.
    pub spec: SlotSpec,
    /// What its policies may reach; the state behind it is kept through reloads.
    pub access: Access,
    /// What its first generation was made of; `None`: of something else than the spec says.
    pub initial: Option<InitialContent>,
}

/// What to manage.
#[derive(Debug)]
pub struct ManagerConfig {
    /// The slots.
    pub slots: Vec<SlotConfig>,
    /// How fresh generations are watched.
    pub probation: Probation,
    /// Quiet time after a change before files are read.
    pub debounce: Duration,
    /// How often files are read whatever the watch says.
    pub rescan: Duration,
}

/// The folder dir, before there is anything to manage: makes the first generations.
pub struct PolicyDir {
    builder: ProgramBuilder,
    changes: mpsc::UnboundedReceiver<()>,
}

/// Stands for the content that a first generation was made of.
#[derive(Clone, Copy, Debug)]
pub struct InitialContent(Content);

/// A running manager. Dropping it ends its thread; the slots keep serving.
#[derive(Debug)]
pub struct PolicyManager {
    status: Arc<ArcSwap<ManagerStatus>>,
    slots: Vec<Arc<Slot>>,
    states: Vec<Arc<State>>,
    engine: PolicyEngine,
    changed: watch::Receiver<u64>,
    orders: mpsc::UnboundedSender<Order>,
    stop: Arc<tokio::sync::Notify>,
}

impl PolicyDir {
    /// Opens the policy folder; without one slots run what their specs say.
    ///
    /// # Errors
    /// There is no such folder.
    pub fn open(engine: &PolicyEngine, dir: Option<PathBuf>, trust: TrustRules) -> std::io::Result<Self> {
        let (folder, changes) = Folder::open(dir)?;
        Ok(Self { builder: ProgramBuilder::new(engine.clone(), folder, trust), changes })
    }

    /// Makes what a lane runs while its own file is not there.
    ///
    /// # Errors
    /// The refusal of the first part that cannot be used.
    pub fn initial(
        &mut self,
        kind: SlotKind,
        spec: &LaneSpec,
        access: &Access,
    ) -> Result<(Program, InitialContent), Refusal> {
        let planned = self.builder.plan(None, spec).map_err(|refused| *refused.refusal)?;
        let mut planned = planned.ok_or_else(|| Refusal::MissingPart(kind.to_string()))?;
        let program = self.builder.assemble(kind, &mut planned, spec, access);
        let program = program.map_err(|halt| match halt {
            BuildError::Refused(refused) => *refused.refusal,
            // Only a running manager has a compile_queue to wait for.
            BuildError::Pending => Refusal::MissingPart(kind.to_string()),
        })?;
        let (fingerprint, main) = (planned.fingerprint, planned.main());
        Ok((program, InitialContent(Content { fingerprint, main, source: Source::Default })))
    }
}

impl std::fmt::Debug for PolicyDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyDir").field("trust", &self.builder.trust).finish_non_exhaustive()
    }
}

impl PolicyManager {
    /// Reads the folder once, so that what lies there serves from the first request on, and then goes on watching it.
    ///
    /// # Errors
    /// The operating system gives no thread.
    pub fn start(
        dir: PolicyDir,
        config: ManagerConfig,
        events: mpsc::UnboundedReceiver<SlotEvent>,
    ) -> std::io::Result<Self> {
        let PolicyDir { builder, changes } = dir;
        let (publish, changed) = watch::channel(0);
        let (orders, commands) = mpsc::unbounded_channel();
        let status = Arc::new(ArcSwap::from_pointee(ManagerStatus::default()));
        let engine = builder.engine.clone();
        let slots = config.slots.iter().map(|slot| slot.slot.clone()).collect();
        let states = config.slots.iter().map(|slot| slot.access.state().clone()).collect();
        let managed = config.slots.into_iter().map(ManagedSlot::new).collect();
        let mut task = ManagerTask::new(builder, managed, config.probation, status.clone(), publish);
        // The first scan compiles by itself: what lies there serves from the first request on.
        task.scan();
        let (forged, made) = mpsc::unbounded_channel();
        task.use_compile_queue(CompileQueue::start(&engine, &forged)?);
        let stop = Arc::new(tokio::sync::Notify::new());
        let stopped = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        std::thread::Builder::new().name("pointsman-policies".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = task.run(changes, events, commands, made, config.debounce, config.rescan) => {}
                    () = stopped.notified() => {}
                }
            });
        })?;
        Ok(Self { status, slots, states, engine, changed, orders, stop })
    }

    /// Has something done, and waits until it is: a reload and new specs wait for compiles, theirs and those under way; a
    /// rollback and a promotion wait for none.
    ///
    /// # Errors
    /// [`CommandError`] when it cannot be done.
    pub async fn execute(&self, command: Command) -> Result<Report, CommandError> {
        let (answer, answered) = oneshot::channel();
        self.orders.send((command, answer)).map_err(|_| CommandError::Ended)?;
        answered.await.map_err(|_| CommandError::Ended)?
    }

    /// What every slot runs, and what was refused and why. Counts are those of now.
    #[must_use]
    pub fn status(&self) -> Arc<ManagerStatus> {
        let mut status = self.status.load_full();
        let fresh = Arc::make_mut(&mut status);
        for ((slot, state), status) in self.slots.iter().zip(&self.states).zip(&mut fresh.slots) {
            let snapshot = slot.snapshot();
            status.refresh(&snapshot.active, snapshot.canary.as_ref(), snapshot.shadow.as_ref(), state);
        }
        status
    }

    /// Every slot, in the order of the status.
    #[must_use]
    pub fn slots(&self) -> &[Arc<Slot>] {
        &self.slots
    }

    /// What policies take now, all slots together.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.engine.usage()
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

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
