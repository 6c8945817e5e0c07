//! Chooses and books the workers of a request that a proxy carries: the legs are routed as the driver routes
//! them, and no leg is sent.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, header};
use pointsman_orchestration::{AfterRefusal, Attempts, Entry, LegOrder, Queued, Shape};
use pointsman_routing::{
    CandidateId, Pairing, Purpose, Query, Routed, RouterConfigOverride, RoutingRequest, SlotKind,
};
use pointsman_workers::{Booking, Candidate, Leg, Snapshot};
use tokio::time::Instant;

use super::{PlannedRequest, id_of, outcome::quarantined, plan, route::parking, send::single_body, target};
use crate::{
    connectors::{LegContext, RequestToken, connector_for, leg_headers},
    openai::{
        error::ApiError,
        request::Request,
        trace_context::{Links, Span},
    },
    state::State,
    telemetry::{account::Account, traces::LegTarget},
    upstream::LegHeaders,
};

/// A worker that was chosen, and the load that it is booked for.
#[derive(Debug)]
pub(crate) struct PickedWorker {
    pub(crate) candidate: Candidate,
    pub(crate) booking: Option<Booking>,
}

/// The workers of a request, and what the one that answers is to get.
#[derive(Debug)]
pub(crate) struct PickedWorkers {
    /// The leg that answers the client.
    pub(crate) leg: Leg,
    pub(crate) answering: PickedWorker,
    pub(crate) prefill: Option<PickedWorker>,
    pub(crate) headers: LegHeaders,
    pub(crate) body: Bytes,
}

/// A request whose workers are being chosen.
struct Picking<'a> {
    state: &'a Arc<State>,
    request: &'a Arc<Request>,
    routing_request: &'a RoutingRequest,
    snapshot: &'a Snapshot,
    account: &'a mut Account,
    attempts: Attempts,
    explain: bool,
    planned: Option<CandidateId>,
}

/// Chooses the workers of a planned request.
///
/// # Errors
/// [`ApiError`]: no worker takes a leg, now or in time.
pub(crate) async fn pick(
    state: &Arc<State>,
    planned: &PlannedRequest,
    account: &mut Account,
) -> Result<PickedWorkers, ApiError> {
    let PlannedRequest { request, routing_request, snapshot, plan, explain } = planned;
    if let Some(error) = quarantined(state, request) {
        return Err(error);
    }
    let mut picking = Picking {
        state,
        request,
        routing_request,
        snapshot,
        explain: *explain || account.is_traced(),
        account,
        attempts: Attempts::default(),
        planned: plan.planned,
    };
    let order = state.settings.split(&request.model).retry_policy.order;
    let (leg, answering, prefill) = match (plan.shape, order) {
        (Shape::Aggregated, _) => (Leg::Aggregated, picking.route(Leg::Aggregated, None).await?, None),
        (Shape::Remote, LegOrder::PrefillFirst) => {
            let prefill = picking.route(Leg::Prefill, None).await?;
            (Leg::Decode, picking.route(Leg::Decode, Some(&prefill.candidate)).await?, Some(prefill))
        }
        (Shape::Remote, LegOrder::DecodeFirst) => {
            let decode = picking.route(Leg::Decode, None).await?;
            let prefill = picking.route(Leg::Prefill, Some(&decode.candidate)).await?;
            (Leg::Decode, decode, Some(prefill))
        }
    };
    Ok(picking.finish(leg, answering, prefill))
}

