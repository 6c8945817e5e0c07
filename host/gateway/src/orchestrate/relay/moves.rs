//! Moves a stream away from a worker that drains: the rest of its answer is generated elsewhere, as after a
//! failure of its engine, and no worker is charged with a failure (I15).
//!
//! ```text
//! event of the engine --> asked to move? --> can it? --> a free turn? --> are other workers found?
//!                         no: relay it   no: stays   no: later        no: later
//!                                                                      yes: book them, end the old
//!                                                                           leg, send the new ones
//! ```

use pointsman_orchestration::Event;
use pointsman_workers::StreamMove;
use tokio::time::{Duration, Instant};

use super::Relay;
use crate::{
    openai::{
        chunk::Reason,
        continuation::{NO_ROOM, Rest},
        error::ApiError,
    },
    orchestrate::Drive,
};

/// Time until a stream that found no turn to move asks for one again.
const TURN_INTERVAL: Duration = Duration::from_millis(50);
/// Time until a stream looks for workers again when none could take its rest.
const ROUTE_INTERVAL: Duration = Duration::from_secs(1);

/// The moves of one stream.
#[derive(Default)]
pub(super) struct Moving {
    /// The drain of its worker to whose end it stays there; 0: none.
    stays_in: u32,
    /// It does not leave before.
    not_before: Option<Instant>,
    /// The departure that runs, until the first token of the rest.
    running: Option<Departure>,
}

/// Why the rest of a stream is generated elsewhere or later, though its engine works.
pub(super) enum Departure {
    /// Its worker drains.
    Move(StreamMove),
    /// A request of a higher priority waits.
    Pause,
}

/// Why a stream does not leave its worker now.
pub(super) enum Obstacle {
    /// It stays until its end.
    Stays(Reason),
    /// It asks again at an event after this time.
    Later(Duration),
}

impl Moving {
    /// Whether the rest of the stream is sought because it leaves its worker.
    pub(super) fn is_under_way(&self) -> bool {
        self.running.is_some()
    }

    /// The stream leaves its worker.
    pub(super) fn begin(&mut self, departure: Departure) {
        *self = Self { running: Some(departure), ..Self::default() };
    }

    pub(super) fn waits_until(&mut self, time: Instant) {
        self.not_before = Some(time);
    }

    /// The stream is served by another worker than before.
    pub(super) fn changes_worker(&mut self) {
        (self.stays_in, self.not_before) = (0, None);
    }
}

impl Relay {
    /// Moves the stream if its worker asks for it, and it can. Called between events.
    pub(super) fn move_if_asked(&mut self) {
        self.move_arrived();
        let asks = self.worker().map_or(0, |worker| worker.asks_to_move());
        if asks == 0 || asks == self.resumption.moving.stays_in {
            return;
        }
        if self.can_leave() {
            match self.move_elsewhere() {
                Ok(()) => {}
                Err(Obstacle::Later(pause)) => self.resumption.moving.waits_until(self.read_at + pause),
                Err(Obstacle::Stays(reason)) => {
                    self.resumption.moving.stays_in = asks;
                    self.drive.stays(reason);
                }
            }
        }
    }

    /// Whether the client reads an answer that its engine still writes, and nothing stood in the way a moment
    /// ago.
    pub(super) fn can_leave(&self) -> bool {
        let has_all = self.detached || self.over || self.closed || self.finish_seen;
        let is_early = self.resumption.moving.not_before.is_some_and(|at| self.read_at < at);
        !has_all && !is_early && self.incoming.is_some()
    }

    /// If the stream left its worker, counts it as moved once a token of the rest arrived.
    pub(super) fn move_arrived(&mut self) {
        // A rest may have no token: its first event may be the last one.
        let arrived = !self.drive.legs.awaits_rest() || self.finish_seen;
        if self.resumption.moving.is_under_way() && !self.detached && arrived {
            self.move_succeeded();
        }
    }

    /// Moves the stream: nothing of the old leg ends before workers for the rest were found.
    fn move_elsewhere(&mut self) -> Result<(), Obstacle> {
        if let Err(reason) = &self.resumption.transcript {
            return Err(Obstacle::Stays(reason));
        }
        if self.drive.legs.has_moved_enough() {
            return Err(Obstacle::Stays("moved_twice"));
        }
        let leg = self.drive.answering();
        if self.drive.request.hints.pinned(leg).is_some() {
            return Err(Obstacle::Stays("pinned"));
        }
        if !self.is_begun() || !self.drive.legs.may_leave() {
            return Err(Obstacle::Later(Duration::ZERO));
        }
        let Some(turn) = self.worker().and_then(|worker| worker.begin_move()) else {
            return Err(Obstacle::Later(TURN_INTERVAL));
        };
        // Asked first: the rest of a long prompt takes time to write.
        if !self.drive.others_are_free() {
            return Err(Obstacle::Later(ROUTE_INTERVAL));
        }
        let rest = self.movable_rest()?;
        if !self.drive.plan_move() {
            return Err(Obstacle::Later(ROUTE_INTERVAL));
        }
        (self.resumption.rest, self.resumption.is_suspect) = (Some(rest), false);
        self.resumption.moving.begin(Departure::Move(turn));
        self.drive.account.moved(leg);
        self.drive.runs.answering.failure = Some(ApiError::BadUpstream("its worker drains".to_owned()));
        self.report(Event::Move);
        self.drive.end_plan();
        Ok(())
    }

    /// Returns the request for the rest, if the stream can be left here.
    pub(super) fn movable_rest(&self) -> Result<Box<Rest>, Obstacle> {
        let transcript = self.resumption.transcript.as_ref().map_err(|reason| Obstacle::Stays(reason))?;
        self.safe_rest(transcript).map_err(|reason| match reason {
            // The next tokens may change it.
            "no_text"
            | "ends_with_a_space"
            | "within_a_stop_string"
            | "within_a_character"
            | "nothing_is_left" => Obstacle::Later(TURN_INTERVAL),
            // Other requests end.
            NO_ROOM => Obstacle::Later(ROUTE_INTERVAL),
            reason => Obstacle::Stays(reason),
        })
    }

    /// If the stream left its worker, counts it as moved. Returns whether it did.
    pub(super) fn move_succeeded(&mut self) -> bool {
        let Some(running) = self.resumption.moving.running.take() else { return false };
        self.resumption.cause = None;
        let (result, cause) = match running {
            Departure::Move(running) => {
                running.succeeded();
                ("moved", "drain")
            }
            Departure::Pause => ("continued", "preempt"),
        };
        self.drive.state.metrics.continued(result, cause);
        true
    }

    /// Counts the stream that left its worker, if it did, as ended with an error. Returns whether it did.
    pub(super) fn move_failed(&mut self) -> bool {
        let Some(running) = self.resumption.moving.running.take() else { return false };
        let cause = match running {
            Departure::Move(running) => {
                running.failed();
                "drain"
            }
            Departure::Pause => "preempt",
        };
        self.drive.state.metrics.continued("failed", cause);
        true
    }
}

impl Drive {
    /// Counts a request that stays until its end with a worker that asks its streams to move.
    pub(in crate::orchestrate) fn stays(&mut self, reason: Reason) {
        self.state.metrics.continued(reason, "drain");
        self.account.not_moved(reason);
        self.candidate(self.answering()).inspect(|candidate| candidate.worker.note_stays(reason));
    }
}
