//! The fleet: the snapshots of all sources, merged and applied to the registry.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_workers::{Drainer, Registry, Resolver, WorkerId, WorkerSpec};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{
    found::{Found, Refusal, SourceSnapshot, addresses_of_hosts},
    guard::GuardRules,
    merge::{Claim, Rank, merge},
};

mod change_log;
mod members;
mod reporter;
mod source_entry;
mod status;

use members::{Leaving, Members};
pub use reporter::Reporter;
use source_entry::SourceEntry;
pub use status::{DismissedWorker, FleetStatus, SourceState, SourceStatus};

/// Index of the source for `[[workers]]`.
const CONFIGURED: usize = 0;
/// Index of the source for workers that operators add.
const OPERATOR: usize = 1;
/// Interval at which leaving workers are checked.
const LEAVING_INTERVAL: Duration = Duration::from_millis(100);

/// Bounds and times of a fleet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FleetRules {
    /// Maximum number of discovered workers.
    pub max_workers: usize,
    /// How long the requests of a worker that leaves may run.
    pub drain: Duration,
    /// Whether its running streams move to other workers.
    pub moves: bool,
    /// When a removal waits for a second confirmation.
    pub guard: GuardRules,
}

/// Why a worker does not join: another source owns its id or URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// The workers of all sources.
pub struct Fleet {
    registry: Arc<Registry>,
    resolver: Resolver,
    rules: FleetRules,
    inner: Mutex<Inner>,
    /// Something has to be done at another time than before.
    changed: Notify,
}

struct Inner {
    sources: Vec<SourceEntry>,
    members: Members,
    /// Workers that operators removed, until their source describes them in another way or no longer lists
    /// them.
    dismissed: HashMap<WorkerId, Dismissed>,
}

/// A worker that an operator removed.
#[derive(Clone, Debug)]
struct Dismissed {
    spec: WorkerSpec,
    identity: Option<Arc<str>>,
}

impl Dismissed {
    fn is(&self, found: &Found) -> bool {
        found.is_same(&self.spec, self.identity.as_deref())
    }
}

impl Fleet {
    /// Creates a fleet that publishes its workers in `registry`, and the addresses that their sources know in
    /// `resolver`.
    #[must_use]
    pub fn new(registry: Arc<Registry>, resolver: Resolver, rules: FleetRules) -> Arc<Self> {
        let mut admin = SourceEntry::new("admin", Rank::Operator);
        // Operators' workers come with their requests: this source is never read, so it is never away.
        admin.replace(Vec::new(), Instant::now());
        let sources = vec![SourceEntry::new("static", Rank::Configured), admin];
        let inner = Inner { sources, members: Members::default(), dismissed: HashMap::new() };
        Arc::new(Self { registry, resolver, rules, inner: Mutex::new(inner), changed: Notify::new() })
    }

    /// Adds a source, for example `etcd:main`.
    #[must_use]
    pub fn add_source(self: &Arc<Self>, name: &str) -> Reporter {
        let mut inner = self.inner.lock();
        let entry = SourceEntry::new(name, Rank::Discovered);
        let recheck = entry.recheck.clone();
        inner.sources.push(entry);
        Reporter::new(self.clone(), inner.sources.len() - 1, recheck)
    }

    /// Sets the workers of the configuration.
    pub fn set_configured(&self, workers: &[WorkerSpec]) {
        let mut inner = self.inner.lock();
        if let Some(source) = inner.sources.get_mut(CONFIGURED) {
            source.replace(workers.iter().cloned().map(Found::staying).collect(), Instant::now());
        }
        self.reconcile(&mut inner);
    }

    /// Adds a worker for an operator, or replaces the one with its id that an operator added.
    ///
    /// # Errors
    /// Another source owns the id or URL.
    pub fn join(&self, spec: WorkerSpec) -> Result<WorkerId, Refused> {
        let mut inner = self.inner.lock();
        let id = spec.id;
        if inner.dismissed.get(&id).is_some_and(|dismissed| dismissed.spec == spec) {
            inner.dismissed.remove(&id);
        }
        if let Some(source) = inner.sources.get_mut(OPERATOR) {
            source.put(Found::staying(spec.clone()));
        }
        self.reconcile(&mut inner);
        if inner.members.source_of(id) == Some(OPERATOR) {
            return Ok(id);
        }
        let source = inner.sources.get_mut(OPERATOR);
        let problem = source.map(|source| source.withdraw_refused(id, &spec.url)).unwrap_or_default();
        // Another source may describe the worker in the same way.
        if inner.members.spec_of(id) == Some(&spec) { Ok(id) } else { Err(Refused(problem)) }
    }

    /// Removes a worker for an operator. It stays away until its source changes its description, or lists it
    /// again after an absence. Returns whether it was there.
    pub fn leave(&self, id: WorkerId) -> bool {
        let mut inner = self.inner.lock();
        let was_there = self.registry.snapshot().get(id).is_some();
        if let Some(source) = inner.sources.get_mut(OPERATOR) {
            source.workers.retain(|found| found.spec.id != id);
        }
        if let Some(dismissed) = inner.members.dismissed(id) {
            inner.dismissed.insert(id, dismissed);
        }
        self.reconcile(&mut inner);
        inner.members.remove(id);
        self.registry.remove(id);
        was_there
    }

