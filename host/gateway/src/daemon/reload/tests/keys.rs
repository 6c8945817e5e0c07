//! One row for every key of the configuration: what a reload does with it.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use tempfile::TempDir;
use tokio::sync::watch;
use toml::{Table, Value};

use super::schema::leaves;
use crate::{
    config::{
        Config, Environment,
        reload::{ConfigSource, Reloaded},
    },
    daemon::{build, reload::probe_config},
    state::{SharedState, State},
};

const KEY_A: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
const KEY_B: &str = "RWSqF2QrYDl6BYpvYYCHGhGxYHLAfFZuVvk4PyvMlYtPkEYV7RWYGqWK";

/// The configuration that every row starts from.
const BASE: &str = r#"
    [server]
    threads = 1
    [models.m.slots.prefill]
    [[workers]]
    id = 1
    url = "http://127.0.0.1:9"
    role = "prefill"
    engine = "vllm"
    models = ["tiny"]
    topology = { rack = "r1" }
"#;

/// Keys that only a restart changes, each with another value.
const STATIC: &[(&str, &str)] = &[
    ("server.listen", "'127.0.0.1:1'"),
    ("server.admin_listen", "'127.0.0.1:1'"),
    ("server.threads", "2"),
    ("server.tokenizer_threads", "3"),
    ("server.cors_origins", "['https://a.example']"),
    ("server.admin_insecure", "true"),
    ("routing.block_size", "32"),
    ("policies.dir", "'DIR'"),
    ("policies.deadline", "'3ms'"),
    ("policies.configure_deadline", "'60ms'"),
    ("policies.observe_deadline", "'30ms'"),
    ("policies.memory_bytes", "33554432"),
    ("policies.probation_calls", "7"),
    ("policies.probation_failure_share", "0.5"),
    ("policies.debounce", "'30ms'"),
    ("policies.rescan", "'7s'"),
    ("policies.compile_cache", "'DIR/cache'"),
    ("policies.compile_memory_bytes", "1073741824"),
    ("policies.compile_cpu", "'10s'"),
    ("index.byte_budget", "1048576"),
    ("index.ttl", "'7s'"),
    ("ext_proc.listen", "'127.0.0.1:1'"),
    ("ext_proc.max_streams", "7"),
    ("replicas.servers", "['nats://a:4222']"),
    ("replicas.fleet", "'b'"),
    ("replicas.name", "'b'"),
    ("replicas.interval", "'7ms'"),
    ("replicas.snapshot_interval", "'7s'"),
    ("replicas.lease", "'7s'"),
    ("replicas.token_file", "'DIR/t'"),
    ("replicas.nkey_file", "'DIR/n'"),
    ("replicas.credentials_file", "'DIR/c'"),
    ("discovery.max_workers", "7"),
    ("discovery.drain", "'7s'"),
    ("discovery.move", "true"),
    ("discovery.removal_share", "0.25"),
    ("discovery.removal_min", "7"),
    ("discovery.confirm_after", "'7s'"),
    ("discovery.max_lease", "'7s'"),
];

const FILE: &str = "discovery.files[].name = 'a'\ndiscovery.files[].path = 'a.yaml'";
const LLM_D: &str = "discovery.files[].name = 'a'\ndiscovery.files[].path = 'a.yaml'\n\
                     discovery.files[].format = 'llm-d'\n\
                     discovery.files[].defaults = { engine = 'vllm' }";

const DNS: &str = "discovery.dns[].name = 'a'\ndiscovery.dns[].record = '_a._tcp.example'\n\
                   discovery.dns[].defaults = { engine = 'vllm', role = 'decode' }";
const ETCD: &str = "discovery.etcd[].name = 'a'\ndiscovery.etcd[].endpoints = ['https://a:2379']\n\
                    discovery.etcd[].cert_file = 'DIR/cert.pem'\ndiscovery.etcd[].key_file = 'DIR/key.pem'\n\
                    discovery.etcd[].username = 'u'\ndiscovery.etcd[].password_file = 'DIR/p'";
const KUBERNETES: &str = "discovery.kubernetes[].name = 'a'\ndiscovery.kubernetes[].selector = 'app=a'";

const EXT_PROC_TLS: &str = "ext_proc.tls.cert_file = 'DIR/cert.pem'\next_proc.tls.key_file = 'DIR/key.pem'\n\
                            ext_proc.tls.client_ca_file = 'DIR/ca'";

/// Keys of TLS of the endpoint picker. A change needs a restart.
const PICKER_TLS: &[(&str, &str)] = &[
    ("ext_proc.tls.cert_file", "'DIR/cert2.pem'"),
    ("ext_proc.tls.key_file", "'DIR/key2.pem'"),
    ("ext_proc.tls.client_ca_file", "'DIR/cert.pem'"),
    ("ext_proc.tls.require_client_cert", "true"),
    ("ext_proc.tls.client_names", "['a.example']"),
    ("ext_proc.tls.min_version", "'1.3'"),
    ("ext_proc.tls.handshake_timeout", "'7s'"),
];

const USER: &str = "replicas.username = 'u'\nreplicas.password_file = 'DIR/p'";
const NATS_TLS: &str = "replicas.tls.cert_file = 'DIR/cert.pem'\nreplicas.tls.key_file = 'DIR/key.pem'";

