//! Sends a leg: body and headers from the connector, the call through the upstream client, or by a proxy.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Response, StatusCode, header};
use pointsman_orchestration::HandoffKind;
use pointsman_workers::{Candidate, InFlight, Leg, ModelName};
use tokio_util::sync::CancellationToken;

#[cfg(feature = "ext-proc")]
use super::executor::Handover;
use super::{
    Drive,
    answer::{
        drain_prefill::drain_prefill,
        whole_answer::asks_for_vectors,
        whole_estimate::{WholeEstimate, most_output},
    },
    executor::{Executor, RANK},
    leg_run::LegAnswer,
    prefill_call::{PrefillCall, Prefilled},
    target,
    waits::asleep::unless_lost,
};
use crate::{
    budget::Share,
    connectors::{Connector, LegContext, TokenIds, connector_for, leg_headers},
    openai::{
        error::engine_text,
        request::{Endpoint, Request},
        responses::may_store,
        trace_context::{Links, Span},
    },
    telemetry::traces::LegTarget,
    upstream::{
        self, Body, CallError, Destination, EVENT_IDLE_MAX, HeadWait, LegHeaders, REQUEST, Silence, Upstream,
    },
};

impl Drive {
    /// Returns an empty share of the request's tenant in the bytes of bodies in flight.
    pub(super) fn body_share(&self) -> Share {
        self.state.body_bytes.share_of(self.routing_request.tenant_hash)
    }

