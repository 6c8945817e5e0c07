//! Requests that their worker refuses and another one may take (I17): that worker refuses everything, lacks
//! the endpoint, or its context is too short.

use http::StatusCode;
use pointsman_workers::{Candidate, Doubt, Leg, WorkerId};

use super::{failure_text::one_line, worker_outcome::lacks_model};
use crate::{
    openai::error::ApiError,
    orchestrate::Drive,
    upstream::{CallError, text},
};

/// The question of whether another worker takes a request that one refused.
#[derive(Default)]
pub(crate) struct SecondOpinion {
    /// Whether another worker was asked: it is, once for each request.
    is_asked: bool,
    /// The worker that refused, while the answer is open.
    doubt: Option<Box<Doubted>>,
    /// The workers that answered as if they lacked the endpoint, while no other one took the request.
    without_endpoint: Vec<(Leg, Candidate)>,
    /// Workers that lack the endpoint, as far as was known when a leg was routed.
    lacking: Vec<WorkerId>,
}

/// A worker that may be to blame for its refusal.
struct Doubted {
    leg: Leg,
    candidate: Candidate,
    doubt: Doubt,
    /// What its engine answered.
    refusal: String,
}

impl SecondOpinion {
    /// Returns the workers that lack the request's endpoint, as far as is known.
    pub(crate) fn lacking(&self) -> &[WorkerId] {
        &self.lacking
    }
}

impl Drive {
    /// Looks which workers of a leg lack the request's endpoint.
    pub(crate) fn look_for_missing_endpoints(&mut self, leg: Leg) {
        let path = self.request.endpoint.path();
        self.second_opinion.lacking = self.state.missing_endpoints.workers(leg, path, &self.snapshot);
    }

    /// Notes that the worker of a leg refused the request as the client's error. Returns whether another
    /// worker is asked.
    pub(crate) fn asks_another(&mut self, leg: Leg, candidate: &Candidate, error: &CallError) -> bool {
        if !error.is_refusal() || error.refusal().is_some() || self.runs[leg].aborted {
            return false;
        }
        // What only consumes a handoff is not the client's request.
        if self.legs.only_consumes() {
            return false;
        }
        // An engine that lacks the endpoint may serve the others, and a gateway that got the request before.
        let lacks_endpoint = matches!(
            error,
            CallError::Status {
                status: StatusCode::NOT_FOUND
                    | StatusCode::METHOD_NOT_ALLOWED
                    | StatusCode::NOT_IMPLEMENTED
                    | StatusCode::LOOP_DETECTED,
                ..
            }
        );
        if lacks_endpoint && !lacks_model(error) {
            // A response that another engine has is not found either.
            let continues = self.request.body.get("previous_response_id").is_some();
            if matches!(error, CallError::Status { status: StatusCode::NOT_FOUND, .. }) && !continues {
                self.second_opinion.without_endpoint.push((leg, candidate.clone()));
            }
            return false;
        }
        let is_too_long = names_context(error);
        let lacks_media = self.may_lack_media(error);
        let says_nothing = is_too_long || lacks_media;
        let is_suspect = !says_nothing && candidate.worker.note_refused_request();
        if let Some(doubted) = self.second_opinion.doubt.take() {
            doubted.doubt.refute();
            return false;
        }
        let is_free = self.executor.calls() && self.request.hints.pinned(leg).is_none();
        if self.second_opinion.is_asked || !is_free || self.account.tokens() > 0 {
            return false;
        }
        let asks = if is_too_long {
            self.needs_more_context_than(leg, candidate)
        } else if lacks_media {
            self.has_another(leg, candidate, |_| true)
        } else {
            is_suspect && self.has_another(leg, candidate, |other| !other.worker.refuses_requests())
        };
        self.second_opinion.is_asked = asks;
        if asks && is_suspect {
            let (candidate, doubt) = (candidate.clone(), candidate.worker.doubt());
            let refusal = one_line(&ApiError::from(error.clone()).message());
            self.second_opinion.doubt = Some(Box::new(Doubted { leg, candidate, doubt, refusal }));
        }
        asks
    }