/// Keys of `[replicas]` that need others: these, the new value, and the path that is reported.
const REPLICAS: &[(&str, &str, &str, &str)] = &[
    ("replicas.username", USER, "'v'", "replicas.username"),
    ("replicas.password_file", USER, "'DIR/q'", "replicas.password_file"),
    ("replicas.tls.ca_file", NATS_TLS, "'DIR/ca'", "replicas.tls"),
    ("replicas.tls.cert_file", NATS_TLS, "'DIR/cert2.pem'", "replicas.tls"),
    ("replicas.tls.key_file", NATS_TLS, "'DIR/key2.pem'", "replicas.tls"),
];

/// Keys of sources of workers: what the source says besides, and the new value. A change needs a restart.
const SOURCES: &[(&str, &str, &str)] = &[
    ("discovery.files[].name", FILE, "'b'"),
    ("discovery.files[].path", FILE, "'b.yaml'"),
    ("discovery.files[].format", LLM_D, "'llm-d'"),
    ("discovery.files[].interval", FILE, "'7s'"),
    ("discovery.files[].defaults", LLM_D, "{ engine = 'sglang' }"),
    ("discovery.files[].scheme", LLM_D, "'https'"),
    ("discovery.dns[].name", DNS, "'b'"),
    ("discovery.dns[].record", DNS, "'_b._tcp.example'"),
    ("discovery.dns[].servers", DNS, "['127.0.0.1:53']"),
    ("discovery.dns[].interval", DNS, "'7s'"),
    ("discovery.dns[].timeout", DNS, "'7s'"),
    ("discovery.dns[].defaults", DNS, "{ engine = 'sglang' }"),
    ("discovery.dns[].scheme", DNS, "'https'"),
    ("discovery.etcd[].name", ETCD, "'b'"),
    ("discovery.etcd[].endpoints", ETCD, "['https://b:2379']"),
    ("discovery.etcd[].prefix", ETCD, "'/b/'"),
    ("discovery.etcd[].timeout", ETCD, "'7s'"),
    ("discovery.etcd[].resync", ETCD, "'7s'"),
    ("discovery.etcd[].ca_file", ETCD, "'DIR/ca'"),
    ("discovery.etcd[].cert_file", ETCD, "'DIR/cert2.pem'"),
    ("discovery.etcd[].key_file", ETCD, "'DIR/key2.pem'"),
    ("discovery.etcd[].username", ETCD, "'v'"),
    ("discovery.etcd[].password_file", ETCD, "'DIR/q'"),
    ("discovery.kubernetes[].name", KUBERNETES, "'b'"),
    ("discovery.kubernetes[].api", KUBERNETES, "'https://b'"),
    ("discovery.kubernetes[].namespace", KUBERNETES, "'b'"),
    ("discovery.kubernetes[].resource", KUBERNETES, "'endpoint-slices'"),
    ("discovery.kubernetes[].selector", KUBERNETES, "'app=b'"),
    ("discovery.kubernetes[].port", KUBERNETES, "'8000'"),
    ("discovery.kubernetes[].defaults", KUBERNETES, "{ engine = 'vllm' }"),
    ("discovery.kubernetes[].scheme", KUBERNETES, "'https'"),
    ("discovery.kubernetes[].token_file", KUBERNETES, "''"),
    ("discovery.kubernetes[].ca_file", KUBERNETES, "''"),
    ("discovery.kubernetes[].timeout", KUBERNETES, "'7s'"),
    ("discovery.kubernetes[].watch", KUBERNETES, "'7s'"),
];

/// Reads the value of a key from the state that requests use.
type Observe = fn(&State) -> String;

/// A key that a reload applies: its path, what the file says besides it, its new value, and what has to
/// change.
struct Row(&'static str, &'static str, String, Observe);

fn settings(state: &State) -> String {
    format!("{:?}", state.settings)
}

/// Keys and tokens, which the settings do not show.
fn secrets(state: &State) -> String {
    let settings = &state.settings;
    format!("{:?} {:?}", settings.keys.exposed(), settings.operators.exposed())
}

fn router(state: &State) -> String {
    let all = format!("{:?}", state.router);
    let config = all.split("RouterConfig {").nth(1).and_then(|rest| rest.split('}').next());
    let failure = all
        .split("on_failure: ")
        .find_map(|rest| ["Fallback", "Shed", "Reject"].into_iter().find(|kind| rest.starts_with(kind)));
    format!("{config:?} {failure:?}")
}

/// The record of decisions in force: each one has an address of its own.
fn record(state: &State) -> String {
    format!("{:p}", Arc::as_ptr(state.router.decisions()))
}

/// The decision log in force: each one has an address of its own.
fn log(state: &State) -> String {
    format!("{:?}", state.decision_log.as_ref().map(Arc::as_ptr))
}

/// The exporter of traces in force: each one has an address of its own.
fn traces(state: &State) -> String {
    format!("{:?}", state.traces.as_ref().map(Arc::as_ptr))
}

fn busy(state: &State) -> String {
    format!("{:?}", state.router.busy())
}

fn salt(state: &State) -> String {
    state.settings.measure.salt.expose().to_string()
}

fn jwt(state: &State) -> String {
    format!("{:?}", state.jwt)
}

