//! SGLang's own endpoints, as in version 0.5.23: `/server_info`, `/model_info`, `/v1/loads` and
//! `/pd_role_switch`.

use std::sync::Arc;

use axum::{Extension, body::Bytes, extract::State, http::StatusCode, response::Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    json as json_response,
    probe::{faulty, ok},
    refuse,
};
use crate::{
    config::{Role, SimConfig},
    engine::{Engine, unix_now},
    failure::Failure,
    faults::FaultLeg,
    server::Conn,
};

/// Handles `/server_info`: returns the start arguments, which a switch of roles does not change, and the
/// state.
pub(super) async fn server_info(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Facts, &conn).await {
        return response;
    }
    let config = &engine.config;
    let bootstrap_port = match (engine.advertised.1, config.bootstrap_port) {
        (0, 0) => SimConfig::DEFAULT_BOOTSTRAP_PORT,
        (0, port) | (port, _) => port,
    };
    let kv_events = engine.kv_port.map(|port| {
        json!({
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": port,
            "topic": config.kv_events_topic,
            "block_size": config.block_size,
            "dp_size": config.dp_size,
        })
    });
    ok(&json!({
        "model_path": config.model,
        "served_model_name": config.model,
        "context_length": config.max_model_len,
        "tp_size": 1,
        "dp_size": config.dp_size,
        "page_size": config.block_size,
        "disaggregation_mode": mode(config.role),
        "disaggregation_bootstrap_port": bootstrap_port,
        "enable_pd_role_switch": config.role_switch,
        // Start arguments that were not given. The state below contains their resulting values.
        "max_running_requests": null,
        "max_total_tokens": null,
        "max_total_num_tokens": capacity(&engine),
        "max_req_input_len": config.max_model_len,
        "disable_radix_cache": !config.prefix_caching,
        "kv_events": kv_events,
        "status": "ready",
        "internal_states": [{"effective_max_running_requests_per_dp": config.max_num_seqs}],
        "version": config.version(),
    }))
}

/// Handles `/model_info`, which contains the current role.
pub(super) async fn model_info(
    State(engine): State<Arc<Engine>>,
    Extension(conn): Extension<Conn>,
) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Facts, &conn).await {
        return response;
    }
    let model = &engine.config.model;
    ok(&json!({
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": model,
        "is_generation": true,
        "weight_version": "default",
        "disaggregation_mode": mode(engine.role()),
    }))
}

/// Handles `/v1/loads`.
pub(super) async fn loads(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Probe, &conn).await {
        return response;
    }
    let (config, state) = (&engine.config, engine.state());
    let used = u64::from(state.used_blocks) * u64::from(config.block_size);
    let usage = f64::from(state.used_blocks) / f64::from(config.blocks);
    let load = json!({
        "timestamp": unix_now(),
        "dp_rank": 0,
        "num_running_reqs": state.running,
        "num_waiting_reqs": state.waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "max_total_num_tokens": capacity(&engine),
        "max_running_requests": config.max_num_seqs,
        "token_usage": usage,
    });
    ok(&json!({
        "timestamp": "2026-11-26T00:00:00+00:00",
        "version": config.version(),
        "accelerator": null,
        "num_accelerators": 1,
        "loads": [load],
    }))
}

#[derive(Deserialize)]
struct RoleSwitch {
    #[serde(default)]
    new_role: String,
}

/// Handles `/pd_role_switch`: an idle engine of a pair takes the other role.
pub(super) async fn role_switch(State(engine): State<Arc<Engine>>, bytes: Bytes) -> Response {
    let RoleSwitch { new_role } = match serde_json::from_slice(&bytes) {
        Ok(asked) => asked,
        Err(error) => return refuse(&engine, &Failure::bad(format!("pd_role_switch: {error}"))),
    };
    let old_role = mode(engine.role());
    let wanted = match new_role.as_str() {
        "prefill" => Ok(Role::Prefill),
        "decode" => Ok(Role::Decode),
        _ => Err(format!("invalid new_role={new_role:?}")),
    };
    let refused = if !engine.config.role_switch {
        Some("--enable-pd-role-switch is not set on this server".to_owned())
    } else if engine.role() == Role::Aggregated {
        Some("instance is not running in PD disaggregation mode".to_owned())
    } else if !engine.is_idle() {
        Some("instance is not idle; drain all requests before switching".to_owned())
    } else {
        wanted.as_ref().err().cloned()
    };
    if let (None, Ok(role)) = (&refused, wanted) {
        engine.set_role(role);
    }
    let status = if refused.is_none() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    let body = json!({
        "success": refused.is_none(),
        "message": refused.as_deref().unwrap_or("ok"),
        "old_role": old_role,
        "new_role": new_role,
        "safe_to_restore": refused.is_some(),
    });
    json_response(status, body.to_string())
}

fn mode(role: Role) -> Value {
    json!(if role == Role::Aggregated { "null" } else { role.as_str() })
}

fn capacity(engine: &Engine) -> u64 {
    u64::from(engine.config.blocks) * u64::from(engine.config.block_size)
}
