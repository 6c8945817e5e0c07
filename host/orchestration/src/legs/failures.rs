//! Failures of a leg, the deadline, and a client that leaves [E]: what is retried and what still has to run.

use pointsman_workers::Leg;
use smallvec::smallvec;

use super::{Action, Actions, Client, Failed, HandoffKind, LegState, Legs, Lost, MAX_BROKEN, Shape};

impl Legs {
    pub(super) fn unroutable(&mut self) -> Actions {
        let leg = if self.state.prefill == LegState::Routing {
            Leg::Prefill
        } else if matches!(self.state.answering, LegState::Routing | LegState::Reserving) {
            self.answering()
        } else {
            return Actions::new();
        };
        if leg == Leg::Decode && self.owes() {
            return self.consume_elsewhere();
        }
        // The retry of a failed prefill: after it, the prefill has failed for good.
        if leg == Leg::Prefill && self.prefill_failed {
            return self.no_prefill();
        }
        self.fail(leg)
    }

    /// No decode worker takes a committed handoff on the client's terms. The client gets the error, and the
    /// handoff is consumed on terms of its own.
    fn consume_elsewhere(&mut self) -> Actions {
        let mut actions = self.fail_client(Leg::Decode);
        actions.extend(self.route_decode());
        actions
    }

    fn route_decode(&mut self) -> Actions {
        self.state.answering = LegState::Routing;
        smallvec![Action::Route(Leg::Decode)]
    }

    pub(super) fn handoff_lost(&mut self, lost: Lost) -> Actions {
        if self.state.answering != LegState::Routing || !self.owes() {
            return Actions::new();
        }
        self.state.answering = LegState::Over;
        let mut actions = self.give_up_handoff(lost);
        let retries = lost == Lost::PrefillDied && self.may_retry();
        actions.extend(if retries { self.retry() } else { self.fail(Leg::Decode) });
        actions
    }

    /// Gives a handoff up that has to be consumed, if there is one.
    fn give_up_handoff(&mut self, lost: Lost) -> Actions {
        if !self.owes() {
            return Actions::new();
        }
        self.committed = false;
        smallvec![Action::Lose(lost)]
    }

    pub(super) fn no_prefill(&mut self) -> Actions {
        if self.state.prefill != LegState::Routing {
            return Actions::new();
        }
        if self.may_fall_back() { self.fall_back() } else { self.fail(Leg::Prefill) }
    }

    /// The prefill of a completed handoff pinned nothing: decode computes the prompt itself.
    pub(super) fn nothing_handed_over(&mut self) -> Actions {
        if self.state.prefill != LegState::InFlight {
            return Actions::new();
        }
        if self.only_consumes() {
            self.state.prefill = LegState::Over;
            return self.cancel_all();
        }
        let actions = self.handoff();
        self.committed = false;
        actions
    }

    pub(super) fn prefill_failed(&mut self, failed: Failed) -> Actions {
        if self.state.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.state.prefill = LegState::Over;
        self.prefill_failed = true;
        self.broken += u32::from(failed.broke);
        let mut actions = smallvec![Action::Cancel(Leg::Prefill)];
        if self.state.answering == LegState::InFlight {
            // The decode leg waits for a prefill that has failed [E3].
            actions.extend(self.stop(Leg::Decode));
        }
        if failed.retryable && self.may_retry() {
            actions.extend(self.retry());
            return actions;
        }
        let refused = failed.refused && !failed.retryable;
        let end = if self.may_fall_back() && !refused { self.fall_back() } else { self.fail(Leg::Prefill) };
        actions.extend(end);
        actions
    }

    /// Returns whether the request may run on a worker that prefills locally (B6). That worker would be one
    /// more engine on which the request may break.
    #[must_use]
    pub fn may_fall_back(&self) -> bool {
        self.policy.local_fallback && self.nothing_is_sent() && self.broken < MAX_BROKEN
    }

    fn fall_back(&mut self) -> Actions {
        let mut actions = self.release_decode();
        self.policy.local_fallback = false;
        self.shape = Shape::Aggregated;
        actions.push(Action::FallBackToLocal);
        actions.extend(self.start());
        actions
    }

    /// Releases a decode worker that was booked and got nothing: the next attempt may need its place.
    fn release_decode(&mut self) -> Actions {
        if self.state.answering != LegState::Routed {
            return Actions::new();
        }
        self.state.answering = LegState::Over;
        smallvec![Action::Cancel(Leg::Decode)]
    }

