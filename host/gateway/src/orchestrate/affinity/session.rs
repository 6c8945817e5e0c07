//! Binds the legs of a request's session to their workers [F8], and ends the session.

use pointsman_workers::Leg;
use tokio::time::Instant;

use crate::orchestrate::{Drive, id_of};

impl Drive {
    /// Notes that a worker accepted a leg: it has the prompt (F5), and the session is bound to it (F8).
    pub(crate) fn accepted(&mut self, leg: Leg) {
        self.account.answer_began();
        self.runs[leg].keep_record();
        let bound = self.bound_leg(leg);
        self.note_media(bound);
        let Some((session, end)) = self.bindable_session() else { return };
        if let Some(candidate) = self.candidate(bound).map(id_of) {
            self.state.sessions.bind(session, bound, &mut self.session_holds, candidate, end);
        }
    }

    /// Keeps the leg of the session bound while the request runs, and notes to which worker it is now.
    pub(crate) fn hold_session(&mut self, leg: Leg) {
        let bound = self.bound_leg(leg);
        if let Some((session, end)) = self.bindable_session() {
            self.session_holds.owner = self.routing_request.tenant_hash.unwrap_or(0);
            self.state.sessions.hold(session, bound, &mut self.session_holds, end);
        }
    }

    /// Ends the session whose last request this was (A2.4, F11.6). Otherwise its idle time begins.
    pub(crate) fn leave_session(&mut self) {
        let (hints, state) = (&self.request.hints, &self.state);
        if let Some(session) = self.routing_request.session_hash {
            if hints.session_control.is_some_and(|control| control.close) {
                state.sessions.close(session);
            }
            let ttl = state.settings.affinity(hints).unwrap_or_default();
            state.sessions.release(session, &mut self.session_holds, ttl);
        }
        if hints.lineage.as_ref().is_some_and(|lineage| lineage.ends) {
            state.programs.ended(&self.routing_request);
        }
    }

    /// A planned worker is one of the decode leg.
    fn bound_leg(&self, leg: Leg) -> Leg {
        self.planned_for(leg).map_or(leg, |_| Leg::Decode)
    }

    /// Returns the session of the request, if it may be bound, and until when it is while the request runs.
    fn bindable_session(&self) -> Option<(u64, Instant)> {
        let ttl = self.state.settings.affinity(&self.request.hints)?;
        Some((self.routing_request.session_hash?, self.deadline.max(Instant::now() + ttl)))
    }
}