fn limiter(state: &State) -> String {
    format!("{:?}", state.limiter)
}

fn queue(state: &State) -> String {
    format!("{:?} {:?}", state.queue, state.settings.queue_timeout)
}

fn tenant_limits(state: &State) -> String {
    format!("{:?}", state.tenant_limits)
}

fn budgets(state: &State) -> String {
    format!("{:?} {:?} {:?} {:?}", state.connections, state.body_bytes, state.http2_requests, state.realtime)
}

fn probe(state: &State) -> String {
    format!("{:?}", *state.probe.borrow())
}

fn tokens(state: &State) -> String {
    format!("{:?}", state.tokens)
}

fn tls(state: &State) -> String {
    format!("{:?}", state.tls)
}

fn workers(state: &State) -> String {
    let snapshot = state.registry.snapshot();
    let specs = snapshot.workers().iter().map(|worker| {
        let spec = worker.spec();
        format!(
            "{spec:?} {:?}",
            (
                (&spec.models, spec.dp_size, &spec.bootstrap, &spec.transport, &spec.labels, &spec.taints),
                (&spec.topology, &spec.kv_transfer, &spec.kv_addr, &spec.kv_events, &spec.kv_replay),
                (spec.local_prefill, spec.prefill_cancellable, spec.max_concurrency, spec.total_blocks),
                (&spec.loras, &spec.block_size, &spec.api_key, &spec.tls_server_name, &spec.handoff_lease_s),
                &spec.kv_compatibility,
            )
        )
    });
    specs.collect()
}

/// Slots report their content; what they report of a change of a trial's or part's details is its number of
/// changes.
fn nothing(_: &State) -> String {
    String::new()
}

const TRACES: &str = "traces.endpoint = 'http://127.0.0.1:9'";
const LOG: &str = "decisions.log_dir = 'DIR/log'";
const SIGNED: &str = "policies.require_signed = true\npolicies.trusted_keys = ['KEY_A']";
const BOUND: &str =
    "policies.require_signed = true\npolicies.trusted_keys = ['KEY_A']\npolicies.signatures_bind = true";
const TLS: &str = "server.tls.cert_file = 'DIR/cert.pem'\nserver.tls.key_file = 'DIR/key.pem'";
const TLS_CA: &str = "server.tls.cert_file = 'DIR/cert.pem'\nserver.tls.key_file = 'DIR/key.pem'\n\
                      server.tls.client_ca_file = 'DIR/cert.pem'";
const ADMIN_TLS: &str =
    "server.admin_tls.cert_file = 'DIR/cert.pem'\nserver.admin_tls.key_file = 'DIR/key.pem'";
const ADMIN_TLS_CA: &str = "server.admin_tls.cert_file = 'DIR/cert.pem'\nserver.admin_tls.key_file = 'DIR/key.pem'\n\
     server.admin_tls.client_ca_file = 'DIR/cert.pem'";
const CERTIFICATE: &str = "server.tls.cert_file = 'DIR/cert.pem'\nserver.tls.key_file = 'DIR/key.pem'\n\
     server.tls.client_ca_file = 'DIR/cert.pem'\nauth.certificates[].name = 'a.example'";
const OPERATORS_CERTIFICATE: &str = "server.admin_tls.cert_file = 'DIR/cert.pem'\n\
     server.admin_tls.key_file = 'DIR/key.pem'\nserver.admin_tls.client_ca_file = 'DIR/cert.pem'\n\
     auth.certificates[].name = 'a.example'\nauth.certificates[].role = 'viewer'";
const UPSTREAM_TLS: &str = "upstream.tls.cert_file = 'DIR/cert.pem'\nupstream.tls.key_file = 'DIR/key.pem'";
const SCORER: &str = "SLOT.scorers = [{ policy = 'kv-aware' }]";

