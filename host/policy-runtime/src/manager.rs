//! The policy manager, the only writer of the slots. It watches the policy directory, loads what appears
//! there, installs it, and rolls back what fails in its first calls.
//!
//! The name of a file selects slot and lane: `prefill.wasm`, `prefill.canary.wasm`, `<model>/decode.wasm`.
//! A lane has either such a component or formulas, as `prefill.formula.toml`.
//! Specs name the files in `parts/`. The manager compares content, not times, to find changes.
//! Scans, commands and failures run on one thread; compiles run on others (`compile_queue`). When a
//! compile has finished, the lane's files are read again, so that only content that is still wanted is
//! installed.

use std::{path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use pointsman_routing::{Program, Slot, SlotEvent, SlotKind};
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::{
    access::Access,
    engine::PolicyEngine,
    formula::FormulaComponents,
    meter::Usage,
    refusal::Refusal,
    slot_log::{PolicyLines, SlotLog},
    spec::{LaneSpec, SlotSpec},
    state::State,
    trust::TrustRules,
};

mod command;
mod compile_queue;
mod compiler;
mod folder;
mod halves;
mod managed_lane;
mod managed_slot;
mod manager_task;
mod plan;
mod program_builder;
mod record;
mod status;
mod strays;

use command::QueuedCommand;
pub use command::{Command, CommandError, Report, SlotName};
use compile_queue::CompileQueue;
use folder::Folder;
use managed_lane::Content;
pub use managed_lane::Source;
use managed_slot::ManagedSlot;
use manager_task::ManagerTask;
use plan::Refused;
use program_builder::{BuildError, ProgramBuilder};
pub use record::{Change, ChangeRecord, RefusalRecord, ReloadCount, UndoneRollback};
pub use status::{
    CompilingStatus, LaneStatus, LaneSummary, ManagerStatus, MemoryStatus, PartStatus, RollbackStatus,
    SlotState, SlotStatus, SlotSummary,
};
pub use strays::check_file_name;

/// When a new generation is rolled back.
#[derive(Clone, Copy, Debug)]
pub struct Probation {
    /// Number of first calls in which failures can lead to a roll-back.
    pub calls: u64,
    /// Share of failed calls, 0 to 1, above which the generation is rolled back. A single call that exceeds
    /// its deadline is enough, whatever the share.
    pub failure_share: f64,
}

impl Default for Probation {
    fn default() -> Self {
        Self { calls: 1_000, failure_share: 0.05 }
    }
}

/// A slot to manage.
#[derive(Debug)]
pub struct SlotConfig {
    /// The slot.
    pub slot: Arc<Slot>,
    /// Policies that the slot should run.
    pub spec: SlotSpec,
    /// Grants, state and log of its policies. State and log survive reloads.
    pub access: Access,
    /// Content of its first generation. `None` if the generation does not run what the spec names.
    pub initial: Option<InitialContent>,
}

/// Slots and timing of a manager.
#[derive(Debug)]
pub struct ManagerConfig {
    /// The slots.
    pub slots: Vec<SlotConfig>,
    /// When new generations are rolled back.
    pub probation: Probation,
    /// Time without further changes before files are read.
    pub debounce: Duration,
    /// Interval of scans that no change caused.
    pub rescan: Duration,
    /// Longest time that the start, and a command that reads the directory, wait for compiles. A file that
    /// compiles longer is installed when it is ready.
    pub compile_wait: Duration,
}

/// The opened policy directory. It builds the first generations, and then becomes part of a
/// [`PolicyManager`].
pub struct PolicyDir {
    builder: ProgramBuilder,
    /// Signals that files changed.
    changes: Arc<Notify>,
}

/// Why a lane cannot use one of the parts that its spec names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartRefusal {
    /// File in the policy directory, or name of the built-in policy.
    pub part: PathBuf,
    /// Reason of the refusal.
    pub refusal: Refusal,
}

/// Identifies the content of a first generation.
#[derive(Clone, Copy, Debug)]
pub struct InitialContent(Content);

/// A running manager. Dropping it ends its thread; the slots continue to serve.
#[derive(Debug)]
pub struct PolicyManager {
    status: Arc<ArcSwap<ManagerStatus>>,
    slots: Vec<Arc<Slot>>,
    states: Vec<Arc<State>>,
    logs: Vec<Arc<SlotLog>>,
    engine: PolicyEngine,
    changed: watch::Receiver<u64>,
    commands: mpsc::UnboundedSender<QueuedCommand>,
    stop: Arc<Notify>,
}

impl PolicyDir {
    /// Opens the policy directory. Without one, slots run the content of their specs.
    ///
    /// # Errors
    /// `dir` is not a directory.
    pub fn open(engine: &PolicyEngine, dir: Option<PathBuf>, trust: TrustRules) -> std::io::Result<Self> {
        let (folder, changes) = Folder::open(dir)?;
        Ok(Self { builder: ProgramBuilder::new(engine.clone(), folder, trust), changes })
    }

    /// Serves formula files with the built-in policy `formula`.
    #[must_use]
    pub fn with_formulas(mut self, components: FormulaComponents) -> Self {
        self.builder.formulas = Some(components);
        self
    }

    /// Lists `names` of built-in policies in the refusal of a policy that is nowhere.
    #[must_use]
    pub fn with_built_in_names(mut self, names: &'static str) -> Self {
        self.builder.built_in = names;
        self
    }

