//! State of one source in the fleet.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use pointsman_workers::{LogLimit, ModelName, Role, WorkerId};
use tokio::{sync::Notify, time::Instant};

use super::{FleetRules, change_log::ChangeLog};
use crate::{
    found::{Found, MAX_REFUSALS, Refusal, SourceSnapshot, within_bounds},
    guard::{Guard, GuardRules, Verdict},
    merge::Rank,
};

/// Shortest time between two log lines of one kind about a source.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A source, and the workers of its last snapshot.
#[derive(Debug)]
pub(super) struct SourceEntry {
    pub(super) name: Arc<str>,
    pub(super) rank: Rank,
    /// Workers in force: those of the last snapshot, and those whose removal waits.
    pub(super) workers: Vec<Found>,
    /// Number of workers whose removal waits.
    pub(super) held: usize,
    /// Number of listed workers that were never ready.
    pub(super) never_ready: usize,
    pub(super) guard: Guard,
    changes: ChangeLog,
    hold_lines: LogLimit,
    /// Whether the log says that removals wait.
    hold_is_logged: bool,
    release_lines: LogLimit,
    unready_lines: LogLimit,
    /// Whether so many workers are not ready that health checks decide.
    ignores_readiness: bool,
    /// Refused entries of the last snapshot, and how many there were.
    pub(super) refused: Vec<Refusal>,
    pub(super) refused_count: usize,
    /// Workers that another source owns.
    pub(super) conflicts: Vec<Refusal>,
    /// When the source was last read.
    pub(super) last_good: Option<Instant>,
    /// Why the source cannot be read.
    pub(super) problem: Option<String>,
    /// Number of times that the source went away.
    pub(super) times_away: u64,
    /// Asks the source to read everything again.
    pub(super) recheck: Arc<Notify>,
}

impl SourceEntry {
    pub(super) fn new(name: &str, rank: Rank) -> Self {
        Self {
            name: Arc::from(name),
            rank,
            workers: Vec::new(),
            held: 0,
            never_ready: 0,
            guard: Guard::default(),
            changes: ChangeLog::default(),
            hold_lines: LogLimit::new(LOG_INTERVAL),
            hold_is_logged: false,
            release_lines: LogLimit::new(LOG_INTERVAL),
            unready_lines: LogLimit::new(LOG_INTERVAL),
            ignores_readiness: false,
            refused: Vec::new(),
            refused_count: 0,
            conflicts: Vec::new(),
            last_good: None,
            problem: None,
            times_away: 0,
            recheck: Arc::default(),
        }
    }

    /// Replaces the workers without asking the guard.
    pub(super) fn replace(&mut self, workers: Vec<Found>, now: Instant) {
        self.workers = workers;
        self.last_good = Some(now);
    }

    /// Adds a worker, or replaces the one with its id.
    pub(super) fn put(&mut self, found: Found) {
        self.workers.retain(|other| other.spec.id != found.spec.id);
        self.workers.push(found);
        self.last_good = Some(Instant::now());
    }

    /// Removes a worker that another source owns. Returns why it was refused.
    pub(super) fn withdraw_refused(&mut self, id: WorkerId, url: &str) -> String {
        self.workers.retain(|found| found.spec.id != id);
        let problem = self.conflict_of(url).map(|refusal| refusal.problem.clone()).unwrap_or_default();
        self.conflicts.retain(|refusal| refusal.problem != problem);
        problem
    }

    /// Returns the refusal of the worker at `url`, which another source owns.
    pub(super) fn conflict_of(&self, url: &str) -> Option<&Refusal> {
        let entry = Refusal::new(url, "").entry;
        self.conflicts.iter().find(|refusal| refusal.entry == entry)
    }

    /// Puts a snapshot in force, as far as the guard lets it.
    pub(super) fn take_snapshot(&mut self, snapshot: SourceSnapshot, rules: &FleetRules, now: Instant) {
        let SourceSnapshot { workers, refused, read } = snapshot;
        self.alive(now);
        self.refused_count = refused.len();
        let refused_before = std::mem::replace(&mut self.refused, refused);
        let workers = self.once_ready(workers);
        let mut listed = self.within_bounds(workers, rules.max_workers);
        self.log_new(&self.refused, &refused_before);
        let ids: HashSet<WorkerId> = listed.iter().map(|found| found.spec.id).collect();
        // A worker that was said to leave may be missing.
        let staying = || self.workers.iter().filter(|found| found.unready || !found.leaving);
        let missing: Vec<Found> = staying().filter(|found| !ids.contains(&found.spec.id)).cloned().collect();
        let missing_ids: Vec<WorkerId> = missing.iter().map(|found| found.spec.id).collect();
        let was_held = self.guard.held_since().is_some();
        let present = staying().count();
        match self.guard.judge(&rules.guard, (&ids, present), &missing_ids, read, now) {
            Verdict::Hold => {
                if !self.hold_is_logged
                    && let Some(suppressed) = self.hold_lines.due()
                {
                    self.hold_is_logged = true;
                    let (source, confirm_after) = (&*self.name, rules.guard.confirm_after);
                    tracing::warn!(
                        source,
                        missing = missing.len(),
                        present,
                        ?confirm_after,
                        suppressed,
                        "removal of many workers waits for a second confirmation"
                    );
                }
                self.held = missing.len();
                listed.extend(missing);
            }
            Verdict::Remove => {
                self.hold_is_logged = false;
                if was_held && let Some(suppressed) = self.release_lines.due() {
                    let (source, removed) = (&*self.name, missing.len());
                    tracing::warn!(
                        source,
                        removed,
                        suppressed,
                        "removal of many workers does not wait any more"
                    );
                }
                self.held = 0;
            }
        }
        self.set_aside_unready(&mut listed, rules.guard.share);
        self.changes.note(&self.workers, &listed);
        self.workers = listed;
    }

