//! Streams that leave a worker that drains, or pause: the rest of the answer is generated elsewhere or later,
//! as after a failure.

use pointsman_workers::Leg;

use super::{Actions, Client, LegOrder, LegState, Legs, Shape};

/// How often one stream may leave a worker that drains. Each move computes the prompt again: a stream that
/// left two of them stays on the third until its end.
const MAX_MOVES: u32 = 2;
/// How often one stream may pause, for the same reason.
const MAX_PAUSES: u32 = 2;

impl Legs {
    /// Returns whether a handoff exists that decode has not consumed: its prefill worker must not leave yet.
    #[must_use]
    pub fn has_open_handoff(&self) -> bool {
        self.committed && !self.consumed && !self.finished
    }

    /// Returns whether decode generates an answer that no client waits for, only because its handoff may not
    /// be consumed yet.
    #[must_use]
    pub fn generates_for_handoff(&self) -> bool {
        let runs = self.state.answering == LegState::InFlight && self.state.prefill == LegState::Over;
        runs && self.only_consumes() && !self.consuming && !self.consumed
    }

    /// Returns whether the client waits for the rest of an answer, no token of which arrived.
    #[must_use]
    pub fn awaits_rest(&self) -> bool {
        self.resumes && !self.finished && !self.only_consumes()
    }

    /// The client has the head of an answer and no event of it: the legs may be retried as before the head.
    pub fn begin_again(&mut self) {
        self.resumes |= self.client == Client::Reading && !self.consumed && !self.held;
    }

    /// An event of the answer arrived, and it is not the rest of one.
    pub fn stream_began(&mut self) {
        self.resumes = false;
    }

    /// Returns the leg that is routed first.
    #[must_use]
    pub fn first_leg(&self) -> Leg {
        self.first_leg_of(self.shape)
    }

    /// Returns the leg of a shape that is routed first.
    #[must_use]
    pub fn first_leg_of(&self, shape: Shape) -> Leg {
        match (shape, self.policy.order) {
            (Shape::Aggregated, _) => Leg::Aggregated,
            (Shape::Remote, LegOrder::PrefillFirst) => Leg::Prefill,
            (Shape::Remote, LegOrder::DecodeFirst) => Leg::Decode,
        }
    }

    /// Returns whether the stream left as many workers as it may.
    #[must_use]
    pub fn has_moved_enough(&self) -> bool {
        self.moves >= MAX_MOVES
    }

    /// Returns whether the stream paused as often as it may.
    #[must_use]
    pub fn has_paused_enough(&self) -> bool {
        self.pauses >= MAX_PAUSES
    }

    /// Returns whether the stream may leave its worker now: its client has a part of the answer, and no
    /// prefill runs for it.
    #[must_use]
    pub fn may_leave(&self) -> bool {
        let runs_alone =
            self.state.answering == LegState::InFlight && self.state.prefill != LegState::InFlight;
        runs_alone && self.has_part()
    }

    pub(super) fn move_stream(&mut self) -> Actions {
        if !self.may_leave() || self.has_moved_enough() {
            return Actions::new();
        }
        self.moves += 1;
        self.leave()
    }

    pub(super) fn pause_stream(&mut self) -> Actions {
        if !self.may_leave() || self.has_paused_enough() {
            return Actions::new();
        }
        self.pauses += 1;
        self.leave()
    }

    /// Ends the leg that answers, and starts over with the rest of the answer. It is not a failure, and takes
    /// none of the continuations and retries.
    fn leave(&mut self) -> Actions {
        // The stream was healthy: it does not end because the first worker of its rest fails.
        self.policy.retries = self.policy.retries.max(1);
        let mut actions = self.stop(self.answering());
        actions.extend(self.begin_rest());
        actions
    }
}
