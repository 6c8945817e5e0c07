//! A leg's request on its way: the connector's body and headers, the upstream's call; and the abort that takes it back.

use std::time::Duration;

use futures_util::future::BoxFuture;
use pointsman_workers::Leg;

use super::{DecodeHead, Drive, target};
use crate::{
    connectors::{LegContext, connector_for, leg_headers},
    orchestrate::legs::HandoffKind,
};

/// When an abort is sent again, each after the one before.
const AGAIN: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(5)];

/// How long a request may lie with an engine before it looks at it.
const AFTERWARDS: Duration = Duration::from_millis(50);

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
        let upstream = self.state.upstream.clone();
        // Only a completed handoff comes back in the answer.
        let call: BoxFuture<'static, _> = if connector.handoff() == Some(HandoffKind::Completed) {
            Box::pin(async move { upstream.whole(&url, &headers, body).await.map(Some) })
        } else {
            Box::pin(async move { upstream.drained(&url, &headers, body).await.map(|()| None) })
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
        let upstream = self.state.upstream.clone();
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
        let (upstream, url) = (self.state.upstream.clone(), format!("{}{}", spec.url, abort.path));
        let headers = leg_headers(&self.context(), target(candidate));
        let over = self.over.clone();
        self.state.tracker.spawn(async move {
            let say = async || {
                if let Err(error) = upstream.whole(&url, &headers, abort.body.clone()).await {
                    tracing::debug!(%error, "an abort was not taken");
                }
            };
            // It may overtake the request that it is meant for: it is said again while that one runs.
            for pause in AGAIN {
                say().await;
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = over.cancelled() => break,
                }
            }
            // And once more when it is over: its connection may have been closed before the engine had looked at it.
            if over.is_cancelled() {
                tokio::time::sleep(AFTERWARDS).await;
                say().await;
            }
        });
    }
}
