//! Turns the outcome of a leg's call into an event: an answer, the head of a stream, or a failure.

use bytes::Bytes;
use http::{HeaderValue, Response, header};
use pointsman_orchestration::{Event, Failed, HandoffKind, is_up};
use pointsman_workers::{Candidate, Engine, KvTransport, Leg};
use tokio::time::Instant;

use super::{
    Drive,
    answer::whole_answer::is_binary,
    failure::{quarantine::record_served, refusals::Refusals, worker_outcome::note_success},
    id_of,
    leg_run::{LegRun, PrefillDone},
    relay,
};
use crate::{
    budget::Share,
    connectors::{PrefillAnswer, connector_for},
    openai::error::ApiError,
    openai::hide::without_fields,
    openai::{endpoint::Endpoint, seen, sse::Seen},
    telemetry::metrics::seconds,
    upstream::CallError,
};

/// Why a prefill whose answer has no handoff failed.
const NO_PARAMETERS: &str = "the prefill answer has no handoff parameters: check that the prefill engine hands its \
     cache over (vLLM: --kv-transfer-config)";

/// Why the prefill of an engine before vLLM 0.13 is not handed to a later one.
const NO_REQUEST_ID: &str = "the handoff parameters of the prefill answer lack `remote_request_id`, without which a \
     decode worker of vLLM 0.13 or later never answers: run one version on both, or set kv_compatibility of the \
     prefill worker";

impl Drive {
    /// Records that the prefill leg succeeded. Returns the event that follows from its answer.
    pub(super) fn prefilled(&mut self, done: PrefillDone) -> Event {
        let PrefillDone { answer, cached_tokens, held, open_handoff } = done;
        if let Some((_, PrefillAnswer::WasAll)) = &answer
            && self.needs_token_ids()
        {
            return self.leg_failed(Leg::Prefill, CallError::OtherPrompt);
        }
        self.estimate_begins();
        self.runs.prefill.refusals = Refusals::default();
        self.failed_prefill = None;
        self.open_handoff = open_handoff;
        self.accepted(Leg::Prefill);
        self.took_request(Leg::Prefill);
        let Some(candidate) = &self.runs.prefill.candidate else { return Event::PrefillEnded };
        let spec = candidate.worker.spec();
        let connector = connector_for(spec);
        note_success(candidate);
        self.account.leg_ended(Leg::Prefill, Ok(()));
        let lease = spec.handoff_lease();
        if !connector.decode_knows_cached_tokens() {
            self.prefill_reported(cached_tokens);
        }
        let Some((answer, read)) = answer else {
            if connector.handoff() == Some(HandoffKind::Bootstrap) && !connector.abortable() {
                // Only a decode leg frees its blocks now (E6.10).
                self.attempts.commit(lease);
            }
            return Event::PrefillEnded;
        };
        match read {
            PrefillAnswer::Handoff { parameters, .. } if self.would_hang(&parameters) => {
                self.no_handoff("incomplete", NO_REQUEST_ID.to_owned())
            }
            PrefillAnswer::Handoff { parameters, prompt } => {
                self.state.metrics.handoff("complete");
                (self.handoff, self.cached_tokens) = (Some(parameters), prompt.cached_tokens);
                // The prompt of a rest contains what the client got already.
                if self.rest.is_none() {
                    self.created_tokens = prompt.created_tokens;
                }
                self.prompt_computed(prompt);
                self.attempts.commit(lease);
                Event::PrefillHandoff
            }
            PrefillAnswer::Nothing => {
                self.state.metrics.handoff("nothing_to_hand_over");
                Event::PrefillEnded
            }
            // Decode has answered already.
            PrefillAnswer::WasAll if self.whole.is_some() => Event::PrefillEnded,
            PrefillAnswer::WasAll => {
                self.state.metrics.handoff("ended_in_prefill");
                self.whole = Some(relay::prefill_answer(self, answer));
                self.runs.prefill.held = held;
                Event::PrefillWasAll
            }
            // The call's task has turned missing data into a failed call.
            PrefillAnswer::MissingData(_) | PrefillAnswer::MissingParameters => {
                self.no_handoff("missing_parameters", NO_PARAMETERS.to_owned())
            }
            PrefillAnswer::Incomplete(field) => self.no_handoff(
                "incomplete",
                format!("the handoff parameters of the prefill answer lack `{field}`"),
            ),
        }
    }

