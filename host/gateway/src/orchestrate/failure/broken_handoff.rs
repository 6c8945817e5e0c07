//! Decode legs that break on a handoff before their first token. Which worker of the pair is to blame does
//! not show at once, so a retry avoids both.

use std::sync::Arc;

use pointsman_orchestration::HandoffKind;
use pointsman_routing::CandidateId;
use pointsman_workers::{Candidate, Leg, PerLeg, Worker};

use super::{quarantine::way_of, worker_outcome::Blame};
use crate::{
    connectors::connector_for,
    orchestrate::{Drive, id_of},
    upstream::CallError,
};

/// The last handoff of a request that broke.
pub(crate) struct BrokenHandoff {
    prefill: Arc<Worker>,
    decode: Arc<Worker>,
    /// How the decode worker broke.
    way: &'static str,
}

impl Drive {
    /// Returns the prefill worker whose handoff the decode leg got; `None` if decode computes the prompt.
    fn source(&self) -> Option<&Candidate> {
        let prefill = self.candidate(Leg::Prefill).filter(|_| self.answering() == Leg::Decode)?;
        // The decode engine may have given up a prefill that is only slow.
        let limit = self.state.settings.leg_timeouts.prefill_head;
        if self.prefill_runs() && self.runs.prefill.sent.is_some_and(|sent| sent.elapsed() > limit) {
            return None;
        }
        let is_completed = connector_for(prefill.worker.spec()).handoff() == Some(HandoffKind::Completed);
        (!is_completed || self.handoff.is_some()).then_some(prefill)
    }

    /// The decode leg made its first token: tells both workers that the handoff was taken.
    pub(super) fn handoff_taken(&self) {
        let pair = self.source().zip(self.candidate(Leg::Decode));
        let both = pair.into_iter().flat_map(|(prefill, decode)| [prefill, decode]);
        both.for_each(|candidate| candidate.worker.note_handoff_taken());
    }

    /// Returns the prefill worker of a handoff on which the decode worker broke before its first token. One
    /// that health checks found dead broke on nothing.
    pub(super) fn source_of_broken(&self, leg: Leg, error: &CallError) -> Option<Candidate> {
        let broke =
            error.may_break_engine() && !error.is_of_slow_worker() && !matches!(error, CallError::Down);
        let is_own = self.executor.calls() && !self.runs[leg].aborted;
        self.source().filter(|_| leg == Leg::Decode && self.awaits_token && broke && is_own).cloned()
    }

    /// Decides whom a failed leg is charged to. `source`: the prefill worker of the handoff that broke.
    pub(super) fn blame(&mut self, leg: Leg, source: Option<&Candidate>, error: &CallError) -> Blame {
        let Some(candidate) = self.candidate(leg).cloned() else { return Blame::Worker };
        // Handoffs that end in silence count elsewhere (B7.7).
        let source = source.filter(|_| !matches!(error, CallError::Timeout(_)));
        let at_fault = source.filter(|prefill| prefill.worker.note_handoff_broke(&candidate.worker));
        let otherwise = match (source, at_fault) {
            (_, Some(_)) => Blame::PrefillWorker,
            (Some(_), None) => Blame::Handoff,
            (None, None) => Blame::Worker,
        };
        let blames_request = self.blames_request(leg, (&candidate, at_fault), error, otherwise);
        if let Some(prefill) = source {
            let (prefill, decode) = (prefill.worker.clone(), candidate.worker.clone());
            self.broken_handoff = Some(BrokenHandoff { prefill, decode, way: way_of(error) });
        }
        if leg == Leg::Aggregated && self.awaits_token && !candidate.worker.is_failing() {
            self.acquit_handoff(error);
        }
        if blames_request {
            return Blame::Request;
        }
        if let Some(prefill) = at_fault {
            self.charge_prefill(prefill, &candidate, error);
        }
        otherwise
    }

    /// A local prefill broke: the handoff that broke before it in the same way is not the cause.
    fn acquit_handoff(&self, error: &CallError) {
        let is_same = |broken: &&BrokenHandoff| {
            error.breaks_engine() && broken.way == way_of(error) && !broken.prefill.is_failing()
        };
        let broken = self.broken_handoff.as_ref().filter(is_same);
        let both = broken.into_iter().flat_map(|broken| [&broken.prefill, &broken.decode]);
        both.for_each(|worker| worker.note_handoff_taken());
    }