/// Rows of `[server]` to `[[workers]]`, without slots.
#[expect(clippy::too_many_lines, reason = "a table with a row for each key")]
fn rows() -> Vec<Row> {
    let row = |key, value: &str, observe| Row(key, "", value.to_owned(), observe);
    let mut rows = vec![
        row("server.max_body_bytes", "1000", settings),
        row("server.trust_hints", "false", settings),
        row("server.tell_decisions", "false", settings),
        row("server.requests_per_second", "5", limiter),
        Row("server.tenant_header", "auth.trusted_proxies = ['::1']", "'x-tenant'".to_owned(), settings),
        row("auth.trusted_proxies", "['10.0.0.0/8']", settings),
        row("auth.key_dir", "'DIR/keys'", secrets),
        row("server.admin_token", "'t'", secrets),
        row("server.admin_names", "['gw.internal']", settings),
        Row("server.admin_token_reads", "server.admin_token = 't'", "true".to_owned(), settings),
        Row("server.tls.cert_file", TLS, "'DIR/cert2.pem'".to_owned(), tls),
        Row("server.tls.key_file", TLS, "'DIR/key2.pem'".to_owned(), tls),
        Row("server.tls.client_ca_file", TLS, "'DIR/cert.pem'".to_owned(), tls),
        Row("server.tls.require_client_cert", TLS_CA, "true".to_owned(), tls),
        Row("server.tls.client_names", TLS_CA, "['a.example']".to_owned(), tls),
        Row("server.tls.min_version", TLS, "'1.3'".to_owned(), tls),
        Row("server.tls.handshake_timeout", TLS, "'7s'".to_owned(), tls),
        Row("server.http2.enabled", TLS, "false".to_owned(), tls),
        row("server.http2.max_concurrent_streams", "7", settings),
        row("server.http2.max_resets", "7", settings),
        row("server.http2.keep_alive_interval", "'7s'", settings),
        row("server.http2.keep_alive_timeout", "'7s'", settings),
        Row("server.admin_tls.cert_file", ADMIN_TLS, "'DIR/cert2.pem'".to_owned(), tls),
        Row("server.admin_tls.key_file", ADMIN_TLS, "'DIR/key2.pem'".to_owned(), tls),
        Row("server.admin_tls.client_ca_file", ADMIN_TLS, "'DIR/cert.pem'".to_owned(), tls),
        Row("server.admin_tls.require_client_cert", ADMIN_TLS_CA, "true".to_owned(), tls),
        Row("server.admin_tls.client_names", ADMIN_TLS_CA, "['a.example']".to_owned(), tls),
        Row("server.admin_tls.min_version", ADMIN_TLS, "'1.3'".to_owned(), tls),
        Row("server.admin_tls.handshake_timeout", ADMIN_TLS, "'7s'".to_owned(), tls),
        row("limits.choices", "7", settings),
        row("limits.prompts", "7", settings),
        row("limits.sequences", "7", settings),
        row("limits.answer_bytes", "7", settings),
        row("routing.enforce_disagg", "true", settings),
        row("routing.bytes_per_token", "3", settings),
        row("routing.order", "'decode-first'", settings),
        row("routing.retries", "5", settings),
        row("routing.local_fallback", "true", settings),
        row("routing.continuations", "0", settings),
        row("routing.session_affinity", "'7s'", settings),
        row("routing.busy_status", "503", settings),
        row("routing.quarantine", "'7s'", settings),
        row("routing.hash_salt", "7", salt),
        row("routing.busy.*.kv_usage", "0.5", busy),
        row("routing.busy.*.prefill_tokens", "7", busy),
        row("routing.busy.*.engine_queue", "7", busy),
        row("models.*.busy.*.kv_usage", "0.5", busy),
        row("models.*.busy.*.prefill_tokens", "7", busy),
        row("models.*.busy.*.engine_queue", "7", busy),
        row("models.*.enforce_disagg", "true", settings),
        row("models.*.order", "'decode-first'", settings),
        row("models.*.local_fallback", "true", settings),
        row("models.*.continuations", "0", settings),
        row("models.*.continuation", "'exact'", settings),
        Row("models.*.wait_for_workers", "queue.limit = 7", "'7s'".to_owned(), settings),
        row("models.*.ttft_target", "'7s'", settings),
        row("models.*.itl_target", "'7ms'", settings),
        row("policies.on_failure", "'shed'", router),
        Row("policies.require_signed", "", "true".to_owned(), nothing),
        Row("policies.trusted_keys", SIGNED, format!("['{KEY_A}', '{KEY_B}']"), nothing),
        Row("policies.signatures_bind", SIGNED, "true".to_owned(), nothing),
        Row("policies.min_versions", BOUND, "{ prefill = 7 }".to_owned(), nothing),
        Row("policies.pins", "", format!("{{ prefill = 'sha256:{}' }}", "ab".repeat(32)), nothing),
        row("queue.limit", "3", queue),
        row("queue.timeout", "'7s'", queue),
        row("queue.bytes", "7000", queue),
        row("queue.max_inflight", "7", queue),
        row("queue.preempt", "true", queue),
        row("queue.input_weight", "0.5", queue),
        row("queue.output_weight", "0.5", queue),
        row("queue.models.*.limit", "7", queue),
        row("queue.models.*.max_inflight", "7", queue),
        row("tenants.*.weight", "2.0", queue),
        row("tenants.*.max_priority", "0.0", queue),
        row("tenants.*.continuations", "0", settings),
        row("tenants.*.ttft_target", "'7s'", settings),
        row("tenants.*.itl_target", "'7ms'", settings),
        row("tenants.*.requests_per_minute", "7", tenant_limits),
        row("tenants.*.input_tokens_per_minute", "7", tenant_limits),
        row("tenants.*.output_tokens_per_minute", "7", tenant_limits),
        row("tenants.*.concurrency", "7", tenant_limits),
        row("tenants.*.models.*.requests_per_minute", "7", tenant_limits),
        row("tenants.*.models.*.input_tokens_per_minute", "7", tenant_limits),
        row("tenants.*.models.*.output_tokens_per_minute", "7", tenant_limits),
        row("tenants.*.models.*.concurrency", "7", tenant_limits),
        row("decisions.keep", "100", record),
        row("decisions.bytes", "65536", record),
        row("decisions.facts", "['active-requests']", record),
        row("decisions.log_dir", "'DIR/log'", log),
        Row("decisions.log_total_bytes", LOG, "500000000".to_owned(), log),
        Row("decisions.log_salt", LOG, "'s'".to_owned(), log),
        row("traces.endpoint", "'http://127.0.0.1:9'", traces),
        Row("traces.headers", TRACES, "{ a = 'b' }".to_owned(), traces),
        Row("traces.sample_ratio", TRACES, "0.5".to_owned(), traces),
        Row("traces.parent_based", TRACES, "false".to_owned(), traces),
        Row("traces.service_name", TRACES, "'other'".to_owned(), traces),
        Row("traces.resource_attributes", TRACES, "{ a = 'b' }".to_owned(), traces),
        Row("traces.semconv", TRACES, "'1.36'".to_owned(), traces),
        Row("traces.timeout", TRACES, "'7s'".to_owned(), traces),
        Row("traces.interval", TRACES, "'7s'".to_owned(), traces),
        Row("traces.queue_spans", TRACES, "5000".to_owned(), traces),
        row("timeouts.connect", "'7s'", settings),
        row("limits.connections", "7", budgets),
        row("limits.connections_per_address", "7", settings),
        row("limits.body_bytes_in_flight", "70000000", budgets),
        row("limits.min_body_rate", "7", settings),
        row("limits.http2_requests", "7", budgets),
        row("limits.realtime_connections", "7", budgets),
        row("timeouts.realtime_idle", "'7s'", settings),
        row("timeouts.body_idle", "'7s'", settings),
        row("timeouts.drain_delay", "'7s'", settings),
        row("timeouts.client_idle", "'7s'", settings),
        row("timeouts.client_write", "'7s'", settings),
        row("timeouts.request", "'7s'", settings),
        row("timeouts.head", "'7s'", settings),
        row("timeouts.prefill_head", "'7s'", settings),
        row("timeouts.whole_head", "'7s'", settings),
        row("timeouts.event_idle", "'7s'", settings),
        row("timeouts.event_idle_max", "'7s'", settings),
        row("timeouts.stream_comment", "'7s'", settings),
        row("timeouts.abort", "'7s'", settings),
        row("upstream.idle_timeout", "'7s'", settings),
        row("upstream.idle_connections", "7", settings),
        row("upstream.forward_authorization", "true", settings),
        row("upstream.tls.ca_file", "'DIR/cert.pem'", tls),
        Row("upstream.tls.cert_file", UPSTREAM_TLS, "'DIR/cert2.pem'".to_owned(), tls),
        Row("upstream.tls.key_file", UPSTREAM_TLS, "'DIR/key2.pem'".to_owned(), tls),
        row("upstream.tls.min_version", "'1.3'", tls),
        row("timeouts.booking", "'7s'", settings),
        row("timeouts.drain", "'7s'", settings),
        row("probe.interval", "'7s'", probe),
        row("probe.timeout", "'7s'", probe),
        row("probe.health_timeout", "'7s'", probe),
        row("probe.load_interval", "'7s'", probe),
        row("probe.max_per_second", "7", probe),
        row("probe.stuck_after", "'7s'", probe),
        row("models.*.tokenizer", "'engine'", tokens),
        Row("models.*.tokenizer_timeout", "models.m.tokenizer = 'engine'", "'7s'".to_owned(), tokens),
        Row("models.*.tokenizer_cache_bytes", "models.m.tokenizer = 'engine'", "0".to_owned(), tokens),
    ];
    let cost = [
        ("routing.cost.overlap_score_credit", "0.5"),
        ("routing.cost.host_cache_credit", "0.5"),
        ("routing.cost.disk_cache_credit", "0.5"),
        ("routing.cost.prefill_load_scale", "0.5"),
        ("routing.cost.active_request_weight", "0.5"),
        ("routing.cost.temperature", "0.5"),
        ("routing.cost.assume_kv_reuse", "false"),
        ("routing.cost.track_prefill_tokens", "false"),
    ];
    rows.extend(auth_rows());
    rows.extend(cost.map(|(key, value)| row(key, value, router)));
    let worker = [
        ("workers[].id", "2"),
        ("workers[].url", "'http://127.0.0.1:10'"),
        ("workers[].role", "'decode'"),
        ("workers[].engine", "'sglang'"),
        ("workers[].models", "['other']"),
        ("workers[].dp_size", "2"),
        ("workers[].bootstrap_host", "'h'"),
        ("workers[].bootstrap_port", "7"),
        ("workers[].kv_compatibility", "'a'"),
        ("workers[].labels", "{ zone = 'a' }"),
        ("workers[].taints", "['spot']"),
        ("workers[].topology", "{ rack = 'r2' }"),
        ("workers[].kv_transfer", "'required:rack'"),
        ("workers[].kv_addr", "'127.0.0.1:7'"),
        ("workers[].kv_events", "'tcp://127.0.0.1:7'"),
        ("workers[].kv_replay", "'tcp://127.0.0.1:7'"),
        ("workers[].local_prefill", "true"),
        ("workers[].prefill_cancellable", "true"),
        ("workers[].handoff_lease_s", "7"),
        ("workers[].max_concurrency", "7"),
        ("workers[].block_size", "7"),
        ("workers[].total_blocks", "7"),
        ("workers[].loras", "['l']"),
        ("workers[].api_key", "'k'"),
    ];
    rows.extend(worker.map(|(key, value)| row(key, value, workers)));
    rows.push(Row(
        "workers[].transport",
        "workers[].kv_addr = '127.0.0.1:7'",
        "'p2p_nccl'".to_owned(),
        workers,
    ));
    rows.push(Row(
        "workers[].tls_server_name",
        "workers[].url = 'https://127.0.0.1:9'",
        "'b.example'".to_owned(),
        workers,
    ));
    rows
}