    /// Notes that the engine of a leg took the request: a worker that refused it before is to blame.
    pub(crate) fn took_request(&mut self, leg: Leg) {
        // An answer of decode shows that the prefill before it was taken, too, but not the other way round. A
        // worker that does both is another kind of worker.
        let shows = |refused: Leg| leg == refused || (leg, refused) == (Leg::Decode, Leg::Prefill);
        let path = self.request.endpoint.path();
        self.candidate(leg).inspect(|took| took.worker.note_answered_path(path));
        let took = self.candidate(leg).map(Candidate::worker_id);
        let lack = self.second_opinion.without_endpoint.extract_if(.., |(refused, _)| shows(*refused));
        for (refused, lacks) in lack.filter(|(_, lacks)| Some(lacks.worker_id()) != took) {
            let worker = lacks.worker_id();
            if self.state.missing_endpoints.note(&lacks.worker, refused, path) {
                tracing::info!(%worker, path, "engine does not have an endpoint: others are asked first");
            }
        }
        let doubt = self.second_opinion.doubt.take_if(|doubted| shows(doubted.leg));
        let Some(doubted) = doubt else { return };
        let Doubted { candidate, doubt, refusal, .. } = *doubted;
        if self.candidate(leg).is_some_and(|took| took.worker_id() == candidate.worker_id()) {
            doubt.refute();
            return;
        }
        candidate.load().observe_outcome(false);
        let (request, worker) = (&self.account.request_id, candidate.worker_id());
        if doubt.confirm(format!("it refuses requests that another worker takes: {refusal}")) {
            tracing::warn!(request, %worker, refusal, "worker failing: another one takes what it refuses");
        }
    }

    /// Asks for a worker with more context than the one that refused the request. Returns whether there is
    /// one.
    fn needs_more_context_than(&mut self, leg: Leg, candidate: &Candidate) -> bool {
        let length = |candidate: &Candidate| candidate.worker.context_length(&self.request.model);
        let Some(limit) = length(candidate) else { return false };
        let is_found = self.has_another(leg, candidate, |other| length(other) > Some(limit));
        if is_found {
            self.routing_request.context_tokens = Some(limit.saturating_add(1));
        }
        is_found
    }

    /// Returns whether a leg has another worker that can be chosen now and of which this holds. A handoff
    /// that is in hand goes to one that can take it.
    fn has_another(&self, leg: Leg, candidate: &Candidate, holds: impl Fn(&Candidate) -> bool) -> bool {
        let has_handoff = leg == Leg::Decode && self.attempts.committed(false).is_some();
        let prefill = self.candidate(Leg::Prefill).filter(|_| has_handoff).map(|from| from.worker.spec());
        let is_other = |other: &&Candidate| {
            other.worker_id() != candidate.worker_id()
                && other.ineligible().is_none()
                && prefill.is_none_or(|prefill| prefill.pairs_with(other.worker.spec()))
        };
        self.snapshot.pool(&self.request.model, leg).iter().filter(is_other).any(holds)
    }
}

/// Returns whether an engine says that a request is longer than its context, as vLLM and SGLang do.
pub(crate) fn names_context(error: &CallError) -> bool {
    const WORDS: [&str; 5] = [
        "context length",
        "context_length",
        "max_model_len",
        "maximum model length",
        "maximum allowed length",
    ];
    let CallError::Status { body, .. } = error else { return false };
    let text = text(body).to_ascii_lowercase();
    WORDS.iter().any(|words| text.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::RetryAdvice;

    #[test]
    fn i17_a_refusal_that_names_the_context_is_about_the_length() {
        let names = |body: &'static str| {
            let (status, content_type, retry) = (StatusCode::BAD_REQUEST, None, RetryAdvice::default());
            let body = body.into();
            names_context(&CallError::Status { status, content_type, retry, body, in_body: false })
        };
        // I17.6: vLLM and SGLang
        for text in [
            "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049",
            "max_tokens=400000 cannot be greater than max_model_len=2048.",
            "The decoder prompt (length 9) is longer than the maximum model length of 8.",
            "The input (9 tokens) is longer than the model's context length (8 tokens).",
            "Input length (9 tokens) exceeds the maximum allowed length (8 tokens). Use a shorter input or enable",
            r#"{"error":{"code":"context_length_exceeded"}}"#,
        ] {
            assert!(names(text), "{text}");
        }
        assert!(!names("As of transformers v4.44, default chat template is no longer allowed"));
    }
}
