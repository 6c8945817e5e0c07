//! The manager's thread: waits for changes, failures and commands, one at a time.

use std::{collections::VecDeque, path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use pointsman_routing::SlotEvent;
use tokio::sync::{mpsc, watch};

use super::{
    Probation,
    assemble::Workshop,
    command::{Change, Command, CommandError, Order, Report, SlotName, words},
    now_ms,
    slots::Managed,
    status::{Happened, ManagerStatus, ReloadCount},
};
use crate::{gate::Gate, recipe::SlotRecipe, refusal::Refusal};

/// Changes of lanes that are remembered.
const HISTORY: usize = 50;

pub(super) struct Worker {
    workshop: Workshop,
    managed: Vec<Managed>,
    probation: Probation,
    status: Arc<ArcSwap<ManagerStatus>>,
    publish: watch::Sender<u64>,
    counts: Vec<ReloadCount>,
    history: VecDeque<Happened>,
    /// Files that are no slot's.
    strays: Vec<PathBuf>,
}

impl Worker {
    pub(super) fn new(
        workshop: Workshop,
        managed: Vec<Managed>,
        probation: Probation,
        status: Arc<ArcSwap<ManagerStatus>>,
        publish: watch::Sender<u64>,
    ) -> Self {
        let (counts, history, strays) = (Vec::new(), VecDeque::new(), Vec::new());
        Self { workshop, managed, probation, status, publish, counts, history, strays }
    }

    pub(super) async fn run(
        &mut self,
        mut changes: mpsc::UnboundedReceiver<()>,
        mut events: mpsc::UnboundedReceiver<SlotEvent>,
        mut commands: mpsc::UnboundedReceiver<Order>,
        debounce: Duration,
        rescan: Duration,
    ) {
        loop {
            tokio::select! {
                Some(event) = events.recv() => self.failed(&event),
                Some((command, answer)) = commands.recv() => {
                    let outcome = self.obey(command);
                    // Whoever asked may have stopped waiting; it is done all the same.
                    let _ = answer.send(outcome);
                }
                Some(()) = changes.recv() => {
                    settle(&mut changes, debounce).await;
                    self.scan();
                }
                () = tokio::time::sleep(rescan) => drop(self.scan()),
            }
        }
    }

    /// Reads what every slot should run and acts on what is new.
    pub(super) fn scan(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for managed in &mut self.managed {
            changes.extend(managed.scan(&mut self.workshop));
        }
        self.workshop.tidy();
        let strays = self.note_strays();
        self.count(&changes);
        if strays || !changes.is_empty() || *self.publish.borrow() == 0 {
            self.publish();
        }
        changes
    }

    fn failed(&mut self, event: &SlotEvent) {
        let of = |managed: &&mut Managed| managed.name() == (event.slot, event.model.clone());
        let managed = self.managed.iter_mut().find(of);
        if let Some(change) = managed.and_then(|managed| managed.failed(event, self.probation)) {
            self.count(&[change]);
            self.publish();
        }
    }

    fn obey(&mut self, command: Command) -> Result<Report, CommandError> {
        let changed = match command {
            Command::Reload => self.scan(),
            Command::RollBack { slot, lane } => vec![self.find(&slot)?.roll_back(lane)?],
            Command::Promote { slot, from } => {
                let workshop = &self.workshop;
                let managed = find(&mut self.managed, &slot)?;
                vec![managed.promote(from, workshop)?]
            }
            Command::Configure { recipes, gate } => self.configure(recipes, gate),
        };
        self.count_commands(&changed);
        self.publish();
        let refused = self.managed.iter().flat_map(Managed::lanes);
        Ok(Report { changed, refused: refused.filter_map(|lane| lane.refusal.clone()).collect() })
    }

    fn configure(&mut self, recipes: Vec<(SlotName, SlotRecipe)>, gate: Gate) -> Vec<Change> {
        self.workshop.gate = gate;
        for (name, recipe) in recipes {
            if let Ok(managed) = find(&mut self.managed, &name) {
                managed.configure(recipe);
            }
        }
        self.scan()
    }

    fn find(&mut self, slot: &SlotName) -> Result<&mut Managed, CommandError> {
        find(&mut self.managed, slot)
    }

    fn note_strays(&mut self) -> bool {
        let files = || self.managed.iter().flat_map(Managed::lanes).map(|lane| lane.file.as_path());
        let strays = self.workshop.folder.strays(files());
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
        let of = |managed: &&Managed| {
            let (slot, model) = managed.name();
            slot == change.slot && model.map(|model| model.to_string()) == change.model
        };
        let policy = self.managed.iter().find(of).and_then(|managed| managed.policy(change.lane));
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back(Happened { at_ms: now_ms(), change: change.clone(), policy });
    }

    fn add(&mut self, result: &'static str, reason: &'static str) {
        match self.counts.iter_mut().find(|count| count.result == result && count.reason == reason) {
            Some(count) => count.count += 1,
            None => self.counts.push(ReloadCount { result, reason, count: 1 }),
        }
    }

    fn publish(&mut self) {
        self.status.store(Arc::new(ManagerStatus {
            slots: self.managed.iter().map(Managed::status).collect(),
            reloads: self.counts.clone(),
            history: self.history.clone(),
            strays: self.strays.iter().map(|stray| stray.display().to_string()).collect(),
        }));
        self.publish.send_modify(|version| *version += 1);
    }
}

fn find<'a>(managed: &'a mut [Managed], slot: &SlotName) -> Result<&'a mut Managed, CommandError> {
    let found = managed.iter_mut().find(|managed| managed.name() == *slot);
    found.ok_or_else(|| CommandError::UnknownSlot(words(slot)))
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
