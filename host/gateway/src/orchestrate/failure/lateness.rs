//! Extends deadlines, and tells workers of answers and handoffs that did not come in time, and of handoffs
//! that finished.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

use pointsman_orchestration::Event;
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

use crate::{connectors::connector_for, openai::error::ApiError, orchestrate::Drive, upstream::CallError};

impl Drive {
    /// Gives engines time for what they still need, after the client has its answer: a prefill in flight may
    /// end, and its handoff is consumed.
    pub(crate) fn extend_deadline(&mut self) {
        let limits = &self.state.settings.leg_timeouts;
        let longest = limits.prefill_head.max(limits.event_idle_max);
        let prefill = if self.prefill_runs() { longest } else { Duration::ZERO };
        let candidate = self.runs.prefill.candidate.as_ref();
        let lease = candidate.map(|candidate| candidate.worker.spec().handoff_lease());
        self.deadline = Instant::now() + prefill + lease.unwrap_or_default();
        self.release_place();
    }

    /// Returns whether the request has to end because the drain ends, and was not told yet.
    pub(crate) fn drain_ends(&self) -> bool {
        !self.reported.drain_end && self.state.drain_end.has_passed()
    }

    /// Ends the request because the drain ends. No worker is late.
    pub(crate) fn drain_ended(&mut self) -> Event {
        self.reported.drain_end = true;
        Event::Deadline
    }

    /// Returns the error of a request that had to end: at its deadline, or with the drain.
    pub(crate) fn out_of_time(&self) -> ApiError {
        if self.reported.drain_end { ApiError::Draining } else { ApiError::Deadline }
    }

    /// The request's own deadline passed: counts it with the worker that had time to answer and did not.
    /// `silent_from`: when the leg that answers was sent, or last sent an event; `None` before that.
    pub(crate) fn note_deadline(&self, silent_from: Option<Instant>) {
        if self.is_late(self.runs.prefill.sent.filter(|_| self.prefill_runs())) {
            self.note_late(Leg::Prefill);
        } else if self.is_late(silent_from) {
            self.note_late(self.legs.answering());
        }
    }

    /// Logs that the answer of a request that is not streamed is given up at the limit `timeouts.{key}`.
    pub(crate) fn warn_of_whole(&self, key: &'static str) {
        let candidate = self.candidate(self.answering()).filter(|_| !self.request.stream);
        let Some(worker) = candidate.map(|candidate| candidate.worker.id()) else { return };
        let (request, limit) = (&self.account.request_id, format_args!("timeouts.{key}"));
        tracing::warn!(request, %worker, %limit, "answer that is not streamed was not complete in time");
    }

    /// Returns whether a worker that has been silent since `silent_from` had enough time to answer. Without
    /// `silent_from` it was not yet its turn.
    pub(crate) fn is_late(&self, silent_from: Option<Instant>) -> bool {
        let settings = &self.state.settings;
        let least = settings.leg_timeouts.head.min(settings.request_timeout / 2);
        silent_from.is_some_and(|from| from.elapsed() >= least)
    }

    /// Notes that a leg failed at its limit. Returns whether the decode worker of its pair is suspected, too.
    pub(super) fn note_time_limit(&mut self, leg: Leg, error: &CallError) -> bool {
        let CallError::Timeout(silence) = error else { return false };
        self.note_late(leg);
        match leg {
            Leg::Prefill => return self.suspect_decode(error.is_of_slow_worker()),
            Leg::Decode | Leg::Aggregated => self.warn_of_whole(silence.key),
        }
        false
    }

    /// A leg did not answer in time. Engines of a pair may wait for each other: without a token, the handoff
    /// is late, too.
    fn note_late(&self, leg: Leg) {
        self.candidate(leg).inspect(|candidate| candidate.worker.note_deadline(self.request_hash()));
        let [prefill, decode] = [&self.runs.prefill, &self.runs.answering].map(|run| run.sent);
        let waits = leg != Leg::Prefill || self.prefill_waits_for_decode();
        if waits && decode.is_some() && decode >= prefill {
            self.note_handoff_late();
        }
    }

    /// Returns whether the prefill engine answers only when the decode engine has the blocks.
    pub(super) fn prefill_waits_for_decode(&self) -> bool {
        let prefill = self.candidate(Leg::Prefill);
        prefill.is_some_and(|prefill| !connector_for(prefill.worker.spec()).keeps_blocks())
    }

    /// The first event of a stream is late. The worker may work on it.
    pub(crate) fn note_late_event(&self) {
        let candidate = self.candidate(self.answering());
        candidate.inspect(|candidate| candidate.worker.note_deadline(self.request_hash()));
    }

    /// The legs of a pair have not made a token in time.
    pub(crate) fn note_handoff_late(&self) {
        if self.answering() != Leg::Decode || self.account.tokens() > 0 {
            return;
        }
        let pair = self.candidate(Leg::Prefill).zip(self.candidate(Leg::Decode));
        for (one, other) in pair.into_iter().flat_map(|(a, b)| [(a, b), (b, a)]) {
            one.worker.note_handoff_late(self.request_hash(), other.worker_id());
        }
    }

    /// The decode leg made its first token: the handoff finished.
    pub(crate) fn handoff_done(&self) {
        if self.answering() == Leg::Decode {
            let both = [Leg::Prefill, Leg::Decode].into_iter().filter_map(|leg| self.candidate(leg));
            both.for_each(|candidate| candidate.worker.note_handoff_done());
        }
        self.handoff_taken();
    }

    /// Returns a hash of the request's id.
    pub(crate) fn request_hash(&self) -> u64 {
        BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.account.request_id)
    }
}
