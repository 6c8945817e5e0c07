//! A stream that is paused for requests of a higher priority: its rest waits in the queue and books nothing,
//! until its turn has come and both legs have a worker (L5).

use pointsman_orchestration::Queued;
use pointsman_workers::Leg;
use tokio::time::Duration;

use crate::{
    openai::error::ApiError,
    orchestrate::{Drive, route::parking},
};

/// The place in the queue ends this long after the deadline, which ends the request.
const BEHIND_DEADLINE: Duration = Duration::from_secs(1);

impl Drive {
    /// Lets the stream be asked to pause from now on.
    pub(crate) fn offer_to_pause(&mut self) {
        let leg = self.answering();
        let may_pause = self.request.hints.pinned(leg).is_none() && !self.legs.has_paused_enough();
        if self.pausing.is_none() && may_pause {
            let (state, request) = (&self.state, &self.routing_request);
            let parking = parking(state, &self.request, request, &self.account, leg);
            // A local prompt runs on a decode worker: its place is one for decode.
            let makes_room = if self.legs.follows_plan() { Leg::Decode } else { leg };
            self.pausing = state.queue.may_pause(&parking.admission_request, makes_room);
        }
    }

    /// Gives the request's admission back: its rest asks for another one.
    pub(crate) fn begin_pause(&mut self) {
        let leg = self.answering();
        self.account.pauses(leg);
        let why = "it made room for a request of a higher priority";
        self.runs.answering.failure = Some(ApiError::BadUpstream(why.to_owned()));
        self.attempts.begin_pause();
        if self.legs.follows_plan() {
            self.legs.note_pair(self.pair_takes_over(self.attempts.tried()));
        }
    }

    /// Has the rest of a stream that paused wait in the queue for the leg that answers. `place`: the place
    /// that it has.
    pub(crate) fn rest_waits(&mut self, place: Option<Queued>) {
        let leg = self.answering();
        let (state, request) = (&self.state, &self.routing_request);
        let parking = parking(state, &self.request, request, &self.account, leg);
        self.attempts.wait_as_rest(leg, place, &parking, self.deadline + BEHIND_DEADLINE);
        self.account.waits("queue", leg);
    }

    /// Ends the pause once both legs of the rest have a worker, or none can ever have one.
    pub(crate) fn try_to_end_pause(&mut self, leg: Leg, place: Option<Queued>) {
        let Some(place) = self.enter(leg, place) else { return };
        if self.rest_has_to_wait() {
            self.rest_waits(place);
            return;
        }
        let admission = self.attempts.found(place.as_ref());
        admission.into_iter().for_each(|admission| self.account.admitted(admission));
        drop(place);
        if let Some(pausing) = &mut self.pausing {
            self.account.paused(pausing.end());
        }
        self.route(self.legs.first_leg(), None);
    }
}
