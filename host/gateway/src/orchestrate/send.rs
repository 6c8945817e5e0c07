//! Sends a leg: body and headers from the connector, the call through the upstream client. Aborts it by
//! request id.

use std::{
    pin::{Pin, pin},
    time::Duration,
};

use bytes::Bytes;
use http::header;
use pointsman_orchestration::HandoffKind;
use pointsman_workers::{InFlight, Leg, Worker};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    DecodeHead, Drive,
    drain_prefill::drain_prefill,
    prefill_call::{PrefillCall, Prefilled},
    target,
    whole_estimate::WholeEstimate,
};
use crate::{
    connectors::{Connector, LegContext, connector_for, leg_headers},
    openai::{
        request::Request,
        trace_context::{Links, Span},
    },
    telemetry::traces::LegTarget,
    upstream::{self, CallError, Destination, Silence},
};

/// Delays between repetitions of an abort.
const ABORT_RETRY_DELAYS: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(5)];

/// Delay of the last abort: how long an engine may take to look at a request whose connection was closed.
const FINAL_ABORT_DELAY: Duration = Duration::from_millis(50);

impl Drive {
    fn context(&self) -> LegContext<'_> {
        LegContext {
            token: self.token,
            prefill: self.prefill.candidate.as_ref().map(target),
            decode: self.decode.candidate.as_ref().map(target),
            engine_id: self.engine_id.as_deref(),
            rooms: &self.rooms,
            handoff: self.handoff.as_deref(),
        }
    }

    pub(super) fn send_prefill(&mut self) {
        let Some(candidate) = &self.prefill.candidate else { return };
        let spec = candidate.worker.spec();
        let (connector, context) = (connector_for(spec), self.context());
        let body = connector.prefill(&self.request, &context);
        let span = Span::fresh();
        let mut headers = leg_headers(&context, target(candidate), self.request.authorization.as_ref());
        let links = Links { prefill: None, failed: self.failed_span };
        headers.extend(self.account.trace_context(&self.request).headers(span, links));
        let target = LegTarget { leg: Leg::Prefill, candidate, attempt: self.attempts.earlier(), links };
        self.account.leg_sent(span, target);
        let to = Destination::new(spec, self.request.endpoint.path());
        let upstream = self.upstream.clone();
        let limits = self.state.settings.leg_timeouts;
        let silence = head_of("prefill answer", "prefill_head", limits.prefill_head);
        let pause = limits.pause();
        // Only the answer of a completed handoff carries data.
        let carries_data = connector.handoff() == Some(HandoffKind::Completed);
        self.prefill_over = Some(CancellationToken::new());
        let worker = candidate.worker.clone();
        let task = PrefillCall {
            state: self.state.clone(),
            connector,
            is_chat: self.request.is_chat(),
            booking: self.prefill_booking.clone(),
        };
        self.prefill.call = Some(task.start(async move {
            let in_flight = InFlight::new(worker.clone(), None);
            let call = pin!(async {
                let head = pin!(upstream.head(&to, &headers, body));
                let (head, mut body) = upstream::within(silence, head).await?.into_parts();
                body.of_call(in_flight);
                if carries_data {
                    let body = upstream::collect(body, Some(pause)).await?;
                    return Ok(Prefilled::Answer(http::Response::from_parts(head, body)));
                }
                let cached_tokens = drain_prefill(http::Response::from_parts(head, body), pause).await?;
                Ok(Prefilled::Drained { cached_tokens })
            });
            unless_down(&worker, call).await
        }));
        (self.prefill.sent, self.prefill.span) = (Some(Instant::now()), Some(span));
    }

    pub(super) fn send_decode(&mut self, consume: bool) {
        let Some(candidate) = &self.decode.candidate else { return };
        let spec = candidate.worker.spec();
        let (connector, context) = (connector_for(spec), self.context());
        let body = match (self.legs.answering(), consume) {
            (Leg::Decode, true) => connector.decode_one_token(&self.request, &context),
            (Leg::Decode, false) => connector.decode(&self.request, &context),
            _ => single_body(&self.request, connector, &context),
        };
        let mut headers = leg_headers(&context, target(candidate), self.request.authorization.as_ref());
        // The decode leg names the prefill that it continues (D1).
        let prefill = self.prefill.span.filter(|_| self.legs.answering() == Leg::Decode);
        let (span, links) = (Span::fresh(), Links { prefill, failed: self.failed_span });
        headers.extend(self.account.trace_context(&self.request).headers(span, links));
        let (leg, attempt) = (self.legs.answering(), self.attempts.earlier());
        self.account.leg_sent(span, LegTarget { leg, candidate, attempt, links });
        headers
            .extend(self.request.form.as_ref().map(|form| (header::CONTENT_TYPE, form.content_type.clone())));
        let to = Destination::new(spec, self.request.endpoint.path());
        let upstream = self.upstream.clone();
        (self.decode.sent, self.decode.span) = (Some(Instant::now()), Some(span));
        let streams = self.request.stream && !consume;
        let from = self.decode.sent.filter(|_| self.prefill.call.is_none());
        let booking = self.decode.booking.as_ref().filter(|_| !streams);
        self.estimate = booking.map(|booking| WholeEstimate::new(booking, &self.request, leg, from));
        let limits = self.state.settings.leg_timeouts;
        let silence = if streams {
            head_of("answer", "head", limits.head)
        } else {
            head_of("whole answer", "whole_head", limits.whole_head)
        };
        let pause = limits.pause();
        // The engine of a pair answers after the prefill, which has a limit of its own.
        let prefill_over = self.prefill_over.clone().filter(|_| self.prefill.call.is_some());
        let worker = candidate.worker.clone();
        self.decode.call = Some(Box::pin(async move {
            let mut in_flight = InFlight::new(worker.clone(), prefill_over.clone());
            let call = pin!(async {
                let head = pin!(upstream.head(&to, &headers, body));
                let mut response = within_after(prefill_over, &mut in_flight, silence, head).await?;
                response.body_mut().of_call(in_flight);
                if streams {
                    return Ok(DecodeHead::Stream(response));
                }
                let (head, body) = response.into_parts();
                let body = upstream::collect(body, Some(pause)).await?;
                Ok(DecodeHead::Whole(http::Response::from_parts(head, body)))
            });
            unless_down(&worker, call).await
        }));
    }

    pub(super) fn abort(&mut self, leg: Leg) {
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        let Some(candidate) = candidate else { return };
        let spec = candidate.worker.spec();
        let Some(abort) = connector_for(spec).abort(&self.request, self.token) else { return };
        let (upstream, to) = (self.upstream.clone(), Destination::new(spec, abort.path));
        let headers = leg_headers(&self.context(), target(candidate), self.request.authorization.as_ref());
        let over = self.over.get_or_insert_default().clone();
        if self.legs.is_finished() {
            over.cancel();
        }
        let (worker, limit) = (spec.id, self.state.settings.leg_timeouts.abort);
        self.state.tracker.spawn(async move {
            let send_abort = async || {
                for body in &abort.bodies {
                    let send = async || {
                        let silence = Silence { what: "answer to an abort", key: "abort", limit };
                        upstream::within(silence, upstream.whole(&to, &headers, body.clone())).await
                    };
                    let mut sent = send().await;
                    // The engine may have closed a connection that was kept since the last item.
                    if matches!(sent, Err(CallError::Broken(_))) {
                        sent = send().await;
                    }
                    if let Err(error) = sent {
                        tracing::debug!(%worker, %error, "abort failed");
                        // An engine that closed the connection or refused one item may take the others. An
                        // unreachable worker is not tried once for each of them, because there may be
                        // thousands.
                        if !matches!(error, CallError::Broken(_) | CallError::Status { .. }) {
                            return;
                        }
                    }
                }
            };
            // An abort may arrive before the request that it is meant for: it is repeated while that one
            // runs.
            for pause in ABORT_RETRY_DELAYS {
                send_abort().await;
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = over.cancelled() => break,
                }
            }
            // It is sent once more afterwards: the engine may read the request only after its connection was
            // closed.
            if over.is_cancelled() {
                tokio::time::sleep(FINAL_ABORT_DELAY).await;
                send_abort().await;
            }
        });
    }
}