    /// Returns the name of the source of each worker.
    #[must_use]
    pub fn sources_of_workers(&self) -> HashMap<WorkerId, Arc<str>> {
        let inner = self.inner.lock();
        inner
            .members
            .owners()
            .filter_map(|(id, source)| Some((id, inner.sources.get(source)?.name.clone())))
            .collect()
    }

    /// Returns what each source knows and what it waits for.
    #[must_use]
    pub fn status(&self) -> FleetStatus {
        let inner = self.inner.lock();
        FleetStatus::of(&inner.sources, &inner.members, &inner.dismissed)
    }

    /// Returns whether each source was read at least once.
    #[must_use]
    pub fn has_read_all(&self) -> bool {
        self.inner.lock().sources.iter().all(|source| source.last_good.is_some())
    }

    /// Returns the number of workers that sources list and that were not ready since the start.
    #[must_use]
    pub fn never_ready(&self) -> usize {
        self.inner.lock().sources.iter().map(|source| source.never_ready).sum()
    }

    /// Says which sources cannot be read, and why, for operators.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let inner = self.inner.lock();
        inner.sources.iter().filter_map(SourceEntry::why_away).collect()
    }

    /// Returns whether each source could be read, at the last attempt.
    #[must_use]
    pub fn reads_all(&self) -> bool {
        let inner = self.inner.lock();
        inner.sources.iter().all(|source| source.problem.is_none() && source.last_good.is_some())
    }

    /// Lets workers leave when their requests have ended or their time is over, asks sources for second
    /// confirmations and logs their changes, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let next = self.tick(Instant::now());
            tokio::select! {
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
                () = self.changed.notified() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Does the work that is due. Returns the time of the next due work.
    fn tick(&self, now: Instant) -> Option<Instant> {
        let mut inner = self.inner.lock();
        let leaving = inner.members.leaving();
        if leaving > 0 {
            let gone = inner.members.take_gone(&self.registry.snapshot(), now);
            self.registry.apply(Vec::new(), &gone);
        }
        let guard = &self.rules.guard;
        let asked = inner.sources.iter_mut().filter_map(|source| source.ask_when_due(guard, now)).min();
        let logged = inner.sources.iter_mut().filter_map(|source| source.log_changes(now)).min();
        let look = (inner.members.leaving() > 0).then(|| now + LEAVING_INTERVAL);
        asked.into_iter().chain(logged).chain(look).min()
    }

    /// Takes what a source reports.
    fn present(&self, number: usize, snapshot: SourceSnapshot) {
        let mut inner = self.inner.lock();
        let Some(source) = inner.sources.get_mut(number) else { return };
        source.take_snapshot(snapshot, &self.rules, Instant::now());
        self.reconcile(&mut inner);
    }

    fn away(&self, number: usize, problem: String) {
        if let Some(source) = self.inner.lock().sources.get_mut(number) {
            source.away(problem);
        }
    }

    fn alive(&self, number: usize) {
        if let Some(source) = self.inner.lock().sources.get_mut(number) {
            source.alive(Instant::now());
        }
    }

    fn conflict_of(&self, number: usize, url: &str) -> Option<String> {
        self.inner.lock().sources.get(number)?.conflict_of(url).map(|refusal| refusal.problem.clone())
    }

    /// Makes the registry follow the sources.
    fn reconcile(&self, inner: &mut Inner) {
        let Inner { sources, members, dismissed } = inner;
        dismissed.retain(|_, dismissed| {
            let mut listed = sources.iter().flat_map(|source| &source.workers);
            listed.any(|found| dismissed.is(found))
        });
        let mut claims = Vec::new();
        for (number, source) in sources.iter().enumerate() {
            for found in &source.workers {
                if !dismissed.get(&found.spec.id).is_some_and(|dismissed| dismissed.is(found)) {
                    let owns = members.source_of(found.spec.id) == Some(number);
                    claims.push(Claim { source: number, rank: source.rank, owns, found });
                }
            }
        }
        let names: Vec<Arc<str>> = sources.iter().map(|source| source.name.clone()).collect();
        let merged = merge(claims, &names, self.rules.max_workers);
        let drains: HashSet<usize> = (0..)
            .zip(sources.iter())
            .filter(|(_, source)| source.rank == Rank::Discovered)
            .map(|(number, _)| number)
            .collect();
        let now = Instant::now();
        let changes = members.follow(&merged.accepted, dismissed, &drains, now + self.rules.drain);
        self.resolver.give(addresses_of_hosts(merged.accepted.iter().map(|(_, found)| *found)));
        let mut refused: HashMap<usize, Vec<Refusal>> = HashMap::new();
        for (source, refusal) in merged.refused {
            refused.entry(source).or_default().push(refusal);
        }
        for (number, source) in sources.iter_mut().enumerate() {
            source.set_conflicts(refused.remove(&number).unwrap_or_default());
        }
        self.registry.apply(changes.joining, &changes.gone);
        let registered = self.registry.snapshot();
        for &(id, leaving) in &changes.leaving {
            if let Some(worker) = registered.get(id) {
                worker.set_leaving(leaving != Leaving::No);
                worker.move_streams(Drainer::Discovery, leaving == Leaving::Yes && self.rules.moves);
            }
        }
        if !changes.leaving.is_empty() {
            self.registry.follow_drains();
        }
        let gone = members.take_gone(&registered, now);
        self.registry.apply(Vec::new(), &gone);
        self.changed.notify_one();
    }
}

impl fmt::Debug for Fleet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fleet").field("rules", &self.rules).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