    pub(super) fn context(&self) -> LegContext<'_> {
        let [prefill, decode] =
            [&self.runs.prefill, &self.runs.answering].map(|run| run.candidate.as_ref().map(target));
        let parent = self.snapshot.parent_of(&self.request.model).map(ModelName::as_str);
        if self.executor.is_proxy() {
            // A sidecar ties the legs of a pair together: both get the same body.
            let target = decode.filter(|_| self.answering() != Leg::Decode);
            return LegContext { parent, ..LegContext::alone(self.token, target) };
        }
        LegContext {
            token: self.token,
            endpoint: Some(self.request.endpoint),
            prefill,
            decode,
            engine_id: self.engine_id.as_deref(),
            rooms: &self.rooms,
            handoff: self.handoff.as_deref(),
            ids: self.token_ids(),
            usage: self.wants_usage(),
            parent,
        }
    }

    /// The token ids that the gateway asks engines for, or sends to them.
    fn token_ids(&self) -> TokenIds<'_> {
        let origin = self.rest.as_ref().and_then(|rest| rest.origin.as_ref().ok());
        // The rest of a completion already has the ids as its prompt.
        let is_chat = self.request.endpoint == Endpoint::ChatCompletions;
        TokenIds { wanted: self.wants_ids(), prompt: origin.filter(|_| is_chat).map(|origin| &*origin.ids) }
    }

    /// The request that engines get: the client's, or one for the rest of its answer.
    fn leg_request(&self) -> &Request {
        self.rest.as_ref().map_or(&self.request, |rest| &rest.request)
    }

    /// Sends a leg, or hands it to the proxy. `consume`: for one output token, only to consume the handoff.
    pub(super) fn send(&mut self, leg: Leg, consume: bool) {
        let Some(candidate) = &self.runs[leg].candidate else { return };
        // The decode leg names the prefill that it continues (D1).
        let prefill = self.runs.prefill.span.filter(|_| leg == Leg::Decode);
        let (span, links) = (Span::fresh(), Links { prefill, failed: self.failed_span });
        let mut headers =
            leg_headers(&self.context(), target(candidate), self.request.authorization.as_ref());
        headers.extend(self.account.trace_context(&self.request).headers(span, links));
        let to = LegTarget { leg, candidate, attempt: self.attempts.earlier(), links };
        let sent = self.account.leg_sent(span, to);
        self.awaits_token |= leg != Leg::Prefill;
        let run = &mut self.runs[leg];
        (run.sent, run.span) = (Some(sent), Some(span));
        (run.aborted, run.abort_answered) = (false, None);
        match (&self.executor, leg) {
            (Executor::Calls, Leg::Prefill) => self.call_prefill(headers),
            (Executor::Calls, _) => self.call_answering(leg, consume, headers),
            (Executor::Upgrade(..), _) => self.upgrade(headers),
            #[cfg(feature = "ext-proc")]
            (Executor::Proxy(_), _) => self.hand_over(leg, headers),
        }
    }

    /// Calls the engine of the prefill leg.
    fn call_prefill(&mut self, headers: LegHeaders) {
        let Some(candidate) = &self.runs.prefill.candidate else { return };
        let spec = candidate.worker.spec();
        let connector = connector_for(spec);
        let body = connector.prefill(self.leg_request(), &self.context());
        let to = Destination::new(spec, self.request.endpoint.path());
        let upstream = self.upstream.at_most_once();
        let limits = self.state.settings.leg_timeouts;
        let silence = head_of("prefill answer", "prefill_head", limits.prefill_head);
        let most = (EVENT_IDLE_MAX, limits.event_idle_max);
        let (pause, request) = (limits.pause(), self.request_hash());
        // Only the answer of a completed handoff carries data.
        let carries_data = connector.handoff() == Some(HandoffKind::Completed);
        let worker = candidate.worker.clone();
        let (endpoint, mut held) = (self.request.endpoint, self.body_share());
        // A decode leg that runs beside it names the engine of this rank: both legs are retried then.
        let rank_is_chosen = self.rank_is_chosen(Leg::Prefill) && self.engine_id.is_none();
        let others = self.other_workers(Leg::Prefill);
        self.others.prefill.clone_from(&others);
        let run = &mut self.runs.prefill;
        run.over = Some(CancellationToken::new());
        let answers = carries_data.then(|| Arc::new(AtomicBool::new(false)));
        run.answers.clone_from(&answers);
        let task = PrefillCall {
            state: self.state.clone(),
            connector,
            worker: worker.clone(),
            is_chat: self.request.is_chat(),
            booking: run.booking.give(),
        };
        let call = async move {
            let in_flight = InFlight::new(worker.clone(), None);
            let call = pin!(async {
                let head = pin!(head_of_leg(&upstream, &to, headers, body, rank_is_chosen));
                let wait = HeadWait { silence, most, worker: &worker, request };
                let (head, mut body) = wait.of(head).await?.into_parts();
                body.of_call(in_flight);
                if let Some(answers) = answers {
                    answers.store(true, Ordering::Relaxed);
                    let body = upstream::collect(body, Some(pause), Some(&mut held)).await?;
                    return Ok(Prefilled::Answer(Response::from_parts(head, body), held));
                }
                let response = Response::from_parts(head, body);
                let whole = drain_prefill(response, endpoint, pause, &mut held).await?;
                Ok(Prefilled::Drained(whole, held))
            });
            unless_lost(&worker, others, call).await
        };
        // Nothing answers the client before the data came.
        run.call = Some(if carries_data { Box::pin(task.run(call)) } else { task.start(call) });
    }

    /// Calls the engine of the leg that answers.
    fn call_answering(&mut self, leg: Leg, consume: bool, mut headers: LegHeaders) {
        let Some(candidate) = &self.runs[leg].candidate else { return };
        let spec = candidate.worker.spec();
        let (connector, context) = (connector_for(spec), self.context());
        let body = match (leg, consume) {
            (Leg::Decode, true) => connector.decode_one_token(self.leg_request(), &context),
            (Leg::Decode, false) => connector.decode(self.leg_request(), &context),
            _ => single_body(self.leg_request(), connector, &context),
        };
        headers
            .extend(self.request.form.as_ref().map(|form| (header::CONTENT_TYPE, form.content_type.clone())));
        let to = Destination::new(spec, self.request.endpoint.path());
        let worker = candidate.worker.clone();
        let is_sent_once = leg == Leg::Decode || may_store(&self.request);
        let upstream = if is_sent_once { self.upstream.at_most_once() } else { self.upstream.clone() };
        let upstream = if asks_for_vectors(&self.request) { upstream.for_vectors() } else { upstream };
        let streams = self.request.stream && !consume;
        // Engines send audio as they make it, whether or not they are asked for a stream.
        let passes_on = streams || self.request.endpoint == Endpoint::Speech;
        self.begin_estimate(leg, passes_on);
        let limits = self.state.settings.leg_timeouts;
        let (silence, most) = if streams {
            (head_of("answer", "head", limits.head), (EVENT_IDLE_MAX, limits.event_idle_max))
        } else {
            // The deadline of the request ends it before.
            let most = (REQUEST, self.state.settings.request_timeout);
            (head_of("whole answer", "whole_head", limits.whole_head), most)
        };
        let (pause, request, mut held) = (limits.pause(), self.request_hash(), self.body_share());
        // The engine of a pair answers after the prefill, which has a limit of its own.
        let prefill_over = self.runs.prefill.over.clone().filter(|_| self.prefill_runs());
        let (rank_is_chosen, others) = (self.rank_is_chosen(leg), self.other_workers(leg));
        self.others[leg].clone_from(&others);
        self.runs[leg].call = Some(Box::pin(async move {
            let mut in_flight = InFlight::new(worker.clone(), prefill_over.clone());
            let call = pin!(async {
                let head = pin!(head_of_leg(&upstream, &to, headers, body, rank_is_chosen));
                let wait = HeadWait { silence, most, worker: &worker, request };
                let mut response = head_after(prefill_over, &mut in_flight, wait, head).await?;
                response.body_mut().of_call(in_flight);
                if passes_on {
                    return Ok(LegAnswer::Stream(response));
                }
                let (head, body) = response.into_parts();
                let body = upstream::collect(body, Some(pause), Some(&mut held)).await?;
                Ok(LegAnswer::Whole(Response::from_parts(head, body), held))
            });
            unless_lost(&worker, others, call).await
        }));
    }

    /// Returns whether the gateway chose the rank of a leg, and no hint named it.
    fn rank_is_chosen(&self, leg: Leg) -> bool {
        self.request.hints.pinned(leg).is_none_or(|(_, rank)| rank.is_none())
    }

    /// Notes that the engine of a prefill leg has lost the rank that the gateway chose, whose engine the
    /// decode leg names. Returns whether it has.
    pub(super) fn note_lost_rank(&self, leg: Leg, error: &CallError) -> bool {
        let is_tied = leg == Leg::Prefill && self.engine_id.is_some() && self.rank_is_chosen(leg);
        let has_ranks = |prefill: &&Candidate| prefill.worker.spec().dp_size > 1;
        let refuses = |prefill: &&Candidate| {
            let sent = prefill.worker.spec().first_rank + prefill.rank.0;
            refuses_rank(error, &sent.to_string())
        };
        let lost = self.candidate(leg).filter(|_| is_tied).filter(has_ranks).filter(refuses);
        lost.inspect(|lost| lost.worker.note_lost_rank(lost.rank)).is_some()
    }

    /// Asks the engine of a realtime session to upgrade a connection.
    fn upgrade(&mut self, headers: LegHeaders) {
        let Executor::Upgrade(path, of_client) = &self.executor else { return };
        let Some(candidate) = &self.runs.answering.candidate else { return };
        let (to, mut all) = (Destination::new(candidate.worker.spec(), path), of_client.clone());
        all.extend(headers);
        let (upstream, worker) = (self.upstream.clone(), candidate.worker.clone());
        let (tracker, limit) = (self.state.tracker.clone(), self.state.settings.leg_timeouts.head);
        self.runs.answering.call = Some(Box::pin(async move {
            let _in_flight = InFlight::new(worker.clone(), None);
            let upgraded = pin!(upstream.upgrade(&to, all, &tracker));
            let call = pin!(upstream::with_time_limit(head_of("upgrade", "head", limit), upgraded));
            unless_lost(&worker, None, call).await.map(LegAnswer::Upgraded)
        }));
    }

    /// Tells the proxy what the answering engine gets. A sidecar sends the prefill leg with it.
    #[cfg(feature = "ext-proc")]
    fn hand_over(&mut self, leg: Leg, mut headers: LegHeaders) {
        let Some(candidate) = self.runs[leg].candidate.as_ref().filter(|_| leg != Leg::Prefill) else {
            return;
        };
        let body = single_body(&self.request, connector_for(candidate.worker.spec()), &self.context());
        match leg {
            Leg::Aggregated => self.begin_estimate(leg, self.request.stream),
            // The ranks of a pair are left to the engines: both get the same headers.
            _ => headers.retain(|(name, _)| name != RANK),
        }
        self.executor = Executor::Proxy(Some(Handover { headers, body }));
    }

    /// Starts the estimate of how far an answer is that is not streamed.
    fn begin_estimate(&mut self, leg: Leg, streams: bool) {
        let from = self.runs[leg].sent.filter(|_| !self.prefill_runs());
        let candidate = self.runs[leg].candidate.as_ref();
        let context = candidate.and_then(|candidate| candidate.worker.context_length(&self.request.model));
        let most = most_output(&self.request, &self.routing_request, context);
        let booking = self.runs[leg].booking.own().filter(|_| !streams);
        self.estimate = booking.map(|booking| WholeEstimate::new(booking, &self.request, leg, from, most));
    }
}