    /// Whether a decode engine that may get these parameters would never answer. Those of vLLM before 0.13 do
    /// not name the prefill's request, which later decode engines need. The version of the prefill engine may
    /// be unknown.
    fn would_hang(&self, parameters: &str) -> bool {
        let Some(prefill) = self.candidate(Leg::Prefill).map(|candidate| candidate.worker.spec()) else {
            return false;
        };
        let is_nixl = (prefill.engine, prefill.transport) == (Engine::Vllm, KvTransport::Nixl);
        if !is_nixl || parameters.contains("\"remote_request_id\"") {
            return false;
        }
        let needs = |decode: &Candidate| {
            let is_later = decode.worker.engine_version() >= Some((0, 13));
            is_later && is_up(decode) && prefill.pairs_with(decode.worker.spec())
        };
        self.snapshot.pool(&self.request.model, Leg::Decode).iter().any(needs)
    }

    /// Whether the rest of an answer may begin from its token ids only. A prefill engine that ends it does
    /// not say from what it began.
    fn needs_token_ids(&self) -> bool {
        let origin = self.rest.as_ref().and_then(|rest| rest.origin.as_ref().ok());
        origin.is_some_and(|origin| !origin.or_text)
    }

    /// Records a prefill without a usable handoff. Another prefill worker may give one.
    fn no_handoff(&mut self, result: &'static str, problem: String) -> Event {
        self.state.metrics.handoff(result);
        self.failed_span = self.runs.prefill.span;
        let prefill = self.candidate(Leg::Prefill).map(id_of);
        self.failed_prefill = prefill.map(|(worker, _)| (worker, result));
        self.attempts.note_failure(prefill);
        self.runs.prefill.failure = Some(ApiError::BadUpstream(problem));
        self.free(Leg::Prefill);
        let retryable = self.request.hints.pinned(Leg::Prefill).is_none();
        let failed = Failed { retryable, refused: false, began: true, broke: false, continuable: false };
        Event::Failed(Leg::Prefill, failed)
    }

    /// Keeps a whole answer for the client, without the fields that only the gateway may see.
    pub(super) fn answered_whole(&mut self, whole: Response<Bytes>, held: Share) -> Event {
        let seen = match self.judge_whole(&whole) {
            Ok(seen) => seen,
            Err(error) => return self.answer_failed(error),
        };
        if is_binary(&self.request, &whole) {
            return self.answered_binary(whole, &seen, held);
        }
        let (mut head, body) = whole.into_parts();
        self.served_whole(&seen, &body);
        self.accepted(self.answering());
        let format = self.request.endpoint.format();
        let cached = self.shown_cached_tokens();
        let edited = relay::edit(&body, &seen, cached, format).map_or(body, Bytes::from);
        let hidden = self.hide_ids(&edited);
        let edited = hidden.map_or(edited, Bytes::from);
        let private = || self.without_private_fields(self.answering(), &edited);
        let shown = if seen.may_have_private_fields { private() } else { None }.map_or(edited, Bytes::from);
        let json = HeaderValue::from_static("application/json");
        let content_type = head.headers.remove(header::CONTENT_TYPE).unwrap_or(json);
        // Other headers concern only the gateway and the engine.
        head.headers.clear();
        head.headers.insert(header::CONTENT_TYPE, content_type);
        self.whole = Some(Response::from_parts(head, shown));
        self.runs.answering.held = Some(held);
        Event::Ended
    }

    /// Records a whole answer.
    pub(super) fn served_whole(&mut self, seen: &Seen, body: &[u8]) {
        let usage = seen.usage.map(|usage| self.usage(usage));
        self.estimate_ends(usage.and_then(|usage| usage.completion_tokens));
        self.served();
        self.handoff_done();
        self.note_stored(body);
        if self.candidate(self.answering()).is_some_and(|candidate| candidate.worker.asks_to_move() != 0) {
            self.stays("not_streamed");
        }
    }

