//! `GET /v1/realtime`: a WebSocket between a client and a worker, relayed byte for byte in both directions.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    body::Body,
    extract::{Query, State as Extract},
    http::{
        HeaderMap, HeaderName, HeaderValue, Request as HttpRequest, Response, StatusCode, Uri, header,
        request::Parts,
    },
};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use pointsman_routing::Purpose;
use tokio_util::sync::CancellationToken;

use super::{
    DataThread,
    admit::check_rate,
    arrival::Arrival,
    auth::authorize_client,
    credentials::client_key,
    find_model::find_model,
    prepare::only_model,
    request_id,
    tunnel::{Ended, Patience, tunnel},
    worker_wait::wait_for_worker,
};
use crate::{
    budget::Share,
    openai::{
        client_key::API_KEY,
        error::ApiError,
        request::{Endpoint, Request},
    },
    orchestrate::{self, PlannedRequest, realtime::Session},
    state::{State, caller::Tenant},
    telemetry::account::Account,
    tokenization::routing_request::TenantLoad,
    upstream::{UpgradedCall, Upstream},
};

/// Headers of the upgrade that reach the engine: the two ends agree on them.
const REQUEST_HEADERS: [HeaderName; 4] = [
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_VERSION,
    header::SEC_WEBSOCKET_PROTOCOL,
    header::SEC_WEBSOCKET_EXTENSIONS,
];
/// Headers of the engine's answer that reach the client.
const ANSWER_HEADERS: [HeaderName; 3] =
    [header::SEC_WEBSOCKET_ACCEPT, header::SEC_WEBSOCKET_PROTOCOL, header::SEC_WEBSOCKET_EXTENSIONS];

/// Begins the subprotocol in which browsers send their key, because they cannot set a header.
const KEY_PROTOCOL: &str = "openai-insecure-api-key.";
/// The subprotocol of the sessions.
const PROTOCOL: HeaderValue = HeaderValue::from_static("realtime");

/// A session that may be opened.
struct Admitted {
    planned: Box<PlannedRequest>,
    /// Path and query of the call to an engine, and its headers.
    call: (String, HeaderMap),
    /// The answer's subprotocol if the engine names none: browsers give up without one of those they offer.
    protocol: Option<HeaderValue>,
    place: Share,
}

pub(super) async fn serve(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let client = Arrival::of(request.extensions()).client;
    client.iter().for_each(|client| client.set_answering(true));
    let response = open(thread, request).await;
    client.iter().for_each(|client| client.set_answering(false));
    response
}

/// Opens a session, or says why it is not opened.
async fn open(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let (state, mut upstream) = thread.context();
    let (mut parts, _) = request.into_parts();
    let started = Arrival::of(&parts.extensions).first_byte;
    let id = request_id(&parts.headers);
    let mut account = Account::new(state.metrics.clone(), id, Endpoint::Realtime, started);
    if let Some(traces) = &state.traces {
        account.traced(traces.begin(&parts.headers, state.settings.request_rules.trust, started));
    }
    let upgrade = parts.extensions.remove::<OnUpgrade>();
    let page = thread.check_page(&parts.headers, &parts.uri);
    let Admitted { planned, call, protocol, place } =
        match admit((&state, &mut upstream), (&parts, page), upgrade.is_some(), &mut account).await {
            Ok(admitted) => admitted,
            Err(error) => return refuse(&mut account, &error),
        };
    let mut session = Session::new(state.clone(), upstream, planned, call, account);
    match session.open().await {
        Ok(engine) => {
            session.account().relay_begins();
            let mut response = switch(&engine.headers, protocol);
            session.add_own_headers(response.headers_mut());
            if let Some(upgrade) = upgrade {
                let tracker = state.tracker.clone();
                tracker.spawn(relay(state, upgrade, engine, session, place));
            }
            response
        }
        Err(error) => refuse(session.account(), &error),
    }
}