    pub(super) fn decode_failed(&mut self, failed: Failed) -> Actions {
        if self.state.answering != LegState::InFlight {
            return Actions::new();
        }
        self.state.answering = LegState::Over;
        self.broken += u32::from(failed.broke);
        // An engine that refuses the request has not taken the handoff, also if the head of its answer came:
        // some check a request, or their load, only within an answer with status 200.
        self.dispatched &= failed.began;
        let answering = self.answering();
        if failed.continuable && failed.retryable && self.may_continue() {
            return self.continue_elsewhere();
        }
        let mut actions = smallvec![Action::Cancel(answering)];
        if self.asks_pair(failed) {
            actions.extend(self.start_without_plan());
            return actions;
        }
        // No engine began to work on it, so another decode worker may take it [E5]. It costs a retry only if
        // the engine refused the request. An engine that refuses even one token says nothing about the
        // others. An addressed handoff names its worker.
        let is_refused = failed.refused && !self.consuming;
        let asks_another = is_refused && failed.retryable && self.may_retry();
        let is_free = self.handoff_kind() != Some(HandoffKind::Addressed);
        let goes_on = asks_another || (!is_refused && (failed.retryable || failed.refused));
        if self.owes() && is_free && goes_on {
            self.policy.retries -= u32::from(asks_another);
            // A client that has a part of the answer gets no other one.
            actions.extend(if self.nothing_is_sent() {
                self.route_decode()
            } else {
                self.consume_elsewhere()
            });
            return actions;
        }
        // The engine refuses the request itself, and so would every other one. One token is not refused,
        // except by an engine that takes nothing.
        if self.owes() && is_refused && !asks_another {
            if is_free && failed.retryable {
                actions.extend(self.consume_elsewhere());
            } else {
                actions.extend(self.fail_client(answering));
                actions.extend(self.send_decode());
            }
            return actions;
        }
        actions.extend(self.give_up_handoff(Lost::NoDecodeWorker));
        if self.state.prefill == LegState::InFlight {
            actions.extend(self.stop(Leg::Prefill));
        }
        if failed.retryable && self.may_retry() {
            actions.extend(self.retry());
            return actions;
        }
        // Its prefill may be what broke the decode leg.
        let is_pair = self.shape == Shape::Remote && failed.broke && failed.retryable;
        actions.extend(if is_pair && self.may_fall_back() { self.fall_back() } else { self.fail(answering) });
        actions
    }

    /// Returns whether the rest of a stream may be generated elsewhere: the client has a part of the answer
    /// and still reads, and no finish reason was held back.
    fn may_continue(&self) -> bool {
        self.has_part() && self.policy.continuations > 0 && self.broken < MAX_BROKEN
    }

    /// Returns whether the client has a part of the answer and reads on.
    pub(super) fn has_part(&self) -> bool {
        self.client == Client::Reading && self.consumed && !self.held
    }

    /// Ends what is left of the legs, and starts over with the rest of the answer.
    fn continue_elsewhere(&mut self) -> Actions {
        self.policy.continuations -= 1;
        let mut actions = Actions::new();
        if self.is_abortable() {
            // An engine that hangs may run it once it continues.
            actions.push(Action::Abort(self.answering()));
        }
        actions.push(Action::Cancel(self.answering()));
        actions.extend(self.begin_rest());
        actions
    }

    /// Starts over with the rest of an answer, whose answering leg was ended. Nothing is sent before the
    /// engines of the old legs were told to stop.
    pub(super) fn begin_rest(&mut self) -> Actions {
        let mut actions = self.stop(Leg::Prefill);
        actions.push(Action::Continue);
        (self.resumes, self.consumed, self.prefill_failed) = (true, false, false);
        actions.extend(self.start_without_plan());
        actions
    }

    /// Returns whether no byte of the attempt was sent downstream: of a request, or of the rest of an answer.
    pub(super) fn nothing_is_sent(&self) -> bool {
        self.client == Client::Waiting || (self.client == Client::Reading && self.resumes)
    }

    /// Ends the request for the client. Work that engines still need continues until the second deadline.
    pub(super) fn deadline(&mut self) -> Actions {
        let goes_on = !self.overdue && self.must_go_on();
        self.overdue = true;
        let mut actions = if goes_on { Actions::new() } else { self.give_up_handoff(Lost::NoDecodeWorker) };
        if !goes_on {
            actions.extend(self.stop_all());
        }
        if matches!(self.client, Client::Waiting | Client::Reading) {
            (self.client, self.held) = (Client::Served, false);
            actions.push(Action::FailDeadline);
        }
        if goes_on { actions } else { self.finish(actions) }
    }

    /// Returns whether the request may be tried once more, as far as the number of retries goes.
    #[must_use]
    pub fn has_retries(&self) -> bool {
        self.policy.retries > 0
    }

