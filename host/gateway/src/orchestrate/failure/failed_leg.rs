//! Turns the failure of a leg into an event, after the worker, the request and the client's error got their
//! part.

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use pointsman_orchestration::{Event, Failed};
use pointsman_workers::{Leg, Worker};
use tokio::time::Instant;

use super::worker_outcome::{Blame, limits_client, note_failure, refused_key};
use crate::{
    openai::{
        error::{ApiError, RequestFacts},
        responses::{may_run_on, may_store},
    },
    orchestrate::{Drive, id_of},
    upstream::CallError,
};

impl Drive {
    /// Turns the failure of the leg that answers into an event.
    pub(crate) fn answer_failed(&mut self, error: CallError) -> Event {
        self.leg_failed(self.answering(), error)
    }

    /// Records a failed leg: with its worker, or with the request if that is to blame.
    pub(crate) fn leg_failed(&mut self, leg: Leg, error: CallError) -> Event {
        let began = error.began();
        self.note_failed_leg(leg, error, began)
    }

    /// Records a failed leg. `began`: whether its engine may have begun to work on the request.
    pub(crate) fn note_failed_leg(&mut self, leg: Leg, error: CallError, began: bool) -> Event {
        let candidate = self.runs[leg].candidate.clone();
        let source = self.source_of_broken(leg, &error);
        let blame = self.blame(leg, source.as_ref(), &error);
        let is_poison = blame == Blame::Request;
        // The worker may not have read the request, which is sent again over a new connection.
        let is_unread = matches!(error, CallError::Closed(_)) && !may_store(&self.request);
        if is_unread {
            self.upstream.use_new_connections();
        }
        // No other worker may take a pinned leg. A handoff that was not read goes to the same one again.
        let (pin, lacks_session) = (self.request.hints.pinned(leg), self.lacks_session(leg, &error));
        let is_of_worker = error.is_of_worker() || self.lacks_model(&error) || lacks_session;
        let was_read = began || is_of_worker || !self.awaits_token;
        let is_pinned = pin.is_some() && !is_unread && (leg != Leg::Decode || was_read);
        let (asks, asks_pair) = match self.note_lost_rank(leg, &error) {
            true => (true, false),
            false if lacks_session => (false, false),
            false => self.second_try(leg, candidate.as_ref(), &error),
        };
        // What a proxy sends is not sent again.
        let failed = Failed {
            retryable: (error.retryable() || asks || is_of_worker)
                && !self.executor.is_proxy()
                && !is_poison
                && !is_pinned
                && !may_run_on(&self.request, &error),
            refused: error.is_refusal() && error.refusal().is_none(),
            began,
            broke: error.may_break_engine(),
            continuable: false,
        };
        self.count_failure(leg, &error, blame);
        self.missing_at = self.lacks_model(&error).then_some(leg);
        match &candidate {
            _ if asks_pair => {}
            Some(unread) if is_unread => self.attempts.note_unread((leg, unread.worker_id())),
            failed => self.attempts.note_failure(failed.as_ref().map(id_of)),
        }
        self.note_failed_plan(leg, asks_pair, failed.retryable);
        self.note_declined(leg, &error);
        self.suspect_pair(source.as_ref(), is_unread);
        self.failed_span = self.runs[leg].span;
        if leg == Leg::Prefill && error.is_fault() {
            self.failed_prefill = candidate.as_ref().map(|prefill| (prefill.worker.id(), error.kind()));
        }
        self.look_for_new_workers(leg, &error);
        let suspects_decode = self.note_time_limit(leg, &error);
        let runs_on = error.leaves_engine_at_work() || self.others_run_on(&error);
        self.keep_cause(leg, error, is_poison, suspects_decode);
        if asks_pair {
            // The pair's answer counts.
            self.runs[leg].failure = None;
        }
        self.runs[leg].record = None;
        self.free(leg);
        if runs_on {
            self.abort(leg);
        }
        Event::Failed(leg, failed)
    }

    /// Returns whether an error ends one item of a stream, so that its engine may work on the others.
    fn others_run_on(&self, error: &CallError) -> bool {
        let is_within = matches!(error, CallError::GaveUp(_) | CallError::Status { in_body: true, .. });
        is_within && self.request.stream && self.request.items() > 1
    }

