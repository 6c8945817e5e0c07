//! One request that Envoy carries: let in, read, picked an endpoint for, and watched until its answer ends.

use std::sync::Arc;

use axum::Router;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, Uri};
use pointsman_endpoint_picker::{AnswerHead, Exchange, Pick, Refusal, RequestHead};
use tokio::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

use super::{
    answer_origin::origin_of,
    endpoints::{address_of, workers_of},
    own_answer::{own_answer, refusal},
};
use crate::{
    budget::{Budget, Share},
    http::{
        DataThread,
        admit::check_rate,
        auth::authorize_client,
        body::{BodyLimits, Upload},
        content_coding::{Coding, decode},
        peer::Sender,
        prepare::{Prepared, Received, Refused, prepare},
        request_id,
    },
    openai::{body_bytes::reserve, endpoint::Endpoint, error::ApiError},
    orchestrate::{
        PlannedRequest,
        proxied::{AnswerOrigin, ProxiedRequest, removed_headers},
    },
    state::{State, caller::Caller},
    telemetry::account::Account,
    upstream::Upstream,
};

/// Header that names the prefill engine to llm-d's sidecar in front of a decode engine.
const PREFILLER: HeaderName = HeaderName::from_static("x-prefiller-host-port");
/// The only endpoint of the gateway itself that reads a body.
const ROUTE: &str = "/v1/route";

/// One request.
pub(super) struct GatewayExchange {
    state: Arc<State>,
    upstream: Upstream,
    own: Router,
    head: RequestHead,
    sender: Sender,
    /// The endpoint of engines that is called; `None` if the gateway answers itself.
    endpoint: Option<Endpoint>,
    reads_body: bool,
    /// The request's place among all of them; `None`: there are too many.
    place: Option<Share>,
    started: Instant,
    upload: Upload,
    account: Option<Box<Account>>,
    caller: Caller,
    held: Share,
    /// The request, once its workers are being chosen.
    proxied: Option<ProxiedRequest>,
}

impl GatewayExchange {
    pub(super) fn begin(
        thread: &DataThread,
        own: Router,
        streams: &Arc<Budget>,
        head: RequestHead,
        sender: Sender,
    ) -> Self {
        let (state, upstream) = thread.context();
        let started = Instant::now();
        let target = posted(&head);
        let path = target.as_ref().map(Uri::path);
        let endpoint = path.and_then(Endpoint::posted);
        let reads_body = endpoint.is_some() || path == Some(ROUTE);
        let account = endpoint.map(|endpoint| {
            let id = request_id(&head.headers);
            let mut account = Account::new(state.metrics.clone(), id, endpoint, started);
            if let Some(traces) = &state.traces {
                account.traced(traces.begin(&head.headers, state.settings.request_rules.trust, started));
            }
            account
        });
        let (place, held) = (streams.reserve(1), state.body_bytes.share());
        let upload = Upload::begin(BodyLimits::of(&state, started));
        state.metrics.ext_proc.begun();
        Self {
            state,
            upstream,
            own,
            sender,
            head,
            endpoint,
            reads_body,
            place,
            started,
            upload,
            account,
            caller: Caller::default(),
            held,
            proxied: None,
        }
    }

    /// Records the failure of the request, and returns the answer to it.
    fn refuse(&mut self, error: &ApiError) -> Refusal {
        match self.account.take() {
            Some(mut account) => self.refuse_recorded(&mut account, error),
            None => refusal(error.response(&request_id(&self.head.headers)), error.code()),
        }
    }

    fn refuse_recorded(&self, account: &mut Account, error: &ApiError) -> Refusal {
        self.state.metrics.ext_proc.picked("refused");
        let mut answer = error.response_as(account.endpoint.format(), &account.request_id);
        account.add_limit_headers(answer.headers_mut());
        let refusal = refusal(answer, error.code());
        account.ended(refusal.status, error.code());
        refusal
    }

