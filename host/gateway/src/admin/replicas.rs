//! `GET /replicas`: the exchange with other gateways.

use std::sync::Arc;

use axum::{Json, extract::State as Extract};
use serde_json::Value;

use crate::{big_numbers::with_texts, state::State};

/// `GET /replicas`.
pub(super) async fn get(Extract(state): Extract<Arc<State>>) -> Json<Value> {
    Json(with_texts(state.replicas.describe()))
}