    /// Returns whether a retry is allowed: only while no byte of the attempt was sent downstream [invariant
    /// 7], and once after an engine broke.
    fn may_retry(&self) -> bool {
        self.policy.retries > 0 && self.nothing_is_sent() && self.broken < MAX_BROKEN
    }

    fn retry(&mut self) -> Actions {
        self.policy.retries -= 1;
        let mut actions = self.release_decode();
        actions.extend(self.start_without_plan());
        actions
    }

    fn fail(&mut self, leg: Leg) -> Actions {
        let actions = self.fail_client(leg);
        self.finish(actions)
    }

    /// Gives the client the failure of a leg, unless it has its answer or left.
    fn fail_client(&mut self, leg: Leg) -> Actions {
        if self.only_consumes() {
            return Actions::new();
        }
        self.client = Client::Served;
        smallvec![Action::Fail(leg)]
    }

    pub(super) fn client_gone(&mut self) -> Actions {
        if self.only_consumes() {
            return Actions::new();
        }
        self.client = Client::Gone;
        self.held = false;
        if self.must_go_on() {
            return Actions::new();
        }
        let is_pair = self.shape == Shape::Remote;
        if is_pair && self.is_abortable() && !self.consumed && self.state.prefill != LegState::Routed {
            return self.abort_both();
        }
        self.cancel_all()
    }

    /// Returns whether engines hold blocks that only more work frees, although no client waits for the answer
    /// [E1].
    fn must_go_on(&self) -> bool {
        let Some(traits) = self.traits else { return false };
        let is_uncommitted = self.state.prefill == LegState::Over && !self.committed;
        if self.consumed || self.state.prefill == LegState::Routed || is_uncommitted {
            // Nothing was sent, or nothing is left to consume.
            return false;
        }
        match traits.handoff {
            HandoffKind::Completed | HandoffKind::Addressed => {
                // The decode leg that is being routed or was sent consumes the handoff.
                self.state.prefill != LegState::InFlight || !traits.cancellable
            }
            HandoffKind::Bootstrap => !traits.abortable,
        }
    }

    /// Returns whether one leg of a pair has ended that was aborted by id, and the other has not: either the
    /// transfer is over, or the other leg waits for a partner that does not come. An engine may also have
    /// lost its abort: SGLang 0.5.23 does, and ignores repetitions, when an abort arrives while it prepares
    /// the prompt (`managers/tokenizer_manager.py`, `abort_sent`). A prompt that is still prepared ends with
    /// its connection.
    pub(super) fn other_leg_is_in_vain(&self) -> bool {
        self.only_consumes()
            && self.handoff_kind() == Some(HandoffKind::Bootstrap)
            && self.traits.is_some_and(|traits| traits.abortable)
    }

    fn abort_both(&mut self) -> Actions {
        let runs = |leg: &Leg| self.state[*leg] == LegState::InFlight;
        [Leg::Prefill, Leg::Decode].into_iter().filter(runs).map(Action::Abort).collect()
    }

    pub(super) fn cancel_all(&mut self) -> Actions {
        let actions = self.stop_all();
        self.finish(actions)
    }

    fn stop_all(&mut self) -> Actions {
        let mut actions = self.stop(Leg::Prefill);
        actions.extend(self.stop(self.answering()));
        actions
    }

    /// Stops a leg in flight: aborts it by id where the engine can, and closes its connection.
    pub(super) fn stop(&mut self, leg: Leg) -> Actions {
        let running = std::mem::replace(&mut self.state[leg], LegState::Over) == LegState::InFlight;
        if !running {
            return Actions::new();
        }
        if self.is_abortable() {
            smallvec![Action::Abort(leg), Action::Cancel(leg)]
        } else {
            smallvec![Action::Cancel(leg)]
        }
    }

    /// Returns whether the prefill answer returns the handoff.
    pub(super) fn is_completed(&self) -> bool {
        self.handoff_kind() == Some(HandoffKind::Completed)
    }

    /// Returns whether the handoff ends with the legs of its pair: when one fails, the other one is ended
    /// (E3). An engine whose prefill has ended, and that cannot abort, keeps it.
    pub(super) fn ends_with_its_pair(&self) -> bool {
        let is_pair = self.handoff_kind() == Some(HandoffKind::Bootstrap);
        is_pair && (self.is_abortable() || self.state.prefill != LegState::Over)
    }

    /// Whether the engines of the legs abort by request id.
    fn is_abortable(&self) -> bool {
        match self.shape {
            Shape::Aggregated => self.aggregated_aborts,
            Shape::Remote => self.traits.is_some_and(|traits| traits.abortable),
        }
    }
}