/// Answers with an error and records it.
fn refuse(account: &mut Account, error: &ApiError) -> Response<Body> {
    account.ended(error.status().as_u16(), error.code());
    let mut response = error.response(&account.request_id).map(Body::from);
    if matches!(error, ApiError::UpgradeRequired(_)) {
        response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    response
}

async fn admit(
    (state, upstream): (&State, &mut Upstream),
    (request, page): (&Parts, Result<(), ApiError>),
    upgradable: bool,
    account: &mut Account,
) -> Result<Admitted, ApiError> {
    if state.draining.is_cancelled() {
        return Err(ApiError::Draining);
    }
    upstream.set_via_from(&request.headers)?;
    let (headers, protocol) = without_key_protocol(&request.headers);
    let headers = &headers;
    let caller = authorize_client(state, headers, &Arrival::of(&request.extensions).sender).await?;
    // A page that has a key may call. A certificate is the browser's, whichever page calls.
    if !state.settings.clients_are_known || client_key(headers)?.is_none() {
        page?;
    }
    account.counts_for(state.tenant_metrics.of(caller.tenant_name()));
    check_rate(state, &caller)?;
    if !upgradable || !asks_for_websocket(headers) {
        let problem = "opening a realtime session: no WebSocket upgrade was asked for; send `connection: upgrade`, \
                       `upgrade: websocket` and `sec-websocket-key`";
        return Err(ApiError::UpgradeRequired(problem.to_owned()));
    }
    let limit = state.realtime.limit();
    let place = state.realtime.reserve(1).ok_or(ApiError::TooManyConnections(limit))?;
    let (model, headers) = named(state, &request.uri, headers)?;
    let rules = &state.settings.request_rules;
    let mut parsed = Request::without_body(Endpoint::Realtime, &headers, &model, rules)?;
    find_model(state, &mut parsed).await;
    account.set_model(&parsed.model, &state.registry.snapshot());
    // Held by the account until the session ends. Its messages are not counted in tokens.
    if let Some(limits) = &state.tenant_limits {
        account.reserve(limits, caller.tenant_hash(), &parsed.model, &state.registry.snapshot())?;
    }
    // When the client leaves, this future is dropped.
    let (for_worker, gone) = ((&mut parsed, caller.tenant_hash(), false), CancellationToken::new());
    let worker_wait = wait_for_worker(state, for_worker, account, &gone).await?;
    let tenant = caller.tenant.map(|Tenant { hash, .. }| {
        account.of_tenant(state.tenants.enter(hash));
        TenantLoad { hash, active_requests: state.tenants.active(hash) }
    });
    let (snapshot, planning) = (state.registry.snapshot(), account.stage_begins());
    let routing_request = state.routing_request((&parsed, &snapshot), None, tenant);
    account.of_request(&parsed);
    account.logging(state.decision_log.as_ref(), &routing_request);
    account.records(state.router.decisions(), &state.learning, &state.decision_stats, None);
    let plan = orchestrate::plan(state, &parsed, &routing_request, &snapshot, Purpose::Route, None)?;
    account.planned(planning);
    let path = request.uri.path_and_query().map_or(Endpoint::Realtime.path(), |path| path.as_str());
    let call = (path.to_owned(), upgrade_headers(&headers));
    let explain = state.settings.tell_decisions && headers.contains_key(orchestrate::DECISION);
    let planned = PlannedRequest { request: parsed, routing_request, snapshot, plan, worker_wait, explain };
    Ok(Admitted { planned: Box::new(planned), call, protocol, place })
}

/// Moves the key of a browser from the subprotocols to a header of its own, so that no engine gets it. Also
/// returns the subprotocol of the sessions if the client offers it.
fn without_key_protocol(given: &HeaderMap) -> (HeaderMap, Option<HeaderValue>) {
    let mut headers = given.clone();
    let lines = || given.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter().map(HeaderValue::to_str);
    let offered = lines().flatten().flat_map(|list| list.split(',').map(str::trim));
    let (keys, others): (Vec<&str>, Vec<&str>) = offered.partition(|name| name.starts_with(KEY_PROTOCOL));
    let protocol = others.contains(&"realtime").then_some(PROTOCOL);
    // A line that is not text may have a key, too.
    if keys.is_empty() && lines().all(|line| line.is_ok()) {
        return (headers, protocol);
    }
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if let Some(others) = (!others.is_empty()).then(|| HeaderValue::try_from(others.join(", "))) {
        headers.extend(others.ok().map(|others| (header::SEC_WEBSOCKET_PROTOCOL, others)));
    }
    for key in keys.into_iter().filter_map(|key| key.strip_prefix(KEY_PROTOCOL)) {
        if let Ok(key) = HeaderValue::try_from(key) {
            headers.append(API_KEY, key);
        }
    }
    (headers, protocol)
}

/// The model that the query string names, or the only one, and the headers with the session that it may name.
fn named(state: &State, uri: &Uri, headers: &HeaderMap) -> Result<(String, HeaderMap), ApiError> {
    let query = Query::<BTreeMap<String, String>>::try_from_uri(uri);
    let Query(mut query) =
        query.map_err(|error| ApiError::InvalidRequest(format!("query string: {error}")))?;
    let model = query.remove("model").filter(|model| !model.is_empty());
    let model = model.map_or_else(|| only_model(state, &state.registry.snapshot()), Ok)?;
    let mut headers = headers.clone();
    // The client's key stays here.
    headers.remove(header::AUTHORIZATION);
    headers.remove(API_KEY);
    let session = query.remove("session_id").and_then(|session| HeaderValue::try_from(session).ok());
    if let Some(session) = session.filter(|_| !headers.contains_key("x-session-id")) {
        headers.insert("x-session-id", session);
    }
    Ok((model, headers))
}

pub(super) fn asks_for_websocket(headers: &HeaderMap) -> bool {
    let lists = headers.get_all(header::UPGRADE).iter();
    let mut protocols = lists.flat_map(|list| list.as_bytes().split(|byte| *byte == b','));
    protocols.any(|name| name.trim_ascii().eq_ignore_ascii_case(b"websocket"))
        && headers.contains_key(header::SEC_WEBSOCKET_KEY)
}

/// The headers of the call to an engine. The client's key and other headers stay here.
fn upgrade_headers(given: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    for name in REQUEST_HEADERS {
        for value in given.get_all(&name) {
            headers.append(name.clone(), value.clone());
        }
    }
    headers
}

/// The answer that changes the protocol.
fn switch(answered: &HeaderMap, protocol: Option<HeaderValue>) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.extend(protocol.map(|protocol| (header::SEC_WEBSOCKET_PROTOCOL, protocol)));
    for name in ANSWER_HEADERS {
        if let Some(value) = answered.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    response
}

/// Relays until one end closes, nothing is sent for too long, or the gateway stops.
async fn relay(
    state: Arc<State>,
    upgrade: OnUpgrade,
    engine: UpgradedCall,
    mut session: Session,
    place: Share,
) {
    let Ok(client) = upgrade.await else {
        session.account().ended(499, "client_closed");
        return session.end(false);
    };
    let settings = &state.settings;
    let patience = Patience { idle: settings.realtime_idle_timeout, write: settings.client_write_timeout };
    let (ended, bytes) = tunnel(TokioIo::new(client), engine.io, patience, state.drain_end.passed()).await;
    state.metrics.relayed_bytes.inc_by(bytes);
    let account = session.account();
    account.ended(101, ended.code());
    tracing::debug!(request = account.request_id, bytes, code = ended.code(), "realtime session ended");
    drop(place);
    session.end(ended == Ended::EngineSlow);
}