    /// Returns an empty share of the client's tenant in the bytes of bodies in flight.
    fn body_share(&self) -> Share {
        self.state.body_bytes.share_of(self.caller.tenant_hash())
    }

    /// Returns the gateway's own answer.
    async fn own_answer(&mut self, body: Bytes) -> Refusal {
        self.state.metrics.ext_proc.picked("own");
        own_answer(self.own.clone(), &self.head, body, self.sender.clone()).await
    }

    /// Returns the body without its content coding. Engines decode none.
    async fn decoded(&mut self, body: Bytes) -> Result<Bytes, Refusal> {
        let limit = self.state.settings.max_body_bytes;
        let mut held = self.body_share();
        let decoded = match Coding::of(&self.head.headers) {
            Ok(None) => return Ok(body),
            Ok(Some(coding)) => decode(coding, &body, limit, &mut held).await,
            Err(error) => Err(error),
        };
        self.held = held;
        decoded.map_err(|error| self.refuse(&error))
    }

    /// Picks the workers of a planned request.
    async fn pick_workers(
        &mut self,
        planned: Box<PlannedRequest>,
        account: Box<Account>,
    ) -> Result<Pick, Refusal> {
        let mut proxied = ProxiedRequest::new(self.state.clone(), self.upstream.clone(), planned, account);
        let handover = match proxied.pick().await {
            Ok(handover) => handover,
            Err(error) => return Err(self.refuse_recorded(proxied.account(), &error)),
        };
        let prefiller = proxied.prefill().map(address_of);
        let (Some(endpoint), None | Some(Some(_))) = (proxied.answering().and_then(address_of), prefiller)
        else {
            return Err(self.refuse_recorded(proxied.account(), &no_address()));
        };
        let prefiller =
            prefiller.flatten().and_then(|address| HeaderValue::try_from(address.to_string()).ok());
        let mut set_headers = handover.headers;
        set_headers.extend(prefiller.map(|address| (PREFILLER, address)));
        let remove_headers = removed_headers(&set_headers);
        self.state.metrics.ext_proc.picked("picked");
        self.proxied = Some(proxied);
        Ok(Pick { endpoint: endpoint.to_string(), set_headers, remove_headers, body: handover.body })
    }
}

impl Exchange for GatewayExchange {
    async fn admit(&mut self) -> Result<(), Refusal> {
        if self.place.is_none() {
            let text = "picking an endpoint: as many requests are open as ext_proc.max_streams allows; retry after \
                        the time in `retry-after`";
            let (status, retry_after) = (StatusCode::SERVICE_UNAVAILABLE, Duration::from_secs(1));
            return Err(self.refuse(&ApiError::Overloaded { text: text.to_owned(), status, retry_after }));
        }
        // The gateway's own endpoints look at keys themselves.
        if !self.reads_body {
            return Err(self.own_answer(Bytes::new()).await);
        }
        // The drain refuses none: Envoy opens no more streams on this connection once it has the GOAWAY.
        let authorized = authorize_client(&self.state, &self.head.headers, &self.sender).await;
        let caller = authorized.map_err(|error| self.refuse(&error))?;
        if let Some(account) = &mut self.account {
            account.counts_for(self.state.tenant_metrics.of(caller.tenant_name()));
            // The gateway's own endpoint counts its requests itself.
            check_rate(&self.state, &caller).map_err(|error| self.refuse(&error))?;
        }
        Coding::of(&self.head.headers).map_err(|error| self.refuse(&error))?;
        self.caller = caller;
        self.held = self.body_share();
        self.upload = Upload::begin(BodyLimits::of(&self.state, self.started));
        Ok(())
    }

    fn receive(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.upload.arrived(bytes);
        let limit = self.state.settings.max_body_bytes;
        if self.held.amount() + bytes > limit {
            return Err(self.refuse(&ApiError::PayloadTooLarge(limit)));
        }
        reserve(&mut self.held, bytes).map_err(|error| self.refuse(&error))
    }