const JWT: &str =
    "auth.jwt.issuer = 'i'\nauth.jwt.audience = ['a']\nauth.jwt.jwks_url = 'http://127.0.0.1:9/'";
const JWT_FILE: &str = "auth.jwt.issuer = 'i'\nauth.jwt.audience = ['a']\nauth.jwt.jwks_file = 'DIR/jwks'";
const ROLES: &str = "auth.jwt.issuer = 'i'\nauth.jwt.audience = ['a']\nauth.jwt.jwks_url = 'http://127.0.0.1:9/'\n\
                     auth.jwt.role_claim = 'r'";

/// Rows of `[auth.jwt]`.
fn jwt_rows() -> Vec<Row> {
    let row = |key, value: &str| Row(key, JWT, value.to_owned(), jwt as Observe);
    vec![
        row("auth.jwt.issuer", "'j'"),
        row("auth.jwt.audience", "['b']"),
        row("auth.jwt.jwks_url", "'http://127.0.0.1:10/'"),
        row("auth.jwt.jwks_ca", "'DIR/ca'"),
        Row("auth.jwt.jwks_file", JWT_FILE, "'DIR/jwks2'".to_owned(), jwt),
        row("auth.jwt.algorithms", "['PS256']"),
        row("auth.jwt.clock_skew", "'7s'"),
        row("auth.jwt.tenant_claim", "'t'"),
        row("auth.jwt.role_claim", "'r'"),
        Row("auth.jwt.viewers", ROLES, "['v']".to_owned(), jwt),
        Row("auth.jwt.operators", ROLES, "['o']".to_owned(), jwt),
        row("auth.jwt.refresh", "'7s'"),
        row("auth.jwt.unknown_key_pause", "'7s'"),
        row("auth.jwt.max_stale", "'7s'"),
    ]
}

