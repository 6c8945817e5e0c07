//! Sends a leg: body and headers from the connector, the call through the upstream client. Aborts it by
//! request id.

use std::time::Duration;

use futures_util::future::BoxFuture;
use pointsman_workers::Leg;

use super::{DecodeHead, Drive, drain_prefill::drain_prefill, target};
use crate::connectors::{HandoffKind, LegContext, connector_for, leg_headers};

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
        let headers = leg_headers(&context, target(candidate));
        let url = format!("{}{}", spec.url, self.request.endpoint.path());
        let upstream = self.upstream.clone();
        // Only the answer of a completed handoff carries data.
        let call: BoxFuture<'static, _> = if connector.handoff() == Some(HandoffKind::Completed) {
            Box::pin(async move { upstream.whole(&url, &headers, body).await.map(Some) })
        } else {
            Box::pin(async move { drain_prefill(&upstream, &url, &headers, body).await.map(|()| None) })
        };
        self.prefill.call = Some(call);
    }

    pub(super) fn send_decode(&mut self, consume: bool) {
        let Some(candidate) = &self.decode.candidate else { return };
        let spec = candidate.worker.spec();
        let (connector, context) = (connector_for(spec), self.context());
        let body = match (self.legs.answering(), consume) {
            (Leg::Decode, true) => connector.decode_one_token(&self.request, &context),
            (Leg::Decode, false) => connector.decode(&self.request, &context),
            _ => connector.single(&self.request, &context),
        };
        let headers = leg_headers(&context, target(candidate));
        let url = format!("{}{}", spec.url, self.request.endpoint.path());
        let upstream = self.upstream.clone();
        self.decode.call = Some(if self.request.stream && !consume {
            Box::pin(async move { upstream.head(&url, &headers, body).await.map(DecodeHead::Stream) })
        } else {
            Box::pin(async move { upstream.whole(&url, &headers, body).await.map(DecodeHead::Whole) })
        });
    }

    pub(super) fn abort(&self, leg: Leg) {
        let candidate = if leg == Leg::Prefill { &self.prefill.candidate } else { &self.decode.candidate };
        let Some(candidate) = candidate else { return };
        let spec = candidate.worker.spec();
        let Some(abort) = connector_for(spec).abort(self.token) else { return };
        let (upstream, url) = (self.upstream.clone(), format!("{}{}", spec.url, abort.path));
        let headers = leg_headers(&self.context(), target(candidate));
        let over = self.over.clone();
        self.state.tracker.spawn(async move {
            let send_abort = async || {
                if let Err(error) = upstream.whole(&url, &headers, abort.body.clone()).await {
                    tracing::debug!(%error, "abort failed");
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
