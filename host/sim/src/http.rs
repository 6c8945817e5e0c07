//! HTTP endpoints of an engine. `engine` executes requests; `wire` formats the bytes of responses.

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderValue, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};

use tower::ServiceExt as _;

use crate::{api::Api, config::Dialect, engine::Engine, failure::Failure, wire::Shape};

mod answer;
mod audio;
mod call;
mod control;
mod embed;
mod generate;
mod metrics;
mod pooling;
mod probe;
mod realtime;
mod sglang;
mod stored;

/// Maximum size of a body in bytes: more than a prompt of 128k tokens needs.
const MAX_BODY: usize = 64 << 20;

/// Returns the routes of an engine's dialect.
pub(crate) fn router(engine: &Arc<Engine>) -> Router {
    let engine_routes = Router::new()
        .route("/v1/chat/completions", post(|call| generate::serve(call, Api::Chat)))
        .route("/v1/completions", post(|call| generate::serve(call, Api::Completions)))
        .route("/v1/embeddings", post(embed::embeddings))
        .route("/v1/rerank", post(pooling::rerank))
        .route("/v1/score", post(pooling::score))
        .route("/v1/audio/transcriptions", post(audio::transcriptions))
        .route("/v1/audio/translations", post(audio::transcriptions))
        .route("/v1/realtime", get(realtime::realtime))
        .route("/v1/models", get(probe::models))
        .route("/health", get(probe::health))
        .route("/metrics", get(metrics::metrics));
    let engine_routes = match engine.config.dialect {
        Dialect::Vllm => named(engine_routes)
            .route("/version", get(probe::version))
            .route("/sleep", post(control::sleep))
            .route("/wake_up", post(control::wake_up))
            .route("/is_sleeping", get(control::is_sleeping))
            .route("/tokenize", post(probe::tokenize))
            .route("/detokenize", post(probe::detokenize))
            .route("/rerank", post(pooling::rerank))
            .route("/v2/rerank", post(pooling::rerank))
            .route("/score", post(pooling::score))
            .route("/pooling", post(pooling::pooled))
            .route("/classify", post(pooling::pooled))
            .route("/v1/audio/speech", post(audio::speech))
            .route("/v1/images/generations", post(pooling::images)),
        Dialect::Sglang => named(engine_routes)
            .route("/generate", post(|call| generate::serve(call, Api::Generate)))
            .route("/classify", post(pooling::pooled))
            .route("/v1/classify", post(pooling::pooled))
            .route("/server_info", get(sglang::server_info))
            .route("/get_server_info", get(sglang::server_info))
            .route("/model_info", get(sglang::model_info))
            .route("/v1/loads", get(sglang::loads))
            .route("/pd_role_switch", post(sglang::role_switch))
            .route("/ready", get(probe::ready))
            .route("/abort_request", post(control::abort)),
        Dialect::Openai => engine_routes,
    };
    let engine_routes = match engine.config.scale_out {
        true => engine_routes.route("/v1/chat/completions/render", post(probe::render)),
        false => engine_routes,
    };
    let alive = middleware::from_fn_with_state(Arc::clone(engine), alive);
    let routes = engine_routes
        .layer(alive)
        .route("/sim/state", get(control::state))
        .route("/sim/requests", get(control::requests))
        .route("/sim/disconnects", get(control::disconnects))
        .route("/sim/faults", get(control::faults).post(control::set_faults))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Arc::clone(engine));
    if !engine.config.any_prefix {
        return routes.fallback(not_found);
    }
    let below = routes.clone().fallback(not_found);
    routes.fallback(move |request: Request| below.clone().oneshot(without_prefix(request)))
}

/// Adds the Responses and Messages APIs.
fn named(routes: Router<Arc<Engine>>) -> Router<Arc<Engine>> {
    routes
        .route("/v1/responses", post(|call| generate::serve(call, Api::Responses)))
        .route("/v1/responses/{id}", get(stored::read).delete(stored::delete))
        .route("/v1/responses/{id}/cancel", post(stored::cancel))
        .route("/v1/messages", post(|call| generate::serve(call, Api::Messages)))
        .route("/v1/messages/count_tokens", post(probe::count_tokens))
}

/// Removes the first segment of a request's path.
fn without_prefix(mut request: Request) -> Request {
    let whole = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let rest = whole.get(1..).and_then(|path| path.find('/')).and_then(|end| whole.get(end + 1..));
    if let Some(uri) = rest.and_then(|rest| Uri::try_from(rest).ok()) {
        *request.uri_mut() = uri;
    }
    request
}

/// Fails all requests to a stopped engine, except those to `/sim`.
async fn alive(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    if engine.is_dead() {
        return refuse(&engine, &Failure::engine_dead());
    }
    next.run(request).await
}

async fn not_found() -> Response {
    json(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#.to_owned())
}

/// Formats a failure as this engine does.
fn refuse(engine: &Engine, failure: &Failure) -> Response {
    refuse_as(engine.config.dialect.shape(), failure)
}

/// Formats a failure in the shape of an API.
fn refuse_as(shape: &dyn Shape, failure: &Failure) -> Response {
    let status = StatusCode::from_u16(failure.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, shape.error(failure));
    if let Some(seconds) = failure.retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

fn json(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
