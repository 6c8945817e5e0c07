//! Tells workers of answers and handoffs that did not come in time, and of handoffs that finished.

use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};

use pointsman_workers::Leg;
use tokio::time::Instant;

use super::Drive;

impl Drive {
    /// The request's own deadline passed: counts it with the worker that had time to answer and did not.
    /// `silent_from`: when the leg that answers was sent, or last sent an event; `None` before that.
    pub(super) fn note_deadline(&self, silent_from: Option<Instant>) {
        let settings = &self.state.settings;
        let least = settings.leg_timeouts.head.min(settings.request_timeout / 2);
        let late = |from: Option<Instant>| from.is_some_and(|from| from.elapsed() >= least);
        if late(self.prefill.sent.filter(|_| self.prefill.call.is_some())) {
            self.note_late(Leg::Prefill);
        } else if late(silent_from) {
            self.note_late(self.legs.answering());
        }
    }

    /// A leg did not answer in time. The engines of a pair wait for each other: without a token, the handoff
    /// is late, too.
    pub(super) fn note_late(&self, leg: Leg) {
        let request = BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.account.request_id);
        let (prefill, decode) = (self.prefill.candidate.as_ref(), self.decode.candidate.as_ref());
        let late = if leg == Leg::Prefill { prefill } else { decode };
        late.inspect(|candidate| candidate.worker.note_deadline(request));
        let both_sent = self.decode.sent.is_some() && self.decode.sent >= self.prefill.sent;
        if both_sent && self.legs.answering() == Leg::Decode && self.account.tokens() == 0 {
            for (one, other) in prefill.zip(decode).into_iter().flat_map(|(a, b)| [(a, b), (b, a)]) {
                one.worker.note_handoff_late(request, other.worker_id());
            }
        }
    }

    /// The decode leg made its first token: the handoff finished.
    pub(super) fn handoff_done(&self) {
        if self.legs.answering() == Leg::Decode {
            let both = self.prefill.candidate.iter().chain(&self.decode.candidate);
            both.for_each(|candidate| candidate.worker.note_handoff_done());
        }
    }
}
