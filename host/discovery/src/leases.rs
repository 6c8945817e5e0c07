//! Leases: workers that register themselves for a time, and renew it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use pointsman_workers::{WorkerId, WorkerSpec};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use crate::{
    fleet::Reporter,
    found::{Found, Read, SourceSnapshot, within_bounds},
    source::Source,
};

/// Shortest lease.
const MIN_LEASE: Duration = Duration::from_secs(1);
/// Longest sleep between two looks at the leases. A pause of the process shows as a longer one.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// Delay of a look from which the process itself was paused: stopped, or its machine moved.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// Bounds of leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRules {
    /// Maximum number of leases at a time.
    pub max_leases: usize,
    /// Longest lease.
    pub max_ttl: Duration,
}

/// Workers that hold a lease.
#[derive(Debug)]
pub struct Leases {
    rules: LeaseRules,
    reporter: Reporter,
    held: Mutex<HashMap<WorkerId, Lease>>,
    /// A lease was taken or renewed.
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Lease {
    spec: WorkerSpec,
    ttl: Duration,
    ends: Instant,
}

/// Why a lease is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    /// No lease of this worker exists.
    #[error("worker {0} holds no lease, or it has ended: send its description to register it again")]
    NoLease(WorkerId),
    /// The time is out of range.
    #[error("a lease of {ttl:?} is out of range: ask for 1 s to {most:?}")]
    Ttl {
        /// Description that was asked for.
        ttl: Duration,
        /// The longest lease.
        most: Duration,
    },
    /// There are too many leases.
    #[error("there are {0} leases: raise discovery.max_workers to accept more")]
    TooMany(usize),
    /// Another source owns the id or URL.
    #[error("{0}")]
    Refused(String),
    /// The description exceeds a bound.
    #[error("{0}")]
    TooLarge(String),
}

impl Leases {
    /// Starts without leases.
    #[must_use]
    pub fn new(reporter: Reporter, rules: LeaseRules) -> Arc<Self> {
        let leases = Self { rules, reporter, held: Mutex::default(), changed: Arc::default() };
        leases.report(&leases.held.lock(), None);
        Arc::new(leases)
    }

    /// Registers a worker for `ttl`, or renews its lease. Another description replaces the earlier one.
    ///
    /// # Errors
    /// [`LeaseError`]; then nothing changed.
    pub fn put(&self, spec: WorkerSpec, ttl: Duration) -> Result<(), LeaseError> {
        self.check_ttl(ttl)?;
        within_bounds(&spec).map_err(LeaseError::TooLarge)?;
        let mut held = self.held.lock();
        let renews = held.get(&spec.id).is_some_and(|lease| lease.spec == spec);
        if held.len() >= self.rules.max_leases && !held.contains_key(&spec.id) {
            return Err(LeaseError::TooMany(held.len()));
        }
        let (id, url) = (spec.id, spec.url.clone());
        let before = held.insert(id, Lease { spec, ttl, ends: Instant::now() + ttl });
        if renews {
            self.reporter.alive();
        } else {
            self.report(&held, None);
        }
        self.changed.notify_one();
        if let Some(problem) = self.reporter.conflict_of(&url) {
            held.remove(&id);
            held.extend(before.map(|before| (id, before)));
            self.report(&held, None);
            return Err(LeaseError::Refused(problem));
        }
        Ok(())
    }

    /// Renews a lease, by its own time unless another is given.
    ///
    /// # Errors
    /// [`LeaseError`]; then nothing changed.
    pub fn renew(&self, id: WorkerId, ttl: Option<Duration>) -> Result<(), LeaseError> {
        if let Some(ttl) = ttl {
            self.check_ttl(ttl)?;
        }
        let mut held = self.held.lock();
        let lease = held.get_mut(&id).ok_or(LeaseError::NoLease(id))?;
        lease.ttl = ttl.unwrap_or(lease.ttl);
        lease.ends = Instant::now() + lease.ttl;
        self.reporter.alive();
        self.changed.notify_one();
        Ok(())
    }

    /// Ends a lease: the worker drains. Returns whether there was one.
    pub fn release(&self, id: WorkerId) -> bool {
        let mut held = self.held.lock();
        let Some(lease) = held.remove(&id) else { return false };
        // The worker itself said that it leaves, so the guard has nothing to confirm.
        self.report(&held, Some(Found::staying(lease.spec).ending()));
        self.report(&held, None);
        true
    }

    /// Returns the end of the fleet that these leases report to, for [`crate::start`].
    #[must_use]
    pub fn reporter(&self) -> &Reporter {
        &self.reporter
    }

    fn check_ttl(&self, ttl: Duration) -> Result<(), LeaseError> {
        let most = self.rules.max_ttl;
        if (MIN_LEASE..=most).contains(&ttl) { Ok(()) } else { Err(LeaseError::Ttl { ttl, most }) }
    }

    fn report(&self, held: &HashMap<WorkerId, Lease>, leaving: Option<Found>) {
        let workers = held.values().map(|lease| Found::staying(lease.spec.clone())).chain(leaving).collect();
        self.reporter.present(SourceSnapshot { workers, refused: Vec::new(), read: Read::Whole });
    }

    /// Moves the ends of all leases by the time for which this process was paused: renewals could not arrive
    /// meanwhile. No lease gets more than a renewal now would give it.
    fn add_pause(&self, pause: Duration, now: Instant) {
        let mut held = self.held.lock();
        for lease in held.values_mut() {
            lease.ends = (lease.ends + pause).min(now + lease.ttl);
        }
        tracing::warn!(?pause, leases = held.len(), "the gateway was paused: leases of workers end later");
    }

    /// Ends the leases whose time is over. Returns when the next one ends.
    fn expire(&self, now: Instant, report: bool) -> Option<Instant> {
        let mut held = self.held.lock();
        let before = held.len();
        held.retain(|id, lease| {
            let stays = lease.ends > now;
            if !stays {
                tracing::info!(worker = %id, url = &*lease.spec.url, ttl = ?lease.ttl, "lease of a worker ended");
            }
            stays
        });
        if report || held.len() < before {
            self.report(&held, None);
        }
        held.values().map(|lease| lease.ends).min()
    }
}

impl Source for Arc<Leases> {
    async fn run(self, reporter: Reporter) {
        let (mut recheck, mut look) = (false, None);
        loop {
            let now = Instant::now();
            let delay = look.map(|look| now.saturating_duration_since(look)).unwrap_or_default();
            if delay >= MIN_PAUSE {
                self.add_pause(delay, now);
            }
            let next = self.expire(now, std::mem::take(&mut recheck));
            look = next.map(|next| next.min(now + MAX_SLEEP));
            tokio::select! {
                () = sleep_until(look.unwrap_or(now)), if look.is_some() => {}
                () = self.changed.notified() => {}
                () = reporter.recheck() => recheck = true,
            }
        }
    }
}

#[cfg(test)]
mod tests;