    /// Charges a prefill worker: decode workers break on what it hands over.
    fn charge_prefill(&self, prefill: &Candidate, decode: &Candidate, error: &CallError) {
        let was_failing = prefill.worker.is_failing();
        prefill.worker.charge_as_source();
        prefill.load().observe_outcome(false);
        if !was_failing && prefill.worker.is_failing() {
            self.state.quarantine.acquit_explained(prefill.worker_id());
            let (request, worker) = (&self.account.request_id, prefill.worker_id());
            let (decode, kind) = (decode.worker_id(), error.kind());
            tracing::warn!(request, %worker, %decode, kind, "worker failing: decode workers break on its handoffs");
        }
    }

    /// Avoids both workers of a handoff that broke. `is_unread`: the decode worker may not have read it, and
    /// is only spared. Otherwise what the prefill worker has of the prompt draws no further request, and a
    /// local prefill, where that is allowed, precedes another handoff of the same worker.
    pub(super) fn suspect_pair(&mut self, prefill: Option<&Candidate>, is_unread: bool) {
        let Some(prefill) = prefill else { return };
        let id = prefill.worker_id();
        let decode = self.candidate(Leg::Decode).filter(|_| !is_unread).map(|decode| decode.worker.clone());
        let ranks = ranks_of([Some(&prefill.worker), decode.as_ref()]);
        if is_unread {
            self.attempts.suspect(PerLeg { prefill: Some(id), answering: None }, ranks);
            return;
        }
        self.runs.prefill.withdraw_record();
        self.failed_prefill = Some((id, "broken_handoff"));
        let forgivable = Some(id).filter(|_| !self.legs.may_fall_back());
        let answering = decode.map(|decode| decode.id());
        self.attempts.suspect(PerLeg { prefill: forgivable, answering }, ranks);
    }

    /// Notes a decode worker that refused even one token of a handoff that has to be consumed, or anything.
    pub(super) fn note_declined(&mut self, leg: Leg, error: &CallError) {
        let is_refusal = error.is_refusal() && error.refusal().is_none();
        let takes_nothing = leg == Leg::Decode && error.is_of_worker();
        let declines = takes_nothing || (self.legs.only_consumes() && is_refusal);
        if let Some(decode) = self.candidate(leg).filter(|_| declines).map(|decode| decode.worker.clone()) {
            self.attempts.note_declined_handoff(ranks_of([Some(&decode), None]));
        }
    }

    /// Suspects the decode worker too when the prefill leg of a pair timed out, if the prefill engine waits
    /// for the decode engine: either of them may hang. One that made progress meanwhile does not, nor does
    /// one whose prefill worker `is_slow`. Returns whether it is left out for this request.
    pub(super) fn suspect_decode(&mut self, is_slow: bool) -> bool {
        let run = &self.runs.answering;
        let Some(candidate) = run.candidate.as_ref().filter(|_| run.call.is_some()) else { return false };
        if !self.prefill_waits_for_decode() {
            return false;
        }
        let worker = candidate.worker.clone();
        if !is_slow && worker.alive_at().elapsed() >= self.state.settings.leg_timeouts.prefill_head {
            worker.note_timeout();
            worker
                .explain_failure(|| "the last prefill for it timed out, and waits for its engine".to_owned());
        }
        let prefill = self.candidate(Leg::Prefill).map(|prefill| prefill.worker.clone());
        let pair =
            PerLeg { prefill: prefill.as_ref().map(|prefill| prefill.id()), answering: Some(worker.id()) };
        self.attempts.suspect(pair, ranks_of([prefill.as_ref(), Some(&worker)]));
        true
    }
}

/// Returns all ranks of these workers.
pub(crate) fn ranks_of(workers: [Option<&Arc<Worker>>; 2]) -> Vec<CandidateId> {
    workers.into_iter().flatten().flat_map(|worker| worker.candidates()).map(|rank| id_of(&rank)).collect()
}