    /// Returns the workers without those that were never ready, which are counted.
    fn once_ready(&mut self, mut workers: Vec<Found>) -> Vec<Found> {
        let listed = workers.len();
        if workers.iter().any(|found| found.unready) {
            let known: HashSet<_> =
                self.workers.iter().map(|found| (found.spec.id, &found.identity)).collect();
            workers.retain(|found| !found.unready || known.contains(&(found.spec.id, &found.identity)));
        }
        self.never_ready = listed - workers.len();
        workers
    }

    /// Makes the workers that are not ready leave. If that were more than `share` of the workers of a role
    /// and models, they stay as they are: whatever says so, such as a control plane without its nodes, may be
    /// what fails.
    fn set_aside_unready(&mut self, workers: &mut [Found], share: f64) {
        // Of each role and models: the workers that are not ready, and all.
        let mut counts: HashMap<(Role, Vec<ModelName>), (usize, usize)> = HashMap::new();
        let group = |found: &Found| (found.spec.role, found.spec.models.clone());
        for found in workers.iter().filter(|found| found.unready || !found.leaving) {
            let (unready, all) = counts.entry(group(found)).or_default();
            *unready += usize::from(found.unready);
            *all += 1;
        }
        counts.retain(|_, (unready, all)| *unready as f64 > share * *all as f64);
        for found in workers.iter_mut().filter(|found| found.unready) {
            found.leaving = !counts.contains_key(&group(found));
        }
        let most = counts.iter().max_by_key(|(_, (unready, _))| *unready);
        if let Some(((role, _), (unready, all))) = most
            && !self.ignores_readiness
            && let Some(suppressed) = self.unready_lines.due()
        {
            let source = &*self.name;
            tracing::warn!(
                source,
                %role,
                unready,
                all,
                suppressed,
                "workers of a role are not ready: health checks decide"
            );
        }
        self.ignores_readiness = !counts.is_empty();
    }

    /// Returns the workers that are within the bounds; the others are refused.
    fn within_bounds(&mut self, workers: Vec<Found>, most: usize) -> Vec<Found> {
        let mut listed = Vec::with_capacity(workers.len().min(most));
        let known: HashMap<WorkerId, &Found> =
            self.workers.iter().map(|found| (found.spec.id, found)).collect();
        let mut refused = Vec::new();
        for found in workers {
            let same = known.get(&found.spec.id).is_some_and(|known| known.spec == found.spec);
            let problem = if listed.len() >= most {
                Err(format!("the source lists more than {most} workers: raise discovery.max_workers"))
            } else if same {
                Ok(())
            } else {
                within_bounds(&found.spec)
            };
            match problem {
                Ok(()) => listed.push(found),
                Err(problem) => refused.push(Refusal::new(&found.spec.url, &problem)),
            }
        }
        self.refused_count += refused.len();
        self.refused.extend(refused);
        self.refused.truncate(MAX_REFUSALS);
        listed
    }

    /// The source was read.
    pub(super) fn alive(&mut self, now: Instant) {
        if self.problem.take().is_some() || self.last_good.is_none() {
            tracing::info!(source = &*self.name, "discovery source is present");
        }
        self.last_good = Some(now);
    }

    /// The source cannot be read.
    pub(super) fn away(&mut self, problem: String) {
        if self.problem.is_none() {
            self.times_away += 1;
            let (source, workers) = (&*self.name, self.workers.len());
            tracing::warn!(source, workers, problem, "discovery source is away: its last workers stay");
        }
        self.problem = Some(problem);
    }

    /// Says why the source cannot be read.
    pub(super) fn why_away(&self) -> Option<String> {
        let (name, problem) = (&self.name, self.problem.as_ref()?);
        let workers = match self.workers.len() {
            0 => "it has listed no worker".to_owned(),
            1 => "its worker stays".to_owned(),
            workers => format!("its {workers} workers stay"),
        };
        Some(format!("the source {name} cannot be read: {problem}; {workers}"))
    }

    /// Stores which workers another source owns, and logs the new ones.
    pub(super) fn set_conflicts(&mut self, conflicts: Vec<Refusal>) {
        self.log_new(&conflicts, &self.conflicts);
        self.conflicts = conflicts;
    }

    /// Logs the refusals that were not there before, up to a limit.
    fn log_new(&self, refused: &[Refusal], before: &[Refusal]) {
        for refusal in refused.iter().filter(|refusal| !before.contains(refusal)).take(MAX_REFUSALS) {
            let Refusal { entry, problem } = refusal;
            tracing::warn!(source = &*self.name, entry, problem, "discovered worker is refused");
        }
    }

    /// Logs the workers that joined and left since the last line. Returns when that is due otherwise.
    pub(super) fn log_changes(&mut self, now: Instant) -> Option<Instant> {
        self.changes.write(&self.name, &self.workers, now)
    }

    /// Asks the source to read everything again when that is due. Returns when it is due next.
    pub(super) fn ask_when_due(&mut self, rules: &GuardRules, now: Instant) -> Option<Instant> {
        if self.guard.ask_at().is_some_and(|at| at <= now) {
            self.recheck.notify_one();
            self.guard.asked(rules, now);
        }
        self.guard.ask_at()
    }
}