impl Picking<'_> {
    /// Chooses and books the worker of a leg. Waits in the queue when every eligible one is busy. `other` is
    /// the worker of the other leg.
    async fn route(&mut self, leg: Leg, other: Option<&Candidate>) -> Result<PickedWorker, ApiError> {
        let (state, request, routing_request) = (self.state, self.request, self.routing_request);
        let busy_status = state.settings.busy_status;
        let mut place: Option<Queued> = None;
        loop {
            let parking = parking(state, request, routing_request, self.account, leg);
            let entered = match self.attempts.enter(leg, place.take(), &parking) {
                Entry::Route(entered) => entered,
                Entry::Wait => {
                    place = self.wait(leg).await?;
                    continue;
                }
                Entry::Refused => {
                    return Err(ApiError::queue_full(busy_status, &state.queue.pressure(&request.model)));
                }
            };
            let (mut refused, begun) = (None, Instant::now());
            let routed = self.ask(leg, other, &mut refused);
            self.account.refused(refused);
            let error = match routed {
                Ok(routed) => {
                    if let Some(admission) = self.attempts.found(entered.as_ref()) {
                        self.account.admitted(admission);
                    }
                    self.account.decided(routed.receipt, routing_request);
                    return Ok(PickedWorker { candidate: routed.candidate, booking: Some(routed.booking) });
                }
                Err(error) => error,
            };
            match self.attempts.after_refusal(leg, &error, entered, &parking) {
                AfterRefusal::Wait => place = self.wait(leg).await?,
                AfterRefusal::RouteAgain => {}
                AfterRefusal::GiveUp => {
                    let error =
                        ApiError::of_refusal(error, busy_status, || state.queue.pressure(&request.model));
                    self.account.not_routed(leg, begun, error.code());
                    return Err(error);
                }
            }
        }
    }

    fn ask(
        &self,
        leg: Leg,
        other: Option<&Candidate>,
        refused: &mut Option<pointsman_routing::RefusedDecision>,
    ) -> Result<Routed, pointsman_routing::RouteError> {
        let question = plan::question(self.state, self.request, self.routing_request, self.snapshot, leg);
        let query = Query {
            explain: self.explain,
            other_leg: other.map(id_of),
            pairing: Pairing { is_first: leg == Leg::Decode && other.is_none(), ..question.pairing },
            queue_us: u32::try_from(self.attempts.queued().as_micros()).unwrap_or(u32::MAX),
            planned: self.planned.filter(|_| leg == Leg::Aggregated),
            request_id: Some(&self.account.request_id),
            ..question
        };
        let router = &self.state.router;
        let (over, fallback) = match leg {
            Leg::Decode => router.decode_config(&query, Purpose::Route),
            Leg::Prefill | Leg::Aggregated => (RouterConfigOverride::default(), None),
        };
        let metrics = &self.state.metrics;
        fallback.into_iter().for_each(|reason| metrics.fell_back(SlotKind::DecodeOverride, reason));
        router.route_noting(&query, &over, refused)
    }

    /// Waits for the leg's turn. Returns the place in the queue that the request has.
    async fn wait(&mut self, leg: Leg) -> Result<Option<Queued>, ApiError> {
        self.account.waits("queue", leg);
        let deadline = self.account.started() + self.state.settings.request_timeout;
        if let Some(waiting) = self.attempts.waiting() {
            let over = tokio::time::timeout_at(deadline, waiting.over()).await;
            over.map_err(|_| ApiError::Deadline)?;
        }
        Ok(self.attempts.resume().and_then(|(_, place)| place))
    }

    /// Writes what the answering worker gets. The ranks of a pair are left to the engines: both get the same
    /// headers and body.
    fn finish(self, leg: Leg, answering: PickedWorker, prefill: Option<PickedWorker>) -> PickedWorkers {
        let Self { state, request, account, attempts, .. } = self;
        if !attempts.queued().is_zero() {
            state.metrics.queue_wait.observe(attempts.queued().as_secs_f64());
        }
        let to = target(&answering.candidate);
        let context = LegContext {
            token: RequestToken::fresh(),
            prefill: None,
            decode: prefill.is_none().then_some(to),
            engine_id: None,
            rooms: &[],
            handoff: None,
        };
        let mut headers = leg_headers(&context, to, request.authorization.as_ref());
        headers.retain(|(name, _)| prefill.is_none() || name != RANK);
        let span = Span::fresh();
        headers.extend(account.trace_context(request).headers(span, Links::default()));
        let links = Links::default();
        account.leg_sent(span, LegTarget { leg, candidate: &answering.candidate, attempt: 0, links });
        let body = single_body(request, connector_for(to.spec), &context);
        PickedWorkers { leg, answering, prefill, headers, body }
    }
}

/// The header by which vLLM takes the data-parallel rank.
const RANK: &str = "x-data-parallel-rank";

/// Headers of clients that engines, or the sidecars before them, would obey. The body goes on decoded.
const OBEYED: [HeaderName; 17] = [
    header::CONTENT_ENCODING,
    header::AUTHORIZATION,
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static(RANK),
    HeaderName::from_static("x-data-parallel-host-port"),
    HeaderName::from_static("x-prefiller-host-port"),
    HeaderName::from_static("x-prefiller-url"),
    HeaderName::from_static("x-encoder-hosts-ports"),
    HeaderName::from_static("x-override-rid"),
    HeaderName::from_static("x-override-bootstrap-host"),
    HeaderName::from_static("x-override-bootstrap-port"),
    HeaderName::from_static("x-override-bootstrap-room"),
    HeaderName::from_static("x-override-routed-dp-rank"),
    HeaderName::from_static("x-override-disagg-prefill-dp-rank"),
    HeaderName::from_static("x-smg-routing-key"),
    HeaderName::from_static("x-gateway-destination-endpoint-subset"),
    HeaderName::from_static("x-gateway-destination-endpoint-served"),
];

/// Returns the headers of a client that are removed from a request, which sets `set` itself.
pub(crate) fn removed_headers(set: &[(HeaderName, HeaderValue)]) -> Vec<HeaderName> {
    OBEYED.into_iter().filter(|name| set.iter().all(|(other, _)| other != name)).collect()
}
