//! `/metrics`: the engine's metrics that a gateway reads, and the model's own metrics with the prefix `sim_`.

use std::{fmt::Write as _, sync::Arc};

use axum::{
    Extension,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};

use super::probe::faulty;
use crate::{
    config::{Dialect, Role},
    engine::{Engine, SimState},
    faults::FaultLeg,
    server::Conn,
};

/// Builds the Prometheus text, with HELP and TYPE for each family.
struct Exposition(String);

pub(super) async fn metrics(State(engine): State<Arc<Engine>>, Extension(conn): Extension<Conn>) -> Response {
    if let Some(response) = faulty(&engine, FaultLeg::Probe, &conn).await {
        return response;
    }
    let state = engine.state();
    let mut out = Exposition(String::new());
    match engine.config.dialect {
        Dialect::Vllm => vllm(&engine, &state, &mut out),
        Dialect::Sglang => sglang(&engine, &state, &mut out),
        Dialect::Openai => {}
    }
    add_own_metrics(&engine, &state, &mut out);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], out.0).into_response()
}

fn vllm(engine: &Engine, state: &SimState, out: &mut Exposition) {
    let config = &engine.config;
    let labels = format!(r#"{{engine="0",model_name="{}"}}"#, config.model);
    let usage = f64::from(state.used_blocks) / f64::from(config.blocks);
    let gauges = [
        ("num_requests_running", "Number of requests in model execution batches.", f64::from(state.running)),
        ("num_requests_waiting", "Number of requests waiting to be processed.", f64::from(state.waiting)),
        ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
    ];
    for (name, help, value) in gauges {
        out.family(&format!("vllm:{name}"), "gauge", help);
        out.float(&format!("vllm:{name}{labels}"), value);
    }
    out.family("vllm:engine_sleep_state", "gauge", "Engine sleep state; awake = 0 means engine is sleeping.");
    let awake = u8::from(!engine.is_asleep());
    for (name, value) in [("awake", awake), ("weights_offloaded", 1 - awake), ("discard_all", 0)] {
        let _ = writeln!(
            out.0,
            r#"vllm:engine_sleep_state{{engine="0",model_name="{}",sleep_state="{name}"}} {value}.0"#,
            config.model
        );
    }
    let counters = [
        ("prompt_tokens", "Number of prefill tokens processed.", state.prefix_queries),
        ("generation_tokens", "Number of generation tokens processed.", state.generated_tokens),
    ];
    for (name, help, value) in counters {
        out.family(&format!("vllm:{name}"), "counter", help);
        let _ = writeln!(out.0, "vllm:{name}_total{labels} {value}.0");
    }
    out.family(
        "process_start_time_seconds",
        "gauge",
        "Start time of the process since unix epoch in seconds.",
    );
    let _ = writeln!(out.0, "process_start_time_seconds {}", engine.started_unix);
    let counters = [
        ("queries", "Prefix cache queries, in terms of number of queried tokens.", state.prefix_queries),
        ("hits", "Prefix cache hits, in terms of number of cached tokens.", state.prefix_hits),
    ];
    for (name, help, value) in counters {
        out.family(&format!("vllm:prefix_cache_{name}_total"), "counter", help);
        let _ = writeln!(out.0, "vllm:prefix_cache_{name}_total{labels} {value}.0");
    }
    out.family("vllm:num_preemptions", "counter", "Cumulative number of preemption from the engine.");
    let _ = writeln!(out.0, "vllm:num_preemptions_total{labels} {}.0", state.preemptions);
    out.family("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
    let prefix_caching = if config.prefix_caching { "True" } else { "False" };
    for rank in 0..config.dp_size {
        let _ = writeln!(
            out.0,
            r#"vllm:cache_config_info{{block_size="{}",cache_dtype="auto",enable_prefix_caching="{prefix_caching}",engine="{rank}",num_gpu_blocks="{}"}} 1.0"#,
            config.block_size, config.blocks
        );
    }
    latencies(engine, "vllm", labels.trim_matches(['{', '}']), out);
    if config.role != Role::Aggregated {
        // With the NIXL connector, vLLM exports these metrics from the start.
        out.family("vllm:nixl_num_failed_transfers", "counter", "Number of failed NIXL KV Cache transfers.");
        let _ = writeln!(out.0, "vllm:nixl_num_failed_transfers_total{labels} 0.0");
    }
}

fn sglang(engine: &Engine, state: &SimState, out: &mut Exposition) {
    let config = &engine.config;
    let engine_type = match config.role {
        _ if config.role_switch => "dynamic",
        Role::Aggregated => "unified",
        role => role.as_str(),
    };
    let labels = format!(r#"{{engine_type="{engine_type}",model_name="{}",tp_rank="0"}}"#, config.model);
    let usage = f64::from(state.used_blocks) / f64::from(config.blocks);
    let hits = ratio(state.prefix_hits, state.prefix_queries);
    let gauges = [
        ("num_running_reqs", "The number of running requests.", f64::from(state.running)),
        ("num_queue_reqs", "The number of requests in the waiting queue.", f64::from(state.waiting)),
        ("num_used_tokens", "The number of used tokens.", f64::from(state.used_blocks * config.block_size)),
        ("token_usage", "The token usage.", usage),
        ("cache_hit_rate", "The prefix cache hit rate.", hits),
    ];
    for (name, help, value) in gauges {
        out.family(&format!("sglang:{name}"), "gauge", help);
        out.float(&format!("sglang:{name}{labels}"), value);
    }
    latencies(engine, "sglang", labels.trim_matches(['{', '}']), out);
}

/// Adds the histograms of the time to first token and of the inter-token latency, with one bucket.
fn latencies(engine: &Engine, prefix: &str, labels: &str, out: &mut Exposition) {
    let names = ["time_to_first_token_seconds", "inter_token_latency_seconds"];
    for (name, (count, sum)) in names.into_iter().zip(engine.counters.latencies()) {
        let name = format!("{prefix}:{name}");
        out.family(&name, "histogram", "Histogram of latencies in seconds.");
        let _ = writeln!(out.0, r#"{name}_bucket{{{labels},le="+Inf"}} {count}.0"#);
        out.float(&format!("{name}_sum{{{labels}}}"), sum.as_secs_f64());
        let _ = writeln!(out.0, "{name}_count{{{labels}}} {count}.0");
    }
}

fn add_own_metrics(engine: &Engine, state: &SimState, out: &mut Exposition) {
    out.family("sim_handoffs_total", "counter", "Handoffs by result, as this engine saw them.");
    for (result, count) in state.handoffs.labelled() {
        let _ = writeln!(out.0, r#"sim_handoffs_total{{result="{result}"}} {count}"#);
    }
    out.family("sim_requests_total", "counter", "Requests by leg and outcome.");
    for (leg, outcome, count) in engine.counters.by_outcome() {
        let _ = writeln!(out.0, r#"sim_requests_total{{leg="{leg}",outcome="{outcome}"}} {count}"#);
    }
    let rest = [
        ("sim_stranded_total", "counter", "Handoffs that no decode request consumed.", state.stranded),
        ("sim_pinned_blocks", "gauge", "Blocks pinned for a handoff.", u64::from(state.pinned_blocks)),
        ("sim_duplicate_rooms_total", "counter", "Bootstrap rooms used twice.", state.duplicate_rooms),
        ("sim_aborted_total", "counter", "Requests aborted by id.", state.aborted),
        ("sim_client_disconnects_total", "counter", "Requests whose client left.", state.client_disconnects),
        ("sim_generated_tokens_total", "counter", "Tokens generated.", state.generated_tokens),
    ];
    for (name, kind, help, value) in rest {
        out.family(name, kind, help);
        let _ = writeln!(out.0, "{name} {value}");
    }
}

impl Exposition {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Formats floats with a decimal point, as the engines do.
    fn float(&mut self, name: &str, value: f64) {
        let _ = writeln!(self.0, "{name} {value:?}");
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    // The conversion is exact up to 2^53 tokens.
    #[expect(clippy::cast_precision_loss, reason = "a share for a gauge")]
    let share = part as f64 / whole as f64;
    share
}