/// The body of a request that runs on one worker: a form as it arrived, JSON as the dialect wants it.
fn single_body(request: &Request, connector: &dyn Connector, context: &LegContext<'_>) -> Bytes {
    match &request.form {
        Some(form) => form.bytes.clone(),
        None => connector.single(request, context),
    }
}

/// Sends a leg and waits for the head of its answer. An engine that refuses the rank that the gateway chose
/// has lost ranks, whose metrics stay: it gets the leg once more and chooses a rank itself (D1.5).
async fn head_of_leg(
    upstream: &Upstream,
    to: &Destination,
    mut headers: LegHeaders,
    body: Bytes,
    rank_is_chosen: bool,
) -> Result<Response<Body>, CallError> {
    let rank = headers.iter().find(|(name, _)| name == RANK).filter(|_| rank_is_chosen);
    let Some(rank) = rank.and_then(|(_, rank)| rank.to_str().ok()).map(str::to_owned) else {
        return upstream.head(to, &headers, body).await;
    };
    match upstream.head(to, &headers, body.clone()).await {
        Err(error) if refuses_rank(&error, &rank) => {
            headers.retain(|(name, _)| name != RANK);
            Box::pin(upstream.head(to, &headers, body)).await
        }
        called => called,
    }
}

/// Returns whether an engine refuses the data-parallel rank that it got, as vLLM's Python frontend and its
/// Rust one do. Their message begins so: engines repeat what clients sent, but not at the beginning.
fn refuses_rank(error: &CallError, rank: &str) -> bool {
    let CallError::Status { status: StatusCode::BAD_REQUEST, body, .. } = error else { return false };
    let message = engine_text(body);
    message == "engine-core error"
        || message.starts_with(&format!("data_parallel_rank {rank} is out of range "))
}

/// Returns the time limit for the head of an answer.
fn head_of(what: &'static str, key: &'static str, limit: Duration) -> Silence {
    Silence { what, key, limit }
}

/// Waits for the head of an answer. The time counts from when `start` is cancelled, if there is one: before
/// that, the worker has no call to answer.
async fn head_after<T>(
    start: Option<CancellationToken>,
    in_flight: &mut InFlight,
    wait: HeadWait<'_>,
    mut call: Pin<&mut impl Future<Output = Result<T, CallError>>>,
) -> Result<T, CallError> {
    if let Some(start) = start {
        tokio::select! {
            biased;
            outcome = call.as_mut() => return outcome,
            () = start.cancelled() => in_flight.check(),
        }
    }
    wait.of(call).await
}
