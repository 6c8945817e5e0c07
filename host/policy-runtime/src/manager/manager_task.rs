//! The manager's loop: handles changes of the directory, failures, commands and finished compiles, one at a
//! time. No handler is slow: compiles run elsewhere.

use std::{
    collections::{HashSet, VecDeque},
    path::Path,
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use pointsman_routing::SlotEvent;
use pointsman_workers::unix_ms;
use tokio::{
    sync::{Notify, mpsc, watch},
    time::Instant,
};

use super::{
    Probation,
    command::{Command, CommandError, QueuedCommand, SlotName, slot_label},
    compile_queue::{CompileQueue, Finished},
    managed_lane::RESCAN,
    managed_slot::ManagedSlot,
    program_builder::ProgramBuilder,
    record::{Change, ChangeRecord, ReloadCount},
    status::ManagerStatus,
    strays::{SlotFiles, Stray},
};
use crate::{
    spec::SlotSpec,
    trust::{TrustRules, name_of},
};

mod replies;

use replies::{Done, Waiting};

/// Number of changes in the status.
const MAX_HISTORY: usize = 50;
/// Files of no slot that are listed and logged; others are counted.
const MAX_STRAYS: usize = 100;

pub(super) struct ManagerTask {
    builder: ProgramBuilder,
    managed: Vec<ManagedSlot>,
    probation: Probation,
    status: Arc<ArcSwap<ManagerStatus>>,
    /// Number of the published status.
    publish: watch::Sender<u64>,
    counts: Vec<ReloadCount>,
    history: VecDeque<ChangeRecord>,
    /// Files in the directory that belong to no slot: the first [`MAX_STRAYS`].
    strays: Vec<Stray>,
    /// Number of the others.
    more_strays: usize,
    /// Commands that wait for compiles.
    waiting: Vec<Waiting>,
    /// Longest time that a command waits for compiles.
    reply_within: Duration,
}

impl ManagerTask {
    pub(super) fn new(
        builder: ProgramBuilder,
        managed: Vec<ManagedSlot>,
        probation: Probation,
        status: Arc<ArcSwap<ManagerStatus>>,
        publish: watch::Sender<u64>,
        reply_within: Duration,
    ) -> Self {
        Self {
            builder,
            managed,
            probation,
            status,
            publish,
            counts: Vec::new(),
            history: VecDeque::new(),
            strays: Vec::new(),
            more_strays: 0,
            waiting: Vec::new(),
            reply_within,
        }
    }

    /// Compiles on other threads from now on.
    pub(super) fn use_compile_queue(&mut self, compile_queue: CompileQueue) {
        self.builder.compiler.use_queue(compile_queue);
    }

    pub(super) async fn run(
        &mut self,
        changes: &Notify,
        mut events: mpsc::UnboundedReceiver<SlotEvent>,
        mut commands: mpsc::UnboundedReceiver<QueuedCommand>,
        mut compiled: mpsc::UnboundedReceiver<Finished>,
        debounce: Duration,
        rescan: Duration,
    ) {
        let mut clock = ScanClock::new(debounce, rescan);
        clock.scanned(self.looks_again());
        loop {
            tokio::select! {
                Some(event) = events.recv() => self.handle_failure(&event),
                Some((command, reply)) = commands.recv() => self.handle_command(command, reply),
                Some(finished) = compiled.recv() => self.resume(finished),
                () = changes.notified() => clock.changed(),
                () = tokio::time::sleep_until(self.next_reply()) => self.reply_in_time(),
                () = tokio::time::sleep_until(clock.due) => {
                    self.scan();
                    // The scan may have cancelled what a command waits for.
                    self.reply_when_compiled();
                    clock.scanned(self.looks_again());
                }
            }
        }
    }

    /// Returns whether the last scan may have been in the middle of a replacement.
    fn looks_again(&self) -> bool {
        self.strays.first().is_some_and(Stray::is_directory)
            || self.managed.iter().any(ManagedSlot::may_be_in_replacement)
    }

    /// Scans for the first time, and compiles for at most `limit`.
    pub(super) async fn first_scan(
        &mut self,
        compiled: &mut mpsc::UnboundedReceiver<Finished>,
        limit: Duration,
    ) {
        let deadline = Instant::now() + limit;
        self.scan();
        while !self.builder.compiler.is_idle() {
            match tokio::time::timeout_at(deadline, compiled.recv()).await {
                Ok(Some(finished)) => self.resume(finished),
                Ok(None) => return,
                Err(_) => {
                    let slots = self.compiling().join(", ");
                    tracing::warn!(
                        slots,
                        "policies still compile; their slots serve without them until then"
                    );
                    return;
                }
            }
        }
    }

    /// Returns the labels of the lanes that wait for a compile.
    fn compiling(&self) -> Vec<String> {
        let files = self.managed.iter().flat_map(ManagedSlot::compiling);
        files.map(|one| name_of(Path::new(&one.file))).collect()
    }

    /// Takes a finished compile and continues with the lanes that wait for one.
    fn resume(&mut self, finished: Finished) {
        // Without the directory the next scan takes what was compiled.
        if !self.builder.compiler.finish(finished) || !self.can_read_folder() {
            return;
        }
        let mut changes = Vec::new();
        for managed in &mut self.managed {
            changes.extend(managed.resume(&mut self.builder));
        }
        self.release_unwanted();
        self.count(&changes);
        // The list of files that compile is shorter now.
        self.publish();
        self.waiting.iter_mut().for_each(|waiting| waiting.done.add(&changes));
        self.reply_when_compiled();
    }

    fn release_unwanted(&mut self) {
        let lanes = self.managed.iter().flat_map(ManagedSlot::lanes);
        let wanted: HashSet<_> = lanes.flat_map(|lane| &lane.waits_for).collect();
        self.builder.compiler.release_unwanted(&wanted);
    }

    /// Reads what every slot shall run, and applies what is new.
    pub(super) fn scan(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        if !self.can_read_folder() {
            return changes;
        }
        for managed in &mut self.managed {
            changes.extend(managed.scan(&mut self.builder));
        }
        self.release_unwanted();
        let strays = self.update_strays();
        self.count(&changes);
        let compiling: Vec<_> = self.managed.iter().flat_map(ManagedSlot::compiling).collect();
        let undo: Vec<_> = self.managed.iter().map(ManagedSlot::undoable).collect();
        let shown = self.status.load();
        let other_compiles = shown.compiling != compiling;
        let other_undo = !shown.slots.iter().map(|slot| &slot.undo).eq(undo.iter());
        let refusals = self.managed.iter().map(ManagedSlot::refusals);
        let other_refusals = !shown.slots.iter().map(|slot| slot.refusals.clone()).eq(refusals);
        let others = other_compiles || other_undo || other_refusals;
        if strays || others || !changes.is_empty() || *self.publish.borrow() == 0 {
            self.publish();
        }
        changes
    }

    /// Returns whether the directory can be read. A volume may be unmounted, and a directory replaced:
    /// without it, its files are not taken for removed. Says once what is wrong.
    fn can_read_folder(&mut self) -> bool {
        let Err((file, refusal)) = self.builder.folder.check() else { return true };
        let gone = Stray { file, refusal };
        if self.strays.first() != Some(&gone) {
            let dir = gone.file.display();
            tracing::warn!(%dir, error = %gone.refusal, "policy directory cannot be read");
            (self.strays, self.more_strays) = (vec![gone], 0);
            self.publish();
        }
        false
    }

    fn handle_failure(&mut self, event: &SlotEvent) {
        let of = |managed: &&mut ManagedSlot| managed.name() == (event.slot, event.model.clone());
        let managed = self.managed.iter_mut().find(of);
        if let Some(change) = managed.and_then(|managed| managed.handle_failure(event, self.probation)) {
            self.count(&[change]);
            self.publish();
        }
    }

    fn run_command(&mut self, command: Command) -> Result<Done, CommandError> {
        let changed = match command {
            Command::Reload => {
                // A scan without the directory judges no file. What it comes back with may be in an update.
                if self.can_read_folder() {
                    self.managed.iter_mut().for_each(ManagedSlot::prepare_reload);
                }
                self.scan()
            }
            Command::RollBack { slot, lane } => {
                let change = find(&mut self.managed, &slot)?.roll_back(lane, &self.builder)?;
                self.release_unwanted();
                vec![change]
            }
            Command::UndoRollBack { slot } => return self.undo_roll_back(slot),
            Command::Promote { slot, from } => {
                let builder = &self.builder;
                let managed = find(&mut self.managed, &slot)?;
                vec![managed.promote(from, builder)?]
            }
            Command::Configure { specs, trust } => self.configure(specs, trust),
        };
        self.count_commands(&changed);
        self.publish();
        Ok(changed.into())
    }

    fn undo_roll_back(&mut self, slot: SlotName) -> Result<Done, CommandError> {
        let mut changed = Vec::new();
        let undone = find(&mut self.managed, &slot)?.undo_roll_back(&mut self.builder, &mut changed);
        self.release_unwanted();
        self.count(&changed);
        self.publish();
        Ok(Done { changed, undone: Some((slot, undone?)) })
    }

    fn configure(&mut self, specs: Vec<(SlotName, SlotSpec)>, trust: TrustRules) -> Vec<Change> {
        self.builder.trust = trust.following(&self.builder.trust);
        for (name, spec) in specs {
            if let Ok(managed) = find(&mut self.managed, &name) {
                managed.configure(spec);
            }
        }
        // As for a reload.
        if self.can_read_folder() {
            self.managed.iter_mut().for_each(ManagedSlot::judge_at_once);
        }
        self.scan()
    }

    /// Lists the stray files and logs new ones. Returns whether the list changed.
    fn update_strays(&mut self) -> bool {
        let lanes = self.managed.iter().flat_map(ManagedSlot::lanes);
        let names = SlotFiles::new(lanes.map(|lane| lane.file.as_path()));
        let mut strays = self.builder.folder.strays(&names);
        let more = strays.len().saturating_sub(MAX_STRAYS);
        strays.truncate(MAX_STRAYS);
        if more == self.more_strays && strays.iter().eq(self.strays.iter().map(|stray| &stray.file)) {
            return false;
        }
        let strays: Vec<Stray> = strays.into_iter().map(|file| names.stray(file)).collect();
        // Of an incomplete list, it is not known which files are new.
        if self.more_strays == 0 {
            let fresh: Vec<Stray> =
                strays.iter().filter(|stray| !self.strays.contains(stray)).cloned().collect();
            for Stray { file, refusal } in &fresh {
                let file = file.display();
                tracing::warn!(%file, kind = refusal.kind(), error = %refusal, "policy refused");
                self.increment("refused", refusal.kind());
            }
            if more > 0 {
                tracing::warn!(more, "further files in the policy directory name no slot");
            }
        }
        (self.strays, self.more_strays) = (strays, more);
        true
    }

    fn count(&mut self, changes: &[Change]) {
        for change in changes {
            self.increment(change.result, change.reason);
            self.remember(change);
        }
    }

    /// Counts the changes of commands other than a scan; a scan counts its own.
    fn count_commands(&mut self, changes: &[Change]) {
        for change in changes {
            if change.reason == "command" || change.result == "promoted" {
                self.increment(change.result, change.reason);
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
        if self.history.len() == MAX_HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(ChangeRecord { at_ms: unix_ms(), change: change.clone(), policy });
    }

    fn increment(&mut self, result: &'static str, reason: &'static str) {
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
            strays: self.strays.iter().map(Stray::name).collect(),
            stray_problems: self.strays.iter().map(Stray::problem).collect(),
            more_strays: self.more_strays,
            compiling: self.managed.iter().flat_map(ManagedSlot::compiling).collect(),
        }));
        self.publish.send_modify(|version| *version += 1);
    }
}

fn find<'a>(managed: &'a mut [ManagedSlot], slot: &SlotName) -> Result<&'a mut ManagedSlot, CommandError> {
    let found = managed.iter_mut().find(|managed| managed.name() == *slot);
    found.ok_or_else(|| CommandError::UnknownSlot(slot_label(slot)))
}

/// Time of the next scan: after changes have paused for `quiet`, at the latest ten times `quiet` after the
/// first of them, and every `rescan` without any; sooner while a file may be in replacement.
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

    fn scanned(&mut self, looks_again: bool) {
        let pause = if looks_again { self.rescan.min(RESCAN) } else { self.rescan };
        (self.first, self.due) = (None, Instant::now() + pause);
    }
}
