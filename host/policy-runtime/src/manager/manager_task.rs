//! The manager's thread: waits for changes, failures, commands and what was compiled, one at a time. Nothing it does itself is
//! slow.

use std::{collections::VecDeque, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use pointsman_routing::SlotEvent;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use super::{
    Probation,
    command::{Change, Command, CommandError, Order, Report, SlotName, slot_label},
    compile_queue::{CompileQueue, Key, Made},
    managed_slot::ManagedSlot,
    now_ms,
    program_builder::ProgramBuilder,
    status::{ChangeRecord, ManagerStatus, ReloadCount},
};
use crate::{refusal::Refusal, spec::SlotSpec, trust::TrustRules};

/// Changes of lanes that are remembered.
const HISTORY: usize = 50;

/// Where a command's answer goes.
type Answer = oneshot::Sender<Result<Report, CommandError>>;

pub(super) struct ManagerTask {
    builder: ProgramBuilder,
    managed: Vec<ManagedSlot>,
    probation: Probation,
    status: Arc<ArcSwap<ManagerStatus>>,
    publish: watch::Sender<u64>,
    counts: Vec<ReloadCount>,
    history: VecDeque<ChangeRecord>,
    /// Files that are no slot's.
    strays: Vec<PathBuf>,
    /// Commands done but for compiles, with what changed so far.
    waiting: Vec<(Vec<Change>, Answer)>,
}

impl ManagerTask {
    pub(super) fn new(
        builder: ProgramBuilder,
        managed: Vec<ManagedSlot>,
        probation: Probation,
        status: Arc<ArcSwap<ManagerStatus>>,
        publish: watch::Sender<u64>,
    ) -> Self {
        let (counts, history, strays, waiting) = (Vec::new(), VecDeque::new(), Vec::new(), Vec::new());
        Self { builder, managed, probation, status, publish, counts, history, strays, waiting }
    }

    /// From now on compiles happen beside.
    pub(super) fn use_compile_queue(&mut self, compile_queue: CompileQueue) {
        self.builder.compile_queue = Some(compile_queue);
    }

    pub(super) async fn run(
        &mut self,
        mut changes: mpsc::UnboundedReceiver<()>,
        mut events: mpsc::UnboundedReceiver<SlotEvent>,
        mut commands: mpsc::UnboundedReceiver<Order>,
        mut made: mpsc::UnboundedReceiver<(Key, Made)>,
        debounce: Duration,
        rescan: Duration,
    ) {
        let mut clock = ScanClock::new(debounce, rescan);
        loop {
            tokio::select! {
                Some(event) = events.recv() => self.failed(&event),
                Some((command, answer)) = commands.recv() => self.take(command, answer),
                Some((key, outcome)) = made.recv() => self.resume(key, outcome),
                Some(()) = changes.recv() => clock.changed(),
                () = tokio::time::sleep_until(clock.due) => {
                    self.scan();
                    clock.scanned();
                }
            }
        }
    }

    /// Does a command, and answers it: at once, or when what it has to wait for is compiled.
    fn take(&mut self, command: Command, answer: Answer) {
        let waits = matches!(command, Command::Reload | Command::Configure { .. });
        match self.obey(command) {
            Ok(changed) if waits && !self.builder.is_idle() => self.waiting.push((changed, answer)),
            outcome => {
                let report = outcome.map(|changed| self.report(changed));
                // Whoever asked may have stopped waiting; it is done all the same.
                let _ = answer.send(report);
            }
        }
    }

    /// Goes on with what waited for a compile.
    fn resume(&mut self, key: Key, made: Made) {
        self.builder.made(key, made);
        let mut changes = Vec::new();
        for managed in &mut self.managed {
            changes.extend(managed.resume(&mut self.builder));
        }
        self.builder.tidy();
        self.count(&changes);
        if !changes.is_empty() {
            self.publish();
        }
        self.waiting.iter_mut().for_each(|(changed, _)| changed.extend(changes.iter().cloned()));
        if self.builder.is_idle() {
            for (changed, answer) in std::mem::take(&mut self.waiting) {
                let _ = answer.send(Ok(self.report(changed)));
            }
        }
    }

    fn report(&self, changed: Vec<Change>) -> Report {
        let lanes = self.managed.iter().flat_map(ManagedSlot::lanes);
        Report { changed, refused: lanes.filter_map(|lane| lane.refusal.clone()).collect() }
    }

    /// Reads what every slot should run and acts on what is new.
    pub(super) fn scan(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for managed in &mut self.managed {
            changes.extend(managed.scan(&mut self.builder));
        }
        self.builder.tidy();
        let strays = self.note_strays();
        self.count(&changes);
        if strays || !changes.is_empty() || *self.publish.borrow() == 0 {
            self.publish();
        }
        changes
    }

    fn failed(&mut self, event: &SlotEvent) {
        let of = |managed: &&mut ManagedSlot| managed.name() == (event.slot, event.model.clone());
        let managed = self.managed.iter_mut().find(of);
        if let Some(change) = managed.and_then(|managed| managed.failed(event, self.probation)) {
            self.count(&[change]);
            self.publish();
        }
    }

    fn obey(&mut self, command: Command) -> Result<Vec<Change>, CommandError> {
        let changed = match command {
            Command::Reload => self.scan(),
            Command::RollBack { slot, lane } => vec![self.find(&slot)?.roll_back(lane)?],
            Command::Promote { slot, from } => {
                let builder = &self.builder;
                let managed = find(&mut self.managed, &slot)?;
                vec![managed.promote(from, builder)?]
            }
            Command::Configure { specs, trust } => self.configure(specs, trust),
        };
        self.count_commands(&changed);
        self.publish();
        Ok(changed)
    }

    fn configure(&mut self, specs: Vec<(SlotName, SlotSpec)>, trust: TrustRules) -> Vec<Change> {
        self.builder.trust = trust;
        for (name, spec) in specs {
            if let Ok(managed) = find(&mut self.managed, &name) {
                managed.configure(spec);
            }
        }
        self.scan()
    }

    fn find(&mut self, slot: &SlotName) -> Result<&mut ManagedSlot, CommandError> {
        find(&mut self.managed, slot)
    }

    fn note_strays(&mut self) -> bool {
        let files = || self.managed.iter().flat_map(ManagedSlot::lanes).map(|lane| lane.file.as_path());
        let strays = self.builder.folder.strays(files());
        if strays == self.strays {
            return false;
        }
        let names: Vec<String> = files().map(|file| file.display().to_string()).collect();
        let fresh: Vec<PathBuf> =
            strays.iter().filter(|stray| !self.strays.contains(stray)).cloned().collect();
        for stray in &fresh {
            let refusal = Refusal::NoSlot(names.join(", "));
            tracing::warn!(file = %stray.display(), kind = refusal.kind(), %refusal, "policy refused");
            self.add("refused", refusal.kind());
        }
        self.strays = strays;
        true
    }

    fn count(&mut self, changes: &[Change]) {
        for change in changes {
            self.add(change.result, change.reason);
            self.remember(change);
        }
    }

    /// What a scan changed is counted by the scan.
    fn count_commands(&mut self, changes: &[Change]) {
        for change in changes {
            if change.reason == "command" || change.result == "promoted" {
                self.add(change.result, change.reason);
                self.remember(change);
            }
        }
    }

    fn remember(&mut self, change: &Change) {
        let of = |managed: &&ManagedSlot| {
            let (slot, model) = managed.name();
            slot == change.slot && model.map(|model| model.to_string()) == change.model
        };
        let policy = self.managed.iter().find(of).and_then(|managed| managed.policy(change.lane));
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(ChangeRecord { at_ms: now_ms(), change: change.clone(), policy });
    }

    fn add(&mut self, result: &'static str, reason: &'static str) {
        match self.counts.iter_mut().find(|count| count.result == result && count.reason == reason) {
            Some(count) => count.count += 1,
            None => self.counts.push(ReloadCount { result, reason, count: 1 }),
        }
    }

    fn publish(&mut self) {
        self.status.store(Arc::new(ManagerStatus {
            slots: self.managed.iter().map(ManagedSlot::status).collect(),
            reloads: self.counts.clone(),
            history: self.history.clone(),
            strays: self.strays.iter().map(|stray| stray.display().to_string()).collect(),
        }));
        self.publish.send_modify(|version| *version += 1);
    }
}

fn find<'a>(managed: &'a mut [ManagedSlot], slot: &SlotName) -> Result<&'a mut ManagedSlot, CommandError> {
    let found = managed.iter_mut().find(|managed| managed.name() == *slot);
    found.ok_or_else(|| CommandError::UnknownSlot(slot_label(slot)))
}

/// When the folder is read next: once changes have been quiet for a while, or ten times that has passed since the first of
/// them; and now and then whatever the watch says.
struct ScanClock {
    due: Instant,
    /// The first change since the last scan.
    first: Option<Instant>,
    quiet: Duration,
    rescan: Duration,
}

impl ScanClock {
    fn new(quiet: Duration, rescan: Duration) -> Self {
        Self { due: Instant::now() + rescan, first: None, quiet, rescan }
    }

    fn changed(&mut self) {
        let now = Instant::now();
        let first = *self.first.get_or_insert(now);
        self.due = (now + self.quiet).min(first + self.quiet * 10);
    }

    fn scanned(&mut self) {
        (self.first, self.due) = (None, Instant::now() + self.rescan);
    }
}