    /// Examines an event of the answer's stream.
    pub(crate) fn look(&mut self, event: &[u8]) -> Seen {
        // The first event of a stored response names it.
        if self.account.tokens() == 0 {
            self.note_stored(event);
        }
        let mut seen = seen::event(self.request.endpoint.format(), event);
        if self.request.endpoint == Endpoint::Generate {
            self.totals.note(&mut seen, self.request.items(), self.request.n);
        }
        if self.request.endpoint == Endpoint::Messages {
            self.judge_at_the_end(&mut seen);
        }
        seen
    }

    /// A message may have several events with a stop reason: the last one counts, at the end.
    fn judge_at_the_end(&mut self, seen: &mut Seen) {
        let given_up = seen.failed_end.take();
        if seen.done {
            seen.failed_end = self.given_up.take();
        } else if given_up.is_some() || seen.finish {
            self.given_up = given_up;
        }
    }

    /// Records the tokens and the usage of an event that arrived at `now`, and brings the booking up to them.
    /// Returns whether its tokens are the first of its leg.
    pub(crate) fn count(&mut self, seen: &Seen, now: Instant) -> bool {
        let first = seen.tokens > 0 && std::mem::take(&mut self.awaits_token);
        if seen.tokens > 0 {
            self.account.output(seen.tokens, now);
        }
        if let Some(usage) = seen.usage {
            self.usage(usage);
        }
        if seen.tokens > 0 || seen.usage.is_some() {
            self.book(first, now);
        }
        if seen.finish {
            self.account.sequence_ended();
        }
        if first {
            self.took_request(self.answering());
            self.note_engine_session();
            self.candidate(self.answering()).inspect(|candidate| candidate.worker.note_answered());
            self.handoff_done();
        }
        first
    }

    /// Brings the booking up to the tokens so far. A new block yields the mean inter-token latency (F4).
    fn book(&mut self, first: bool, now: Instant) {
        let computes_prompt = self.answering().computes_prompt();
        let LegRun { booking, sent, .. } = &mut self.runs.answering;
        let Some(booking) = booking.own() else { return };
        if let Some(sent) = sent.filter(|_| first) {
            booking.first_token(now - sent, computes_prompt);
        }
        let begins = booking.output_tokens(self.account.tokens());
        if (first || begins)
            && let Some(itl) = self.account.block_begins(now)
        {
            booking.load().observe_itl(itl);
            self.state.metrics.itl.observe(seconds(itl));
        }
    }

    /// Removes from an answer what its id contains besides the attempt's id; `None` when there is nothing.
    pub(crate) fn hide_ids(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let candidate = self.candidate(self.answering())?;
        let detail = connector_for(candidate.worker.spec()).id_detail(&self.request)?;
        relay::hide_ids(bytes, self.token, detail)
    }

    /// Puts null in the place of fields that only the gateway may see in the answer of a leg, or in an event
    /// of it; `None` when there is nothing.
    pub(crate) fn without_private_fields(&self, leg: Leg, bytes: &[u8]) -> Option<Vec<u8>> {
        let candidate = self.candidate(leg)?;
        without_fields(bytes, connector_for(candidate.worker.spec()).private_answer_fields())
    }

    /// Records the success of the decode or aggregated leg in metrics and averages.
    pub(crate) fn served(&mut self) {
        let leg = self.answering();
        self.took_request(leg);
        self.note_engine_session();
        let Some(candidate) = &self.runs[leg].candidate else { return };
        note_success(candidate);
        self.account.leg_ended(leg, Ok(()));
        self.state.programs.answered(&mut self.routing_request, candidate, self.account.tokens());
        record_served(&self.state, &self.request);
        if let Some(itl) = self.account.rest_itl() {
            candidate.load().observe_itl(itl);
        }
    }

    /// Records that an engine accepted a realtime session. The leg ends with the session.
    pub(super) fn upgraded(&mut self) {
        let leg = self.answering();
        self.candidate(leg).inspect(|candidate| note_success(candidate));
        self.accepted(leg);
    }
}
