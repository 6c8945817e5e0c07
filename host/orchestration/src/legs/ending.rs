//! The end of an answer, which waits for the prefill leg of its pair [C11].

use smallvec::smallvec;

use super::{Action, Actions, Client, LegState, Legs};

impl Legs {
    pub(super) fn finish_seen(&mut self) -> Actions {
        self.resumes &= self.state.answering != LegState::InFlight;
        let waits = self.state.answering == LegState::InFlight
            && self.state.prefill == LegState::InFlight
            && !self.held;
        if !waits || self.only_consumes() {
            return Actions::new();
        }
        self.held = true;
        if self.client == Client::Reading { smallvec![Action::Hold] } else { Actions::new() }
    }

    pub(super) fn ended(&mut self) -> Actions {
        if self.state.answering != LegState::InFlight {
            return Actions::new();
        }
        self.state.answering = LegState::Over;
        self.consumed = true;
        if self.other_leg_is_in_vain() {
            return self.cancel_all();
        }
        let mut actions = Actions::new();
        if self.state.prefill == LegState::InFlight {
            // A successful end waits for prefill [C11]. Without a client there is no answer to hold, but the
            // prefill leg still runs to its end.
            if self.client == Client::Reading && !self.held {
                self.held = true;
                actions.push(Action::Hold);
            }
            return actions;
        }
        self.complete(&mut actions);
        actions
    }

    /// Ends a request whose legs have all succeeded.
    pub(super) fn complete(&mut self, actions: &mut Actions) {
        if self.client == Client::Waiting {
            actions.push(Action::Relay);
        }
        if self.client != Client::Gone {
            self.client = Client::Served;
        }
        self.finished = true;
        actions.push(Action::Finish);
    }

    pub(super) fn finish(&mut self, mut actions: Actions) -> Actions {
        self.finished = true;
        actions.push(Action::Finish);
        actions
    }
}
