//! Failures of a leg, the deadline, and a client that leaves [E]: what is retried and what still has to run.

use pointsman_workers::Leg;
use smallvec::smallvec;

use super::{Action, Actions, Client, Failed, HandoffKind, LegState, Legs, MAX_BROKEN, Shape};

impl Legs {
    pub(super) fn unroutable(&mut self) -> Actions {
        let leg = if self.prefill == LegState::Routing {
            Leg::Prefill
        } else if self.decode == LegState::Routing {
            self.answering()
        } else {
            return Actions::new();
        };
        self.fail(leg)
    }

    pub(super) fn prefill_failed(&mut self, failed: Failed) -> Actions {
        if self.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.prefill = LegState::Over;
        self.broken += u32::from(failed.broke);
        let mut actions = smallvec![Action::Cancel(Leg::Prefill)];
        if self.decode == LegState::InFlight {
            // The decode leg waits for a prefill that has failed [E3].
            actions.extend(self.stop(Leg::Decode));
        }
        if failed.retryable && self.may_retry() {
            actions.extend(self.retry());
            return actions;
        }
        let allowed = self.policy.local_fallback && (failed.retryable || !failed.refused);
        if allowed && self.client == Client::Waiting && self.broken < MAX_BROKEN {
            self.policy.local_fallback = false;
            self.shape = Shape::Aggregated;
            actions.push(Action::FallBackToLocal);
            actions.extend(self.start());
            return actions;
        }
        actions.extend(self.fail(Leg::Prefill));
        actions
    }

    pub(super) fn decode_failed(&mut self, failed: Failed) -> Actions {
        if self.decode != LegState::InFlight {
            return Actions::new();
        }
        self.decode = LegState::Over;
        self.broken += u32::from(failed.broke);
        self.dispatched &= failed.sent;
        let answering = self.answering();
        let mut actions = smallvec![Action::Cancel(answering)];
        let completed = self.handoff_kind() == Some(HandoffKind::Completed);
        // Nothing of the handoff was sent, so another decode worker may take it [E5]. A client that left
        // makes no difference: the handoff still has to be consumed.
        let undispatched = completed && self.committed && !failed.sent && failed.retryable;
        // It costs no retry, since no engine repeats work. The driver gives up when no decode worker is left.
        if undispatched && matches!(self.client, Client::Waiting | Client::Gone) {
            self.decode = LegState::Routing;
            actions.push(Action::Route(Leg::Decode));
            return actions;
        }
        if self.prefill == LegState::InFlight {
            actions.extend(self.stop(Leg::Prefill));
        }
        if failed.retryable && self.may_retry() {
            actions.extend(self.retry());
            return actions;
        }
        actions.extend(self.fail(answering));
        actions
    }

    pub(super) fn deadline(&mut self) -> Actions {
        let mut actions = self.stop_all();
        if matches!(self.client, Client::Waiting | Client::Reading) {
            self.client = Client::Served;
            actions.push(Action::FailDeadline);
        }
        self.finish(actions)
    }

    /// Whether a retry is allowed: only while the client waits and no byte was sent downstream [invariant 7],
    /// and once after an engine broke.
    fn may_retry(&self) -> bool {
        self.policy.retries > 0 && self.client == Client::Waiting && self.broken < MAX_BROKEN
    }

    fn retry(&mut self) -> Actions {
        self.policy.retries -= 1;
        self.start()
    }

    fn fail(&mut self, leg: Leg) -> Actions {
        let mut actions = Actions::new();
        if matches!(self.client, Client::Waiting | Client::Reading) {
            self.client = Client::Served;
            actions.push(Action::Fail(leg));
        }
        self.finish(actions)
    }

    pub(super) fn client_gone(&mut self) -> Actions {
        if matches!(self.client, Client::Gone | Client::Served) {
            return Actions::new();
        }
        self.client = Client::Gone;
        self.held = false;
        let prefill_runs = self.prefill == LegState::InFlight;
        match self.handoff_kind() {
            // No leg was sent.
            None => self.cancel_all(),
            Some(_) if self.consumed || self.prefill == LegState::Routed => self.cancel_all(),
            Some(HandoffKind::Completed | HandoffKind::Addressed) if prefill_runs => {
                if self.traits.is_some_and(|traits| traits.cancellable) {
                    self.cancel_all()
                } else {
                    Actions::new()
                }
            }
            // The handoff exists: the decode leg that is being routed or was sent consumes it.
            Some(HandoffKind::Completed | HandoffKind::Addressed) => Actions::new(),
            Some(HandoffKind::Bootstrap) => self.abort_both(),
        }
    }

    fn abort_both(&mut self) -> Actions {
        if !self.traits.is_some_and(|traits| traits.abortable) {
            return Actions::new();
        }
        let mut actions = Actions::new();
        if self.prefill == LegState::InFlight {
            actions.push(Action::Abort(Leg::Prefill));
        }
        if self.decode == LegState::InFlight {
            actions.push(Action::Abort(Leg::Decode));
        }
        actions
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
    fn stop(&mut self, leg: Leg) -> Actions {
        let state = if leg == Leg::Prefill { &mut self.prefill } else { &mut self.decode };
        let running = *state == LegState::InFlight;
        *state = LegState::Over;
        if !running {
            return Actions::new();
        }
        let abortable = self.shape == Shape::Remote && self.traits.is_some_and(|traits| traits.abortable);
        if abortable {
            smallvec![Action::Abort(leg), Action::Cancel(leg)]
        } else {
            smallvec![Action::Cancel(leg)]
        }
    }
}