/// Rows of the entries of `[auth]`.
fn auth_rows() -> Vec<Row> {
    let mut rows = jwt_rows();
    let digest = |byte: &str| format!("'sha256:{}'", byte.repeat(32));
    for entry in ["auth.keys[]", "auth.operators[]"] {
        let entry_with = |other: &str| {
            let besides = format!("{entry}.id = 'a'\n{entry}.digest = {}{other}", digest("aa"));
            &*Box::leak(besides.into_boxed_str())
        };
        let mut add = |key: &str, besides, value: String| {
            rows.push(Row(Box::leak(format!("{entry}.{key}").into_boxed_str()), besides, value, secrets));
        };
        add("id", entry_with(""), "'b'".to_owned());
        add("digest", entry_with(""), digest("bb"));
        if entry == "auth.keys[]" {
            add("tenant", entry_with(""), "'t'".to_owned());
        } else {
            add("role", entry_with(""), "'operator'".to_owned());
        }
    }
    let row = |key, besides, value: &str| Row(key, besides, value.to_owned(), settings);
    rows.extend([
        row("auth.certificates[].name", CERTIFICATE, "'b.example'"),
        row("auth.certificates[].tenant", CERTIFICATE, "'t'"),
        row("auth.certificates[].role", OPERATORS_CERTIFICATE, "'operator'"),
    ]);
    rows
}

/// Other keys that shared state needs. A change of the servers themselves needs a restart.
const SHARED: &str = "SLOT.grants = ['state']\nreplicas.servers = ['nats://a:4222']";

/// Keys of a slot: what the slot says besides, and the new value.
const SLOT: &[(&str, &str, &str)] = &[
    ("native", "", "'random'"),
    ("builtin", "", "'least-loaded'"),
    ("policy", "", "'least-loaded'"),
    ("filters[].policy", "SLOT.filters = [{ policy = 'kv-aware' }]", "'least-loaded'"),
    ("filters[].settings", "SLOT.filters = [{ policy = 'kv-aware' }]", "{ a = 1 }"),
    ("scorers[].policy", SCORER, "'least-loaded'"),
    ("scorers[].weight", SCORER, "2.0"),
    ("scorers[].normalize", SCORER, "'min-max'"),
    ("scorers[].settings", SCORER, "{ a = 1 }"),
    ("picker", SCORER, "'weighted-random'"),
    ("settings", "SLOT.builtin = 'least-loaded'", "{ active-requests = 2.0 }"),
    ("grants", "", "['log']"),
    ("shared_state", SHARED, "true"),
    ("on_failure", "", "'reject'"),
    ("max_rows", "", "64"),
];

/// Keys of a canary or shadow.
const TRIAL: &[(&str, &str, &str)] = &[
    ("share", "", "0.5"),
    ("native", "", "'random'"),
    ("builtin", "", "'least-loaded'"),
    ("policy", "", "'least-loaded'"),
    ("filters[].policy", "SLOT.filters = [{ policy = 'kv-aware' }]", "'least-loaded'"),
    ("filters[].settings", "SLOT.filters = [{ policy = 'kv-aware' }]", "{ a = 1 }"),
    ("scorers[].policy", SCORER, "'least-loaded'"),
    ("scorers[].weight", SCORER, "2.0"),
    ("scorers[].normalize", SCORER, "'min-max'"),
    ("scorers[].settings", SCORER, "{ a = 1 }"),
    ("picker", SCORER, "'weighted-random'"),
    ("settings", "SLOT.builtin = 'least-loaded'", "{ active-requests = 2.0 }"),
];

