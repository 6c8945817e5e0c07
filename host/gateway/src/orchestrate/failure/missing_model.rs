//! A leg whose engine lacks the model that it listed: it unloaded an adapter, or restarted without it.

use pointsman_orchestration::{Event, is_up};
use pointsman_workers::{Candidate, Leg, Snapshot};

use super::worker_outcome::{lacks_adapter, lacks_model};
use crate::{
    orchestrate::{Drive, id_of},
    upstream::CallError,
};

impl Drive {
    /// Returns whether an engine says that it does not have the request's model.
    pub(crate) fn lacks_model(&self, error: &CallError) -> bool {
        // Clients can name any adapter of a model that is served: the answer to that is the client's.
        let model = &self.request.model;
        lacks_model(error) || (self.snapshot.is_adapter(model) && lacks_adapter(error, model.as_str()))
    }

    /// Reports an event. Before a leg is tried again whose engine lacks the model, other engines that have it
    /// are looked for: then the next step reports the event.
    pub(crate) fn report_or_hold(&mut self, event: Event) {
        match event {
            Event::Failed(leg, failed) if failed.retryable && self.missing_at.take() == Some(leg) => {
                self.held_event = Some((leg, event));
            }
            _ => self.report(event),
        }
    }

    /// Has the engines' models read again, if no other worker of the leg is known. Uses the workers that are
    /// found, unless the other leg's worker left meanwhile.
    pub(crate) async fn look_for_model(&mut self, leg: Leg) {
        let (model, tried) = (self.request.model.clone(), self.attempts.tried().to_vec());
        let is_untried = |candidate: &Candidate| is_up(candidate) && !tried.contains(&id_of(candidate));
        let has_other = |snapshot: &Snapshot| snapshot.pool(&model, leg).iter().any(is_untried);
        if has_other(&self.snapshot) {
            return;
        }
        tokio::select! {
            () = self.state.registry.reread_models(&model, has_other) => {}
            () = self.gone.cancelled() => return,
            () = tokio::time::sleep_until(self.deadline) => return,
        }
        let now = self.state.registry.snapshot();
        let partner = leg.partner().and_then(|partner| self.candidate(partner));
        if has_other(&now) && partner.is_none_or(|partner| now.get(partner.worker_id()).is_some()) {
            self.snapshot = now;
        }
    }
}
