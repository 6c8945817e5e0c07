//! Local plans: the decode worker that the decode override saw prefills the prompt itself. A plan is for this
//! worker alone: without it, the request runs remotely (D4.9).

use super::{Actions, Failed, LegState, Legs, RetryPolicy, Shape};

impl Legs {
    /// Returns a request that one worker is planned to run alone, and its first actions.
    #[must_use]
    pub fn of_local_plan(policy: RetryPolicy) -> (Self, Actions) {
        let (mut legs, actions) = Self::new(Shape::Aggregated, policy);
        legs.follows_plan = true;
        (legs, actions)
    }

    /// Returns whether the aggregated leg is for the planned worker.
    #[must_use]
    pub fn follows_plan(&self) -> bool {
        self.follows_plan
    }

    /// States whether a pair may take the request over from its planned worker. The driver does so before
    /// each event after which the plan may end.
    pub fn note_pair(&mut self, may_take_over: bool) {
        self.has_pair = may_take_over;
    }

    /// Returns the shape of the rest of a stream that leaves its worker now.
    #[must_use]
    pub fn shape_of_rest(&self) -> Shape {
        if self.follows_plan && self.has_pair { Shape::Remote } else { self.shape }
    }

    /// The planned worker does not take the request. Nothing was sent, so it costs no retry.
    pub(super) fn plan_refused(&mut self) -> Actions {
        if !self.follows_plan || self.state.answering != LegState::Routing {
            return Actions::new();
        }
        // It was sent to no worker, so policies see the first attempt.
        self.attempt -= 1;
        self.start_without_plan()
    }

    /// Returns whether the pair is asked after the planned worker refused the request: a prompt may be too
    /// long for local prefill only.
    pub(super) fn asks_pair(&self, failed: Failed) -> bool {
        let refuses = failed.refused && !failed.retryable;
        self.follows_plan && self.has_pair && refuses && self.nothing_is_sent()
    }

    pub(super) fn start_without_plan(&mut self) -> Actions {
        self.end_plan();
        self.start()
    }

    /// Ends the plan: from now on, the request runs over the pair, or on any worker without one.
    pub(super) fn end_plan(&mut self) {
        self.shape = self.shape_of_rest();
        self.follows_plan = false;
    }
}