    /// Keeps why a leg failed, for the client.
    fn keep_cause(&mut self, leg: Leg, error: CallError, is_poison: bool, suspects_decode: bool) {
        let has_answered = is_poison || error.has_answered();
        let refusal = error.refusal();
        let cause = self.client_cause(leg, error, is_poison);
        if suspects_decode {
            // What failed is the prefill, also when no other decode worker is left.
            self.runs.answering.fails(cause.clone(), has_answered);
        }
        let run = &mut self.runs[leg];
        if let Some(candidate) = &run.candidate {
            let after = run.refusals.note(refusal, &cause, &candidate.worker);
            after.filter(|_| leg == Leg::Decode).inspect(|after| self.attempts.note_refused_handoff(*after));
        }
        run.fails(cause, has_answered);
    }

    /// The error for the client of a leg that failed.
    fn client_cause(&self, leg: Leg, error: CallError, is_poison: bool) -> ApiError {
        let mut cause = self.client_error(leg, error);
        if is_poison {
            cause = ApiError::Poison { cause: cause.to_string(), left: self.state.settings.quarantine };
        }
        cause.of_pinned(&self.request.hints, leg)
    }

    /// Counts a failed leg, and tells its worker. A leg that the gateway aborted has not failed, however its
    /// engine ends it.
    fn count_failure(&mut self, leg: Leg, error: &CallError, blame: Blame) {
        if self.runs[leg].aborted && matches!(error, CallError::GaveUp(_) | CallError::Status { .. }) {
            self.account.leg_cancelled(leg);
            return;
        }
        if let Some(candidate) = &self.runs[leg].candidate {
            let sent = self.runs[leg].sent.unwrap_or_else(Instant::now);
            if matches!(error, CallError::Broken(_)) {
                self.broke.push((candidate.worker.clone(), Instant::now()));
            }
            if !limits_client(&self.request, &candidate.worker, error) {
                note_failure(leg, (candidate, sent), error, blame);
            }
            if self.lacks_model(error) {
                candidate.worker.note_restart();
            }
        }
        self.account.leg_failed(leg, error);
    }

    /// Logs, once, that the remote prefill of the request failed for good. `local`: a local one follows.
    pub(crate) fn log_failed_prefill(&mut self, local: bool) {
        let Some((worker, kind)) = self.failed_prefill.take() else { return };
        let (request, tried) = (&self.account.request_id, self.attempts.tried().len());
        tracing::error!(request, %worker, kind, tried, local, "remote prefill failed");
    }

    /// Turns a failed call into the client's error. What names workers is removed from the engine's text
    /// (A5).
    fn client_error(&self, leg: Leg, error: CallError) -> ApiError {
        let candidate = self.runs[leg].candidate.as_ref().filter(|_| self.executor.calls());
        if let Some(refused) = candidate.and_then(|to| refused_key(&self.state, &to.worker, &error)) {
            return refused;
        }
        let error = match error {
            CallError::Status { status, content_type, mut retry, body, in_body } => {
                let is_too_many = status == StatusCode::TOO_MANY_REQUESTS && retry.should != Some(false);
                let paused = || candidate.filter(|_| is_too_many).map(|to| end_of_pause(&to.worker));
                retry.after = retry.after.or_else(paused);
                let body = self.hide_ids(&body).map_or(body, Bytes::from);
                CallError::Status { status, content_type, retry, body, in_body }
            }
            other => other,
        };
        let is_cancelled = self.runs[leg].aborted || self.gone.is_cancelled();
        ApiError::of_call(error, &RequestFacts { is_cancelled, ..self.facts() })
    }

    /// Facts by which an engine's text for the client is read.
    pub(super) fn facts(&self) -> RequestFacts<'_> {
        let legs = [self.candidate(Leg::Prefill), self.candidate(self.answering())];
        let hosts = legs.into_iter().flatten().map(|leg| leg.worker.spec().host()).collect();
        let (id, body) = (&self.account.request_id, self.request.bytes());
        RequestFacts { id, body, rooms: &self.rooms, hosts, is_cancelled: false }
    }
}

/// Returns the `Retry-After` of an engine that has too much to do and did not send one: the end of the pause
/// that it gets.
fn end_of_pause(worker: &Worker) -> HeaderValue {
    let left = worker.pause().map(|pause| pause.left).unwrap_or_default();
    HeaderValue::from((left.as_secs() + u64::from(left.subsec_nanos() > 0)).max(1))
}
