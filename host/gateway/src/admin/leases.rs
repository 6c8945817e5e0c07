//! `PUT /workers/{id}`: workers that register themselves for a time. `/discovery`: where workers come from.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    extract::{Query, State as Extract, rejection::QueryRejection},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use pointsman_discovery::LeaseError;
use pointsman_workers::{WorkerId, WorkerSpec};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    audit::Detail,
    refuse::{PathId, invalid, refuse},
};
use crate::{big_numbers::with_texts, openai::short_text::shortened, state::State};

/// Time of a lease that asks for none.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// Body of a request for a lease.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseQuery {
    /// Duration of the lease, seconds.
    ttl: Option<u32>,
}

/// `GET /discovery`.
pub(super) async fn sources(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    Json(json!(state.fleet.status()))
}

/// Registers a worker, described as in the configuration, for `ttl` seconds. A request without a body renews
/// its lease.
pub(super) async fn put(
    Extract(state): Extract<Arc<State>>,
    PathId(id): PathId,
    headers: HeaderMap,
    query: Result<Query<LeaseQuery>, QueryRejection>,
    body: Bytes,
) -> Response {
    let ttl = match query {
        Ok(Query(LeaseQuery { ttl })) => ttl.map(|seconds| Duration::from_secs(seconds.into())),
        Err(error) => return invalid(&headers, &shortened(&error.body_text())),
    };
    let leased = if body.is_empty() {
        state.leases.renew(id, ttl).map(|()| format!("worker={id} renewed"))
    } else {
        match described(&body, id) {
            Ok(spec) => {
                let detail = format!("worker={id} role={} url={}", spec.role, spec.url);
                state.leases.put(spec, ttl.unwrap_or(DEFAULT_TTL)).map(|()| detail)
            }
            Err(problem) => return invalid(&headers, &problem),
        }
    };
    match leased {
        Ok(detail) => (Extension(Detail(detail)), Json(with_texts(json!({ "id": id })))).into_response(),
        Err(error) => {
            let (status, code) = match error {
                LeaseError::NoLease(_) => (StatusCode::NOT_FOUND, "worker_not_found"),
                LeaseError::Ttl { .. } | LeaseError::TooLarge(_) => {
                    (StatusCode::BAD_REQUEST, "invalid_request")
                }
                LeaseError::TooMany(_) | LeaseError::Refused(_) => (StatusCode::CONFLICT, "worker_conflict"),
            };
            refuse(&headers, status, code, &error.to_string())
        }
    }
}

/// Reads a description. Its id comes from the path.
fn described(body: &[u8], id: WorkerId) -> Result<WorkerSpec, String> {
    let mut spec: WorkerSpec = serde_json::from_slice(body).map_err(|error| shortened(&error.to_string()))?;
    // A description without an id has the hash of its URL.
    if spec.id != id && spec.id != WorkerId::of_url(&spec.url) {
        return Err(format!("the body describes worker {}, and the path names {id}: use one id", spec.id));
    }
    spec.id = id;
    Ok(spec)
}
