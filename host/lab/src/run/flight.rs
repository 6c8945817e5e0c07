//! A request between its arrival and its end.

use std::{collections::VecDeque, pin::Pin, sync::Arc};

use pointsman_orchestration::{Action, Actions, Admission, Attempts, Legs, SessionHolds, Sessions};
use pointsman_routing::{CandidateId, Lane, Pairing, Receipt, ReservedPlace, RoutingRequest};
use pointsman_workers::{Booking, Candidate, Leg, PerLeg};
use prefix_index::ProvisionalRecord;
use tokio::{
    sync::futures::OwnedNotified,
    time::{Duration, Instant},
};

use crate::{engines::RANK, outcome::Ended};

/// Part of a request that one engine runs. The tag of the sequence contains it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The prefill leg of a pair.
    Prefill,
    /// The decode leg of a pair.
    Decode,
    /// The whole request.
    Whole,
}

impl Part {
    /// Returns the leg to which the part belongs.
    pub(super) fn leg(self) -> Leg {
        match self {
            Self::Prefill => Leg::Prefill,
            Self::Decode => Leg::Decode,
            Self::Whole => Leg::Aggregated,
        }
    }
}

/// Longest time that a request keeps its session bound.
const LONGEST: Duration = Duration::from_secs(3_600);

/// Number of attempts that tags distinguish.
const ATTEMPTS: u64 = 16;

/// Returns the tag of a request's part, which contains the request's number, the attempt and the part.
pub(super) fn tag(number: usize, attempt: u32, part: Part) -> u64 {
    (number as u64 * ATTEMPTS + u64::from(attempt) % ATTEMPTS) * 4 + part as u64
}

/// Returns the number of the request that a tag belongs to.
pub(super) fn request_of(tag: u64) -> usize {
    usize::try_from(tag / 4 / ATTEMPTS).unwrap_or(usize::MAX)
}

/// Returns the part that a tag names.
pub(super) fn part_of(tag: u64) -> Part {
    match tag % 4 {
        0 => Part::Prefill,
        1 => Part::Decode,
        _ => Part::Whole,
    }
}

/// One leg and its worker.
#[derive(Debug)]
pub(super) struct LegRun {
    /// Position of the engine.
    pub(super) engine: usize,
    pub(super) candidate: Candidate,
    pub(super) booking: Option<Booking>,
    /// Until the engine begins the leg's output: the record that the prompt is cached there.
    pub(super) record: Option<ProvisionalRecord>,
    /// The sequence that the engine runs or will run; `None` if nothing was sent or the leg has ended.
    pub(super) tag: Option<u64>,
    /// Time at which it was sent to the engine.
    pub(super) sent: Duration,
}

impl LegRun {
    /// Notes that the engine has the prompt.
    pub(super) fn keep_record(&mut self) {
        if let Some(mut record) = self.record.take() {
            record.keep();
        }
    }
}

/// Blocks of a finished prefill that the decode engine has not read yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    /// Position of the engine.
    pub(super) engine: usize,
    pub(super) tag: u64,
    /// Time at which the lease ends.
    pub(super) until: Duration,
    /// Whether the engine lost the blocks in an outage.
    pub(super) lost: bool,
}

/// The decision of a decode override that learns, kept until its outcome is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Override {
    pub(super) lane: Lane,
    pub(super) seed: u64,
    pub(super) by_policy: bool,
}

/// A running request.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) at: Duration,
    pub(super) arrived: Instant,
    pub(super) request: RoutingRequest,
    /// Hashes of the prompt's blocks, as the engines know them.
    pub(super) chain: Arc<[u64]>,
    pub(super) legs: Legs,
    pub(super) actions: VecDeque<Action>,
    pub(super) attempts: Attempts,
    pub(super) runs: PerLeg<Option<LegRun>>,
    /// The decode candidate for which the decode override chose local prefill.
    pub(super) planned: Option<CandidateId>,
    session_holds: SessionHolds,
    pub(super) held: Option<Held>,
    /// The place in the queue that is reserved for decode while prefill runs.
    pub(super) place: Option<ReservedPlace>,
    /// Number of waits so far. The end of an earlier wait is ignored.
    pub(super) waits: u32,
    /// Completes when the queue wakes the request.
    pub(super) woken: Option<Pin<Box<OwnedNotified>>>,
    /// Admission by the queue, once a worker was found.
    pub(super) admission: Option<Admission>,
    /// First failure of a leg.
    pub(super) cause: Option<Ended>,
    /// Whether the client receives that failure.
    pub(super) failed: bool,
    pub(super) first_token: Option<Duration>,
    pub(super) last_token: (Duration, u32),
    /// Number of prompt tokens that the engine which computed the prompt had cached.
    pub(super) cached: u32,
    pub(super) fell_back: bool,
    pub(super) receipts: Vec<Receipt>,
    pub(super) decode_override: Option<Override>,
}

