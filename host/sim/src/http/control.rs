//! SGLang's abort endpoint, vLLM's endpoints of the sleep mode, and the model's own endpoints `/sim/state`,
//! `/sim/faults`, `/sim/requests` and `/sim/disconnects`.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde::Deserialize;

use super::refuse;
use crate::{
    engine::{Disconnect, Engine, Recorded, SimState},
    failure::Failure,
    faults::Fault,
};

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Abort {
    rid: String,
    abort_all: bool,
}

/// Responds with 200 even if nothing was aborted, as the engine does.
pub(super) async fn abort(State(engine): State<Arc<Engine>>, bytes: Bytes) -> Response {
    match serde_json::from_slice::<Abort>(&bytes) {
        Ok(abort) => {
            let count = engine.aborts.abort(&abort.rid, abort.abort_all);
            tracing::debug!(rid = %abort.rid, count, "abort");
            StatusCode::OK.into_response()
        }
        Err(error) => refuse(&engine, &Failure::bad(format!("abort_request: {error}"))),
    }
}

/// Handles vLLM's `POST /sleep`: new requests wait, and `/health` stays 200.
pub(super) async fn sleep(State(engine): State<Arc<Engine>>) -> StatusCode {
    engine.set_asleep(true);
    StatusCode::OK
}

/// Handles vLLM's `POST /wake_up`.
pub(super) async fn wake_up(State(engine): State<Arc<Engine>>) -> StatusCode {
    engine.set_asleep(false);
    StatusCode::OK
}

/// Handles vLLM's `GET /is_sleeping`.
pub(super) async fn is_sleeping(State(engine): State<Arc<Engine>>) -> Json<serde_json::Value> {
    Json(serde_json::json!({ "is_sleeping": engine.is_asleep() }))
}

pub(super) async fn state(State(engine): State<Arc<Engine>>) -> Json<SimState> {
    Json(engine.state())
}

pub(super) async fn requests(State(engine): State<Arc<Engine>>) -> Json<Vec<Recorded>> {
    Json(engine.recorded())
}

pub(super) async fn disconnects(State(engine): State<Arc<Engine>>) -> Json<Vec<Disconnect>> {
    Json(engine.counters.disconnect_log())
}

pub(super) async fn faults(State(engine): State<Arc<Engine>>) -> Json<Vec<Fault>> {
    Json(engine.faults.list())
}

/// Replaces the active faults by the array in the body; `[]` removes all.
pub(super) async fn set_faults(State(engine): State<Arc<Engine>>, bytes: Bytes) -> Response {
    let faults = match serde_json::from_slice::<Vec<Fault>>(&bytes) {
        Ok(faults) => faults,
        Err(error) => return refuse(&engine, &Failure::bad(format!("faults: {error}"))),
    };
    if let Some(problem) = faults.iter().find_map(Fault::problem) {
        return refuse(&engine, &Failure::bad(problem));
    }
    engine.faults.replace(faults);
    Json(engine.faults.list()).into_response()
}