/// The body of a request that runs on one worker: a form as it came, JSON as the dialect wants it.
pub(super) fn single_body(request: &Request, connector: &dyn Connector, context: &LegContext<'_>) -> Bytes {
    match &request.form {
        Some(form) => form.bytes.clone(),
        None => connector.single(request, context),
    }
}

/// The wait for the head of an answer.
fn head_of(what: &'static str, key: &'static str, limit: Duration) -> Silence {
    Silence { what, key, limit }
}

/// Waits for a call, which ends when health checks find that the worker does not answer at all. It is pinned
/// where it was made: passed by value, each function would have room for it twice.
async fn unless_down<T>(
    worker: &Worker,
    call: Pin<&mut impl Future<Output = Result<T, CallError>>>,
) -> Result<T, CallError> {
    tokio::select! {
        biased;
        outcome = call => outcome,
        () = worker.judged_down() => Err(CallError::Down),
    }
}

/// Limits the time of a call, counted from when `start` is cancelled, if there is one. Before that, the
/// worker has no call to answer.
async fn within_after<T>(
    start: Option<CancellationToken>,
    in_flight: &mut InFlight,
    silence: Silence,
    call: Pin<&mut impl Future<Output = Result<T, CallError>>>,
) -> Result<T, CallError> {
    let Some(start) = start else { return upstream::within(silence, call).await };
    let late = async {
        start.cancelled().await;
        in_flight.check();
        tokio::time::sleep(silence.limit).await;
    };
    tokio::select! {
        biased;
        outcome = call => outcome,
        () = late => Err(CallError::Timeout(silence)),
    }
}