/// Rows of all slots: path, what the file says besides, value.
fn slot_rows() -> Vec<(String, String, &'static str)> {
    let mut rows = Vec::new();
    for slots in ["policies.slots.*", "models.*.slots.*"] {
        let mut add = |table: &str, keys: &[(&str, &str, &'static str)]| {
            for (key, besides, value) in keys {
                rows.push((format!("{table}.{key}"), besides.replace("SLOT", table), *value));
            }
        };
        add(slots, SLOT);
        add(&format!("{slots}.canary"), TRIAL);
        add(&format!("{slots}.shadow"), TRIAL);
    }
    rows
}

#[test]
fn every_key_of_the_schema_is_in_one_table() {
    let schema: BTreeSet<String> = leaves::<Config>().into_iter().collect();
    let mut listed: Vec<String> = STATIC.iter().map(|(key, _)| (*key).to_owned()).collect();
    listed.extend(PICKER_TLS.iter().map(|(key, _)| (*key).to_owned()));
    listed.extend(REPLICAS.iter().map(|(key, ..)| (*key).to_owned()));
    listed.extend(SOURCES.iter().map(|(key, ..)| (*key).to_owned()));
    listed.extend(rows().iter().map(|row| row.0.to_owned()));
    listed.extend(slot_rows().into_iter().map(|(key, ..)| key));
    let unique: BTreeSet<String> = listed.iter().cloned().collect();
    assert_eq!(unique.len(), listed.len(), "a key is listed twice");
    let missing: Vec<_> = schema.difference(&unique).collect();
    let unknown: Vec<_> = unique.difference(&schema).collect();
    assert!(
        missing.is_empty() && unknown.is_empty(),
        "not listed: {missing:?}; not in the schema: {unknown:?}"
    );
}

/// A state whose configuration file a test rewrites.
struct Reloading {
    shared: SharedState,
    dir: TempDir,
}

impl Reloading {
    fn start() -> Self {
        let dir = TempDir::new().unwrap();
        for (file, id) in [("jwks", "a"), ("jwks2", "b")] {
            // A point of P-256: its coordinates need not be on the curve to be read.
            let point = "A".repeat(43);
            let key = format!(r#"{{"kty":"EC","crv":"P-256","kid":"{id}","x":"{point}","y":"{point}"}}"#);
            std::fs::write(dir.path().join(file), format!(r#"{{"keys":[{key}]}}"#)).unwrap();
        }
        let ca = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        std::fs::write(dir.path().join("ca"), ca.cert.pem()).unwrap();
        std::fs::create_dir(dir.path().join("keys")).unwrap();
        let entry = format!("[[auth.keys]]\nid = 'dir'\ndigest = 'sha256:{}'\n", "ee".repeat(32));
        std::fs::write(dir.path().join("keys/a.toml"), entry).unwrap();
        let issued = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        for (name, text) in [
            ("cert.pem", issued.cert.pem()),
            ("cert2.pem", issued.cert.pem()),
            ("key.pem", issued.signing_key.serialize_pem()),
            ("key2.pem", issued.signing_key.serialize_pem()),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let path = dir.path().join("pointsman.toml");
        std::fs::write(&path, toml::to_string(&base()).unwrap()).unwrap();
        let read = move || Ok(Config::load(Some(&path), &Environment::default(), |_| {})?);
        let settings = read().and_then(|config: Config| Ok(config.resolve()?)).unwrap();
        let (probe, _) = watch::channel(probe_config(&settings));
        let source = ConfigSource::new(None, Environment::default(), Arc::new(read));
        Self {
            shared: SharedState::new(build(&Config::default(), settings, Some(source), probe).unwrap()),
            dir,
        }
    }

    async fn reload(&self, document: &Table) -> Reloaded {
        let dir = self.dir.path().to_str().unwrap();
        let text = toml::to_string(document).unwrap().replace("DIR", dir).replace("KEY_A", KEY_A);
        std::fs::write(self.path(), &text).unwrap();
        let reloaded = self.shared.get().config.reload(&self.shared).await;
        reloaded.unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("pointsman.toml")
    }
}

fn base() -> Table {
    let mut base: Table = BASE.parse().unwrap();
    for key in ["server.listen", "server.admin_listen"] {
        set(&mut base, key, "'127.0.0.1:0'");
    }
    base
}

/// Sets a dotted path: `*` is `m` below `models` and `tenants`, `prefill` below `slots`; `[]` is the first
/// element.
fn set(root: &mut Table, path: &str, value: &str) {
    let value: Table = format!("value = {value}").parse().unwrap();
    let mut at = root;
    let keys: Vec<&str> = path.split('.').collect();
    let (last, parents) = keys.split_last().unwrap();
    for (index, key) in parents.iter().enumerate() {
        let name = match *key {
            "*" if ["models", "tenants"].contains(&parents[index - 1]) => "m",
            "*" => "prefill",
            key => key,
        };
        let entry = at.entry(name.trim_end_matches("[]")).or_insert_with(|| {
            if name.ends_with("[]") {
                Value::Array(vec![Value::Table(Table::new())])
            } else {
                Table::new().into()
            }
        });
        at = match entry {
            Value::Array(elements) => elements[0].as_table_mut().unwrap(),
            entry => entry.as_table_mut().unwrap(),
        };
    }
    at.insert((*last).to_owned(), value["value"].clone());
}

fn set_lines(root: &mut Table, lines: &str) {
    for line in lines.lines() {
        let (path, value) = line.split_once(" = ").unwrap();
        set(root, path, value);
    }
}

#[tokio::test]
async fn every_reloadable_key_is_applied_and_none_needs_a_restart() {
    let reloading = Reloading::start();
    for Row(key, besides, value, observe) in rows() {
        let mut document = base();
        set_lines(&mut document, besides);
        reloading.reload(&document).await;
        let before = observe(&reloading.shared.get());
        set(&mut document, key, &value);
        let mut expected = vec![
            match key {
                key if key.starts_with("routing.cost.") => "routing.cost",
                key if key.starts_with("workers") => "workers",
                key if key.starts_with("auth.jwt") => "auth.jwt",
                key if key.starts_with("auth.keys") => "auth.keys",
                key if key.starts_with("auth.operators") => "auth.operators",
                key if key.starts_with("auth.certificates") => "auth.certificates",
                key if key.starts_with("server.tls.") => "server.tls",
                key if key.starts_with("server.http2.") => "server.http2",
                key if key.starts_with("server.admin_tls.") => "server.admin_tls",
                key if key.starts_with("upstream.tls.") => "upstream.tls",
                key if key.starts_with("routing.busy.") => "routing.busy",
                key if key.starts_with("models.*.busy.") => "models.*.busy",
                key => key,
            }
            .replace('*', "m"),
        ];
        if key == "policies.require_signed" {
            set(&mut document, "policies.trusted_keys", "['KEY_A']");
            expected.push("policies.trusted_keys".to_owned());
        }
        let reloaded = reloading.reload(&document).await;
        assert_eq!((&reloaded.applied, reloaded.needs_restart.len()), (&expected, 0), "{key}");
        if observe as usize != nothing as Observe as usize {
            assert_ne!(observe(&reloading.shared.get()), before, "{key} has no effect on the state");
        }
        let again = reloading.reload(&document).await;
        assert!(again.applied.is_empty(), "{key} is in force: {:?}", again.applied);
    }
}

#[tokio::test]
async fn every_key_of_a_slot_is_applied_and_none_needs_a_restart() {
    let reloading = Reloading::start();
    for (key, besides, value) in slot_rows() {
        let mut document = base();
        set_lines(&mut document, &besides);
        reloading.reload(&document).await;
        set(&mut document, &key, value);
        let reloaded = reloading.reload(&document).await;
        let others = reloaded.needs_restart.iter().filter(|path| !besides.contains(path.as_str())).count();
        let slots = if key.starts_with("models") { "models.m.slots" } else { "policies.slots" };
        assert_eq!((&reloaded.applied[..], others), (&[slots.to_owned()][..], 0), "{key}");
        assert!(reloading.reload(&document).await.applied.is_empty(), "{key} is in force");
    }
}

#[tokio::test]
async fn every_static_key_is_reported_and_not_applied() {
    let reloading = Reloading::start();
    for (key, value) in STATIC {
        let before = settings(&reloading.shared.get());
        let mut document = base();
        set(&mut document, key, value);
        let reloaded = reloading.reload(&document).await;
        assert_eq!((&reloaded.needs_restart[..], reloaded.applied.len()), (&[(*key).to_owned()][..], 0));
        assert_eq!(settings(&reloading.shared.get()), before, "{key}");
    }
    for (key, value) in PICKER_TLS {
        let mut document = base();
        set_lines(&mut document, EXT_PROC_TLS);
        set(&mut document, key, value);
        let reloaded = reloading.reload(&document).await;
        let expected = &["ext_proc.tls".to_owned()][..];
        assert_eq!((&reloaded.needs_restart[..], reloaded.applied.len()), (expected, 0), "{key}");
    }
    for (key, besides, value, reported) in REPLICAS {
        let mut document = base();
        set_lines(&mut document, besides);
        set(&mut document, key, value);
        let reloaded = reloading.reload(&document).await;
        let named = reloaded.needs_restart.iter().any(|path| path == reported);
        assert!(named && reloaded.applied.is_empty(), "{key}: {reloaded:?}");
    }
    for (key, besides, value) in SOURCES {
        let mut document = base();
        set_lines(&mut document, besides);
        set(&mut document, key, value);
        let reloaded = reloading.reload(&document).await;
        let section = key.split("[]").next().unwrap();
        assert_eq!((&reloaded.needs_restart[..], reloaded.applied.len()), (&[section.to_owned()][..], 0));
    }
    let mut document = base();
    set(&mut document, "models.*.slots", "{ prefill = {}, decode = {} }");
    let reloaded = reloading.reload(&document).await;
    assert_eq!(reloaded.needs_restart, ["models.m.slots.decode"]);
}
