//! Counters, and the guard that counts the end of a request exactly once.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::Engine;
use crate::leg::Leg;

/// Result of a handoff at this engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandoffResult {
    Pulled,
    Reused,
    Wrong,
    Missing,
    Expired,
    Failed,
}

/// Handoffs by result. A prefill engine counts the pulls that it served, a decode engine those that it
/// requested.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Handoffs {
    /// Pulled for the first time.
    pub pulled: u64,
    /// Pulled again, or the bootstrap room was used twice.
    pub reused: u64,
    /// Wrong prompt, wrong blocks, wrong engine, or unknown handoff.
    pub wrong: u64,
    /// The parameters were missing or incomplete.
    pub missing: u64,
    /// Pulled after the lease had expired, or the other leg never arrived.
    pub expired: u64,
    /// The other engine was unreachable or failed.
    pub failed: u64,
}

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    Ok,
    Invalid,
    Refused,
    Failed,
    Fault,
    Aborted,
    Disconnected,
}

#[derive(Default)]
pub(crate) struct Counters {
    handoffs: Mutex<Handoffs>,
    requests: Mutex<BTreeMap<(Leg, Outcome), u64>>,
    generated: AtomicU64,
    first_tokens: Latencies,
    intervals: Latencies,
    disconnects: Mutex<VecDeque<Disconnect>>,
}

/// Number and sum of latencies.
#[derive(Default)]
struct Latencies {
    count: AtomicU64,
    micros: AtomicU64,
}

impl Latencies {
    fn add(&self, latency: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add(u64::try_from(latency.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn read(&self) -> (u64, Duration) {
        let micros = Duration::from_micros(self.micros.load(Ordering::Relaxed));
        (self.count.load(Ordering::Relaxed), micros)
    }
}

/// A client that disconnected before the end of its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disconnect {
    /// The answer's `id`.
    pub id: String,
    /// Time at which the engine noticed it, nanoseconds of the monotonic clock.
    pub at_ns: u64,
}

/// Guard of an accepted request. Dropping it without an outcome counts a disconnected client.
pub(crate) struct InFlight {
    engine: Arc<Engine>,
    leg: Leg,
    ended: bool,
    /// The answer's `id`, once it has one.
    pub(crate) id: Option<String>,
}

impl Counters {
    pub(crate) fn handoff(&self, result: HandoffResult) {
        let mut all = self.handoffs.lock();
        let count = match result {
            HandoffResult::Pulled => &mut all.pulled,
            HandoffResult::Reused => &mut all.reused,
            HandoffResult::Wrong => &mut all.wrong,
            HandoffResult::Missing => &mut all.missing,
            HandoffResult::Expired => &mut all.expired,
            HandoffResult::Failed => &mut all.failed,
        };
        *count += 1;
    }

    pub(crate) fn token(&self) {
        self.generated.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the time from a sequence's submission to its first token.
    pub(crate) fn first_token(&self, after: Duration) {
        self.first_tokens.add(after);
    }

    /// Counts the time between two tokens of a sequence.
    pub(crate) fn interval(&self, time: Duration) {
        self.intervals.add(time);
    }

    /// Returns number and sum of the times to first token, and of those between tokens.
    pub(crate) fn latencies(&self) -> [(u64, Duration); 2] {
        [self.first_tokens.read(), self.intervals.read()]
    }

    pub(crate) fn end(&self, leg: Leg, outcome: Outcome) {
        *self.requests.lock().entry((leg, outcome)).or_default() += 1;
    }

    fn disconnected(&self, id: String, keep: usize) {
        let mut log = self.disconnects.lock();
        log.push_back(Disconnect { id, at_ns: monotonic_nanos() });
        while log.len() > keep {
            log.pop_front();
        }
    }

    pub(crate) fn disconnect_log(&self) -> Vec<Disconnect> {
        self.disconnects.lock().iter().cloned().collect()
    }

    pub(crate) fn handoffs(&self) -> Handoffs {
        *self.handoffs.lock()
    }

    pub(crate) fn generated(&self) -> u64 {
        self.generated.load(Ordering::Relaxed)
    }

    pub(crate) fn aborted(&self) -> u64 {
        self.sum(Outcome::Aborted)
    }

    pub(crate) fn disconnects(&self) -> u64 {
        self.sum(Outcome::Disconnected)
    }

    /// Returns the number of requests by `leg/outcome`.
    pub(crate) fn requests(&self) -> HashMap<String, u64> {
        self.by_outcome()
            .into_iter()
            .map(|(leg, outcome, count)| (format!("{leg}/{outcome}"), count))
            .collect()
    }

    pub(crate) fn by_outcome(&self) -> Vec<(&'static str, &'static str, u64)> {
        let all = self.requests.lock();
        all.iter().map(|((leg, outcome), count)| (leg.as_str(), outcome.as_str(), *count)).collect()
    }

    fn sum(&self, of: Outcome) -> u64 {
        self.requests.lock().iter().filter(|((_, outcome), _)| *outcome == of).map(|(_, count)| count).sum()
    }
}

impl Handoffs {
    /// Returns the label and the count of each result.
    pub(crate) fn labelled(&self) -> [(&'static str, u64); 6] {
        [
            ("pulled", self.pulled),
            ("reused", self.reused),
            ("wrong", self.wrong),
            ("missing", self.missing),
            ("expired", self.expired),
            ("failed", self.failed),
        ]
    }
}

/// Returns the nanoseconds of the machine's monotonic clock, which other processes can read, too.
pub(crate) fn monotonic_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
    seconds * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or_default()
}

impl Outcome {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Invalid => "invalid",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Fault => "fault",
            Self::Aborted => "aborted",
            Self::Disconnected => "disconnected",
        }
    }
}

impl InFlight {
    pub(crate) fn new(engine: &Arc<Engine>, leg: Leg) -> Self {
        Self { engine: Arc::clone(engine), leg, ended: false, id: None }
    }

    /// Disarms the guard.
    pub(crate) fn over(of: &Self) -> Self {
        Self { engine: Arc::clone(&of.engine), leg: of.leg, ended: true, id: None }
    }

    pub(crate) fn end(&mut self, outcome: Outcome) {
        if !std::mem::replace(&mut self.ended, true) {
            self.engine.counters.end(self.leg, outcome);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let (false, Some(id)) = (self.ended, self.id.take()) {
            self.engine.counters.disconnected(id, self.engine.config.record);
        }
        self.end(Outcome::Disconnected);
    }
}