    /// Builds the program that a lane runs without its own file. Returns `None` for a trial that exists only
    /// while its file does.
    ///
    /// # Errors
    /// Refusals of all parts that cannot be used.
    pub fn initial(
        &mut self,
        kind: SlotKind,
        spec: &LaneSpec,
        access: &Access,
    ) -> Result<Option<(Program, InitialContent)>, Vec<PartRefusal>> {
        let built = match self.builder.plan(None, spec) {
            Ok(None) => return Ok(None),
            Err(refused) => Err(BuildError::Refused(refused)),
            Ok(Some(mut plan)) => {
                self.builder.build((kind, None), &mut plan, spec, access).map(|program| (program, plan))
            }
        };
        let error = match built {
            Ok((program, plan)) => {
                return Ok(Some((program, InitialContent(plan.content(Source::Default)))));
            }
            Err(error) => error,
        };
        let mut all = self.builder.refused_parts(spec, access);
        if let BuildError::Refused(refused) = error {
            all.push(refused);
        }
        let mut refusals: Vec<PartRefusal> = Vec::new();
        for refused in all.iter().flat_map(Refused::all) {
            let part = PartRefusal { part: refused.file.clone(), refusal: (*refused.refusal).clone() };
            if !refusals.contains(&part) {
                refusals.push(part);
            }
        }
        Err(refusals)
    }
}

impl std::fmt::Debug for PolicyDir {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PolicyDir").field("trust", &self.builder.trust).finish_non_exhaustive()
    }
}

impl PolicyManager {
    /// Reads the directory once, so that its files serve from the first request on, and then watches it.
    ///
    /// # Errors
    /// The operating system starts no thread.
    pub fn start(
        dir: PolicyDir,
        config: ManagerConfig,
        events: mpsc::UnboundedReceiver<SlotEvent>,
    ) -> std::io::Result<Self> {
        let PolicyDir { builder, changes } = dir;
        let (publish, changed) = watch::channel(0);
        let (commands, queued) = mpsc::unbounded_channel();
        let status = Arc::new(ArcSwap::from_pointee(ManagerStatus::default()));
        let engine = builder.compiler.engine.clone();
        let slots = config.slots.iter().map(|slot| slot.slot.clone()).collect();
        let states = config.slots.iter().map(|slot| slot.access.state().clone()).collect();
        let logs = config.slots.iter().map(|slot| slot.access.log().clone()).collect();
        let managed = config.slots.into_iter().map(ManagedSlot::new).collect();
        let wait = config.compile_wait;
        let mut task = ManagerTask::new(builder, managed, config.probation, status.clone(), publish, wait);
        let (results, mut compiled) = mpsc::unbounded_channel();
        task.use_compile_queue(CompileQueue::start(&engine, &results)?);
        let stop = Arc::new(Notify::new());
        let stopped = stop.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        let (ready, scanned) = std::sync::mpsc::channel();
        std::thread::Builder::new().name("pointsman-policies".to_owned()).spawn(move || {
            runtime.block_on(async {
                let work = async {
                    // Files serve from the first request on.
                    task.first_scan(&mut compiled, wait).await;
                    let _ = ready.send(());
                    task.run(&changes, events, queued, compiled, config.debounce, config.rescan).await;
                };
                tokio::select! {
                    () = work => {}
                    () = stopped.notified() => {}
                }
            });
        })?;
        // An error means that the thread has ended, which shows in every command.
        let _ = scanned.recv();
        Ok(Self { status, slots, states, logs, engine, changed, commands, stop })
    }

    /// Runs a command and waits for its report. `Reload` and `Configure` wait for pending compiles, and
    /// `UndoRollBack` for those of its slot, for at most [`ManagerConfig::compile_wait`]; `RollBack` and
    /// `Promote` wait for none.
    ///
    /// # Errors
    /// [`CommandError`] when the command fails.
    pub async fn execute(&self, command: Command) -> Result<Report, CommandError> {
        let (answer, answered) = oneshot::channel();
        self.commands.send((command, answer)).map_err(|_| CommandError::Ended)?;
        answered.await.map_err(|_| CommandError::Ended)?
    }

    /// Returns the status of every slot, with the present counts.
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

    /// Returns every slot, in the order of the status.
    #[must_use]
    pub fn slots(&self) -> &[Arc<Slot>] {
        &self.slots
    }

    /// Returns the state of each slot's policies, in the order of the slots.
    #[must_use]
    pub fn states(&self) -> &[Arc<State>] {
        &self.states
    }

    /// Returns the last lines that the policies of a slot logged, those with a number above `after`. `None`
    /// if there is no such slot.
    #[must_use]
    pub fn lines(&self, (kind, model): &SlotName, after: u64) -> Option<PolicyLines> {
        let mut slots = self.slots.iter().zip(&self.logs);
        let found = slots.find(|(slot, _)| slot.kind() == *kind && slot.model() == model.as_ref());
        found.map(|(_, log)| log.after(after))
    }

    /// Returns instances, memory and cache hits of all policies together.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.engine.usage()
    }

    /// Notes that the gateway is about to end: a compiler process that dies from now on is not held against
    /// its file.
    pub fn drain(&self) {
        if let Some((compiler, _)) = self.engine.compiler_process() {
            compiler.drain();
        }
    }

    /// Returns a receiver whose value changes with every change of the status.
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