    fn without_room(&mut self) -> Refusal {
        let error = ApiError::BodyBytesInFlight(self.held.limit());
        let Some(proxied) = &mut self.proxied else { return self.refuse(&error) };
        proxied.give_up(&error);
        refusal(error.response(&proxied.account().request_id), error.code())
    }

    async fn pick(&mut self, body: Bytes) -> Result<Pick, Refusal> {
        let body = if self.endpoint.is_some() { self.decoded(body).await? } else { body };
        let held = std::mem::replace(&mut self.held, self.state.body_bytes.share());
        let (Some(endpoint), Some(mut account)) = (self.endpoint, self.account.take()) else {
            // The gateway's own endpoint counts the bytes itself.
            drop(held);
            return Err(self.own_answer(body).await);
        };
        account.stage("receive", self.started);
        account.holds(held);
        let snapshot = self.state.registry.snapshot();
        let only = self.head.subset.as_ref().map(|subset| workers_of(subset, &snapshot));
        let (headers, caller) = (self.head.headers.clone(), std::mem::take(&mut self.caller));
        let received = Received { endpoint, headers, body, caller, account, only };
        // Envoy's reset drops this future; no work has to continue then.
        match prepare(&self.state, &self.upstream, received, &CancellationToken::new()).await {
            Ok(Prepared::Planned { planned, account }) => self.pick_workers(planned, account).await,
            Ok(Prepared::Preview { answer, account }) => {
                account.discard();
                Err(refusal(answer, "preview"))
            }
            Err(Refused { mut account, error, .. }) => Err(self.refuse_recorded(&mut account, &error)),
        }
    }

    fn answered(&mut self, head: AnswerHead<'_>) -> Vec<(HeaderName, HeaderValue)> {
        let Some(proxied) = &mut self.proxied else { return Vec::new() };
        let picked = proxied.answering().and_then(address_of).map(|address| address.to_string());
        let served = match head.served {
            None => "unknown",
            Some(served) if picked.as_deref() == Some(served) => "picked",
            Some(_) => "other",
        };
        self.state.metrics.ext_proc.served(served);
        let origin = match head.details {
            _ if served == "other" => AnswerOrigin::Elsewhere,
            Some(details) => origin_of(details),
            None => AnswerOrigin::Engine,
        };
        proxied.head((head.status, &head.headers), origin, head.hides_body);
        proxied.own_headers().into_iter().filter_map(|(name, value)| Some((name?, value))).collect()
    }

    fn answer_bytes(&mut self, bytes: &[u8]) {
        if let Some(proxied) = &mut self.proxied {
            proxied.bytes(bytes);
        }
    }

    fn ended(&mut self) {
        if let Some(proxied) = self.proxied.take() {
            proxied.end();
        }
    }

    fn deadline(&self) -> Instant {
        match &self.proxied {
            Some(proxied) => proxied.deadline(),
            None => self.upload.next_until().0,
        }
    }

    fn must_end(&mut self) -> bool {
        let waits = || self.state.drain_end.has_passed();
        self.proxied.as_ref().map_or_else(waits, ProxiedRequest::must_end)
    }

    fn time_passed(&mut self) -> Option<Refusal> {
        if let Some(proxied) = &mut self.proxied {
            let error = proxied.time_passed()?;
            return Some(refusal(error.response(&proxied.account().request_id), error.code()));
        }
        let error = if self.must_end() { ApiError::Draining } else { self.upload.next_until().1 };
        Some(self.refuse(&error))
    }
}

impl Drop for GatewayExchange {
    fn drop(&mut self) {
        self.state.metrics.ext_proc.ended();
    }
}

/// Returns the target of a POST request, which a proxy may send in absolute form, as HTTP/1.1 allows.
fn posted(head: &RequestHead) -> Option<Uri> {
    head.path.parse().ok().filter(|_| head.method == "POST")
}

fn no_address() -> ApiError {
    let text = "picking an endpoint: the url of the chosen worker has a name, and Envoy needs an address; write \
                `http://IP:PORT` as the url of each worker";
    ApiError::NoWorker(text.to_owned())
}
