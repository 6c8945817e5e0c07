//! A handoff that a decode worker has to take: how long it waits, and for which workers (E6).

use pointsman_routing::{CandidateId, Committed, RouteError};
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

use super::{AfterRefusal, Attempts, Waiting};

/// Maximum number of further rounds over decode workers of which none is overloaded to place a handoff.
pub(super) const MAX_HANDOFF_ROUNDS: u32 = 4;
/// How often a committed handoff looks for a decode worker while all of them are busy.
const HANDOFF_INTERVAL: Duration = Duration::from_millis(50);

/// A handoff that has to be consumed.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommittedHandoff {
    /// When load limits no longer hold it up: a quarter of its lease has passed.
    limits_end: Instant,
    /// When its prefill engine frees the blocks.
    ends: Instant,
    /// Whether the handoff may go to any live worker, whatever the worker's load.
    beyond_limits: bool,
    /// Whether no client waits for it any more.
    only_consumes: bool,
}

impl Attempts {
    /// Notes that a handoff exists, whose prefill engine keeps the blocks for `lease` from now on.
    pub fn commit(&mut self, lease: Duration) {
        let now = Instant::now();
        let (limits_end, ends) = (now + lease / 4, now + lease);
        self.committed =
            Some(CommittedHandoff { limits_end, ends, beyond_limits: false, only_consumes: false });
        self.asked_again = None;
    }

    /// Facts for the next routing of decode about the handoff that it has to consume.
    #[must_use]
    pub fn committed(&self, only_consumes: bool) -> Option<Committed> {
        let beyond_limits = self.committed?.beyond_limits;
        Some(Committed { beyond_limits, only_consumes })
    }

    /// Returns whether the prefill engine has freed the blocks of the handoff.
    #[must_use]
    pub fn lease_is_over(&self) -> bool {
        self.committed.is_some_and(|handoff| Instant::now() >= handoff.ends)
    }

    /// Notes that an overloaded decode worker refused the handoff, and when it may be asked again.
    pub fn note_refused_handoff(&mut self, after: Duration) {
        let at = Instant::now() + after;
        self.asked_again = Some(self.asked_again.map_or(at, |first| first.min(at)));
    }

    /// Notes that a decode worker with these ranks takes nothing: it refused even one token of the handoff,
    /// or for a reason of its own. It would again.
    pub fn note_declined_handoff(&mut self, ranks: impl IntoIterator<Item = CandidateId>) {
        let known = self.declined.len();
        self.declined.extend(ranks);
        self.tried.extend_from_slice(self.declined.get(known..).unwrap_or_default());
    }

    /// Returns whether a decode worker takes nothing.
    #[must_use]
    pub fn has_declined(&self) -> bool {
        !self.declined.is_empty()
    }

    /// Notes whether a client waits for the handoff. When none does any more, workers that refuse it are
    /// asked again until its lease ends.
    pub fn note_client(&mut self, waits: bool) {
        if let Some(handoff) = self.committed.as_mut().filter(|handoff| !waits && !handoff.only_consumes) {
            handoff.only_consumes = true;
            self.rounds = 0;
        }
    }

    /// Decides what follows when no decode worker takes a committed handoff. Limits of load hold it up for a
    /// quarter of its lease. Then, and when no worker is eligible, any live worker takes it.
    pub(super) fn after_refused_handoff(&mut self, error: &RouteError) -> AfterRefusal {
        let now = Instant::now();
        let Some(handoff) = self.committed.as_mut().filter(|handoff| now < handoff.ends) else {
            return AfterRefusal::GiveUp;
        };
        if error.is_back_pressure() && now < handoff.limits_end {
            let next = (now + HANDOFF_INTERVAL).min(handoff.limits_end);
            self.waiting = Some(Waiting::Pause(next, Leg::Decode));
            return AfterRefusal::Wait;
        }
        if !std::mem::replace(&mut handoff.beyond_limits, true) {
            return AfterRefusal::RouteAgain;
        }
        let latest = if handoff.only_consumes { handoff.ends } else { handoff.limits_end };
        if self.start_handoff_round(latest) { AfterRefusal::Wait } else { AfterRefusal::GiveUp }
    }

    /// Starts another round when every decode worker refused the connection or the request. It begins when
    /// the first of those that are overloaded may be asked again, unless that is after `latest`. Overloaded
    /// workers are asked again until then, those that refuse one token never, and others a few times.
    fn start_handoff_round(&mut self, latest: Instant) -> bool {
        let may_ask = match self.asked_again {
            Some(at) => at < latest,
            None => self.rounds < MAX_HANDOFF_ROUNDS,
        };
        let again = may_ask && self.tried.iter().any(|id| !self.declined.contains(id));
        if again {
            self.rounds += u32::from(self.asked_again.is_none());
            self.tried.clone_from(&self.declined);
            self.wait_for_pause(Leg::Decode);
            if let (Some(at), Some(Waiting::Pause(until, _))) = (self.asked_again.take(), &mut self.waiting) {
                *until = at.max(*until);
            }
        }
        again
    }
}