impl Flight {
    /// Returns a request that was planned, with its first actions.
    pub(super) fn new(
        at: Duration,
        request: RoutingRequest,
        chain: Arc<[u64]>,
        (legs, actions): (Legs, Actions),
        seed: u64,
    ) -> Self {
        Self {
            at,
            arrived: Instant::now(),
            request,
            chain,
            legs,
            actions: actions.into_iter().collect(),
            attempts: Attempts::seeded(seed),
            runs: PerLeg::default(),
            planned: None,
            session_holds: SessionHolds::default(),
            held: None,
            place: None,
            waits: 0,
            woken: None,
            admission: None,
            cause: None,
            failed: false,
            first_token: None,
            last_token: (at, 0),
            cached: 0,
            fell_back: false,
            receipts: Vec::with_capacity(2),
            decode_override: None,
        }
    }

    /// Keeps the session's leg bound while the request runs.
    pub(super) fn hold_session(&mut self, sessions: &Sessions, leg: Leg, ttl: Duration) {
        let bound = self.bound_leg(leg);
        if let Some((session, end)) = self.bindable_session(ttl) {
            sessions.hold(session, bound, &mut self.session_holds, end);
        }
    }

    /// Binds the session to the worker that a leg reached.
    pub(super) fn bind_session(&mut self, sessions: &Sessions, leg: Leg, ttl: Duration) {
        let bound = self.bound_leg(leg);
        if let (Some((session, end)), Some(run)) = (self.bindable_session(ttl), &self.runs[leg]) {
            let candidate = (run.candidate.worker.id(), RANK);
            sessions.bind(session, bound, &mut self.session_holds, candidate, end);
        }
    }

    /// Begins the session's time without requests.
    pub(super) fn leave_session(&mut self, sessions: &Sessions, ttl: Duration) {
        if let Some(session) = self.request.session_hash {
            sessions.release(session, &mut self.session_holds, ttl);
        }
    }

    /// A planned worker is one of the decode leg.
    fn bound_leg(&self, leg: Leg) -> Leg {
        self.planned_for(leg).map_or(leg, |_| Leg::Decode)
    }

    /// Returns the request's session, if sessions are bound, and until when it is while the request runs.
    fn bindable_session(&self, ttl: Duration) -> Option<(u64, Instant)> {
        Some((self.request.session_hash?, Instant::now() + ttl.max(LONGEST))).filter(|_| !ttl.is_zero())
    }

    /// Returns the candidate of the other leg, if one is chosen.
    pub(super) fn other_leg(&self, leg: Leg) -> Option<CandidateId> {
        let other = self.runs[leg.partner()?].as_ref();
        other
            .filter(|run| leg == Leg::Decode || run.booking.is_some())
            .map(|run| (run.candidate.worker.id(), RANK))
    }

    /// Returns the worker that a leg is planned for, while the plan holds.
    pub(super) fn planned_for(&self, leg: Leg) -> Option<CandidateId> {
        self.planned.filter(|_| leg == Leg::Aggregated && self.legs.follows_plan())
    }

    /// Returns what is known of the handoff when this leg is routed.
    pub(super) fn pairing(&self, leg: Leg) -> Pairing {
        if leg != Leg::Decode {
            return Pairing::default();
        }
        let is_first = self.other_leg(leg).is_none();
        let reserved = self.place.as_ref().map(ReservedPlace::worker);
        let committed = self.attempts.committed(self.legs.only_consumes());
        Pairing { is_first, reserved, committed, other_pin: None }
    }

    /// Returns the positions of the engines that computed the prompt and generated the answer.
    pub(super) fn engines(&self) -> (usize, usize) {
        let engine = |run: &Option<LegRun>| run.as_ref().map(|run| run.engine);
        let (prefill, decode) = (engine(&self.runs.prefill), engine(&self.runs.answering));
        let prefill = if self.legs.answering() == Leg::Aggregated { decode } else { prefill };
        let prefill = prefill.or(decode).unwrap_or_default();
        (prefill, decode.unwrap_or(prefill))
    }

    /// Returns whether its decode leg is the sequence of this tag.
    pub(super) fn decodes(&self, tag: u64) -> bool {
        self.runs.answering.as_ref().is_some_and(|decode| decode.tag == Some(tag))
    }
}
