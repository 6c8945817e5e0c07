//! The flags of both routers: how many values each takes, and the fate of flags that need no translation.

use crate::report::Kind::{self, Approximated, Missing, Translated};

/// Number of values of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arity {
    Switch,
    One,
    /// A URL and perhaps a port.
    Pair,
    Many,
}

/// A flag that is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) name: &'static str,
    pub(super) arity: Arity,
    /// Translation of the flag; `None` if that depends on its value.
    pub(super) note: Option<(Kind, &'static str)>,
}

impl Arity {
    pub(super) fn least(self) -> usize {
        usize::from(matches!(self, Self::One | Self::Pair))
    }

    pub(super) fn most(self) -> usize {
        match self {
            Self::Switch => 0,
            Self::One => 1,
            Self::Pair => 2,
            Self::Many => usize::MAX,
        }
    }
}

pub(super) const fn read(name: &'static str, arity: Arity) -> Flag {
    Flag { name, arity, note: None }
}

pub(super) const fn with_note(name: &'static str, arity: Arity, kind: Kind, ours: &'static str) -> Flag {
    Flag { name, arity, note: Some((kind, ours)) }
}

const BREAKER: &str = "the breaker of each worker has fixed rules (behaviour F6): it opens on failures in a \
                       row and lets one request try after a pause";
const BACKOFF: &str = "pauses between retries are fixed (behaviour I2)";
const HEALTH: &str = "a worker is left out after two failed checks and used again after a good one";
const STORE: &str = "stored responses are not served (behaviour I6)";
const CACHE: &str = "set models.NAME.tokenizer_cache_bytes with models.NAME.tokenizer";
const PARSER: &str = "not needed: the engine parses (its own flag of this name)";
const MESH: &str = "[replicas]: gateways send each other their bookings and sessions over NATS, set its url";
const JWT: &str = "[auth.jwt] would also ask clients for tokens: set it by hand if they have some";
const INDEX: &str = "index.byte_budget and index.ttl bound the prefix index";

/// All flags.
const FLAGS: &[Flag] = &[
    // Read by the translation.
    read("host", Arity::One),
    read("port", Arity::One),
    read("worker-urls", Arity::Many),
    read("prefill", Arity::Pair),
    read("decode", Arity::One),
    read("vllm-pd-disaggregation", Arity::Switch),
    read("pd-disaggregation", Arity::Switch),
    read("intra-node-data-parallel-size", Arity::One),
    read("kv-connector", Arity::One),
    read("pd-kv-events", Arity::One),
    read("kv-event-source", Arity::One),
    read("kv-event-replay-source", Arity::One),
    read("kv-event-block-size", Arity::One),
    read("block-size", Arity::One),
    read("kv-event-model", Arity::One),
    read("api-key", Arity::One),
    read("backend", Arity::One),
    read("policy", Arity::One),
    read("prefill-policy", Arity::One),
    read("decode-policy", Arity::One),
    read("cache-threshold", Arity::One),
    read("balance-abs-threshold", Arity::One),
    read("balance-rel-threshold", Arity::One),
    read("router-temperature", Arity::One),
    read("kv-penalty-host", Arity::One),
    read("kv-penalty-disk", Arity::One),
    read("kv-aware-session-affinity-ttl-secs", Arity::One),
    read("max-idle-secs", Arity::One),
    read("assignment-mode", Arity::One),
    read("max-payload-size", Arity::One),
    read("request-timeout-secs", Arity::One),
    read("shutdown-grace-period-secs", Arity::One),
    read("max-concurrent-requests", Arity::One),
    read("queue-size", Arity::One),
    read("queue-timeout-secs", Arity::One),
    read("rate-limit-tokens-per-second", Arity::One),
    read("retry-max-retries", Arity::One),
    read("disable-retries", Arity::Switch),
    read("health-check-interval-secs", Arity::One),
    read("health-check-timeout-secs", Arity::One),
    read("health-check-endpoint", Arity::One),
    read("prometheus-port", Arity::One),
    read("prometheus-host", Arity::One),
    read("cors-allowed-origins", Arity::Many),
    read("request-id-headers", Arity::Many),
    read("service-discovery", Arity::Switch),
    read("selector", Arity::Many),
    read("prefill-selector", Arity::Many),
    read("decode-selector", Arity::Many),
    read("service-discovery-port", Arity::One),
    read("service-discovery-namespace", Arity::One),
    read("tls-cert-path", Arity::One),
    read("tls-key-path", Arity::One),
    read("client-cert-path", Arity::One),
    read("client-key-path", Arity::One),
    read("ca-cert-paths", Arity::Many),
    read("control-plane-api-keys", Arity::Many),
    read("enable-trace", Arity::Switch),
    read("otlp-traces-endpoint", Arity::One),
    read("otel-sampling-ratio", Arity::One),
    read("history-backend", Arity::One),
    // Flags for things that the gateway always does, or does in another way.
    with_note(
        "enable-igw",
        Arity::Switch,
        Translated,
        "built in: several models at once, each with its workers",
    ),
    with_note(
        "dp-aware",
        Arity::Switch,
        Translated,
        "built in: SGLang reports its ranks, and the gateway chooses one",
    ),
    with_note("log-level", Arity::One, Approximated, "set the environment variable RUST_LOG"),
    with_note("log-json", Arity::Switch, Approximated, "start the gateway with --log-json"),
    with_note("log-dir", Arity::One, Approximated, "logs go to stderr: let the service manager keep them"),
    with_note("prometheus-duration-buckets", Arity::Many, Missing, "buckets are fixed (docs/metrics.md)"),
    with_note(
        "worker-startup-timeout-secs",
        Arity::One,
        Approximated,
        "the gateway starts at once and waits for workers",
    ),
    with_note(
        "worker-startup-check-interval",
        Arity::One,
        Approximated,
        "workers are asked every probe.interval",
    ),
    with_note("worker-startup-delay", Arity::One, Approximated, "workers are asked every probe.interval"),
    with_note(
        "remove-unhealthy-workers",
        Arity::Switch,
        Approximated,
        "they stay listed and get no requests",
    ),
    with_note(
        "load-monitor-interval",
        Arity::One,
        Approximated,
        "engine figures are read every probe.load_interval",
    ),
    with_note("health-failure-threshold", Arity::One, Approximated, HEALTH),
    with_note("health-success-threshold", Arity::One, Approximated, HEALTH),
    with_note(
        "disable-health-check",
        Arity::Switch,
        Missing,
        "workers are always asked: an engine has to answer /health",
    ),
    with_note(
        "health-check-port",
        Arity::One,
        Approximated,
        "probes ask /healthz and /readyz of server.admin_listen",
    ),
    with_note("retry-initial-backoff-ms", Arity::One, Approximated, BACKOFF),
    with_note("retry-max-backoff-ms", Arity::One, Approximated, BACKOFF),
    with_note("retry-backoff-multiplier", Arity::One, Approximated, BACKOFF),
    with_note("retry-jitter-factor", Arity::One, Approximated, BACKOFF),
    with_note("cb-failure-threshold", Arity::One, Approximated, BREAKER),
    with_note("cb-success-threshold", Arity::One, Approximated, BREAKER),
    with_note("cb-timeout-duration-secs", Arity::One, Approximated, BREAKER),
    with_note("cb-window-duration-secs", Arity::One, Approximated, BREAKER),
    with_note(
        "disable-circuit-breaker",
        Arity::Switch,
        Missing,
        "the breaker of a worker cannot be turned off",
    ),
    with_note("eviction-interval-secs", Arity::One, Approximated, INDEX),
    with_note("eviction-interval", Arity::One, Approximated, INDEX),
    with_note("max-tree-size", Arity::One, Approximated, INDEX),
    with_note("reasoning-parser", Arity::One, Approximated, PARSER),
    with_note("tool-call-parser", Arity::One, Approximated, PARSER),
    with_note(
        "model-path",
        Arity::One,
        Approximated,
        "set models.NAME.tokenizer to a directory, or leave prompts in bytes",
    ),
    with_note("tokenizer-path", Arity::One, Approximated, "set models.NAME.tokenizer to its directory"),
    with_note(
        "chat-template",
        Arity::One,
        Approximated,
        "it is read from the directory of models.NAME.tokenizer",
    ),
    with_note(
        "disable-tokenizer-autoload",
        Arity::Switch,
        Translated,
        "no tokenizer is loaded unless models.NAME names it",
    ),
    with_note("tokenizer-cache-enable-l0", Arity::Switch, Approximated, CACHE),
    with_note("tokenizer-cache-l0-max-entries", Arity::One, Approximated, CACHE),
    with_note("tokenizer-cache-enable-l1", Arity::Switch, Approximated, CACHE),
    with_note("tokenizer-cache-l1-max-memory", Arity::One, Approximated, CACHE),
    with_note("control-plane-audit-enabled", Arity::Switch, Translated, "built in: the log target `audit`"),
    // Flags without a counterpart.
    with_note(
        "otel-excluded-paths",
        Arity::Many,
        Missing,
        "spans are those of requests to engines: health checks have none, and no other path is left out",
    ),
    with_note("mini-lb", Arity::Switch, Missing, "a load balancer for debugging: leave it out"),
    with_note(
        "kv-penalty-external",
        Arity::One,
        Missing,
        "the cost knows device, host and disk, no external tier",
    ),
    with_note("bucket-adjust-interval-secs", Arity::One, Missing, "no policy has buckets of prompt lengths"),
    with_note(
        "prefix-token-count",
        Arity::One,
        Missing,
        "no policy hashes prefixes: use cache-aware, which follows cached blocks",
    ),
    with_note(
        "prefix-hash-load-factor",
        Arity::One,
        Missing,
        "no policy hashes prefixes: use cache-aware and its thresholds",
    ),
    with_note(
        "vllm-discovery-address",
        Arity::One,
        Missing,
        "let workers register themselves: PUT /workers/{id}?ttl=SECONDS",
    ),
    with_note(
        "enable-program-scheduling",
        Arity::Switch,
        Missing,
        "requests are not grouped into programs: use sessions",
    ),
    with_note(
        "program-scheduling-config-json",
        Arity::One,
        Missing,
        "requests are not grouped into programs: use sessions",
    ),
    with_note("wasm-middleware", Arity::One, Missing, "policies choose workers and do not change requests"),
    with_note(
        "wasm-middleware-sha256",
        Arity::One,
        Missing,
        "policies choose workers and do not change requests",
    ),
    with_note(
        "wasm-middleware-route",
        Arity::One,
        Missing,
        "policies choose workers and do not change requests",
    ),
    with_note("enable-wasm", Arity::Switch, Missing, "policies choose workers and do not change requests"),
    with_note(
        "api-key-validation-urls",
        Arity::One,
        Missing,
        "keys are checked here: [[auth.keys]], or [auth.jwt]",
    ),
    with_note("mcp-config-path", Arity::One, Missing, "tools of MCP servers are not called"),
    with_note("oracle-wallet-path", Arity::One, Missing, STORE),
    with_note("oracle-tns-alias", Arity::One, Missing, STORE),
    with_note("oracle-connect-descriptor", Arity::One, Missing, STORE),
    with_note("oracle-external-auth", Arity::Switch, Missing, STORE),
    with_note("oracle-username", Arity::One, Missing, STORE),
    with_note("oracle-password", Arity::One, Missing, STORE),
    with_note("oracle-pool-min", Arity::One, Missing, STORE),
    with_note("oracle-pool-max", Arity::One, Missing, STORE),
    with_note("oracle-pool-timeout-secs", Arity::One, Missing, STORE),
    with_note("postgres-db-url", Arity::One, Missing, STORE),
    with_note("postgres-pool-max", Arity::One, Missing, STORE),
    with_note("redis-url", Arity::One, Missing, STORE),
    with_note("redis-pool-max", Arity::One, Missing, STORE),
    with_note("redis-retention-days", Arity::One, Missing, STORE),
    with_note("schema-config", Arity::One, Missing, STORE),
    with_note("storage-hook-wasm-path", Arity::One, Missing, STORE),
    with_note("storage-context-headers", Arity::Many, Missing, STORE),
    with_note("jwt-issuer", Arity::One, Missing, JWT),
    with_note("jwt-audience", Arity::One, Missing, JWT),
    with_note("jwt-jwks-uri", Arity::One, Missing, JWT),
    with_note("jwt-role-mapping", Arity::Many, Missing, JWT),
    with_note("enable-mesh", Arity::Switch, Approximated, MESH),
    with_note("mesh-advertise-host", Arity::One, Approximated, MESH),
    with_note("mesh-host", Arity::One, Approximated, MESH),
    with_note("mesh-port", Arity::One, Approximated, MESH),
    with_note("mesh-peer-urls", Arity::Many, Approximated, MESH),
    with_note("mesh-server-name", Arity::One, Approximated, MESH),
    with_note("router-selector", Arity::Many, Approximated, MESH),
    with_note(
        "epd-disaggregation",
        Arity::Switch,
        Missing,
        "there is no encode leg: prefill workers encode images",
    ),
    with_note("encode", Arity::Pair, Missing, "there is no encode leg: prefill workers encode images"),
    with_note("encode-policy", Arity::One, Missing, "there is no encode leg: prefill workers encode images"),
    with_note(
        "encode-selector",
        Arity::Many,
        Missing,
        "there is no encode leg: prefill workers encode images",
    ),
];

/// Secrets.
const SECRETS: [&str; 6] = [
    "api-key",
    "control-plane-api-keys",
    "oracle-password",
    "postgres-db-url",
    "redis-url",
    "tenant-api-key",
];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<Flag> {
    FLAGS.iter().find(|flag| flag.name == name).copied()
}

/// Returns the name that a flag has in the table.
pub(super) fn alias(name: &str) -> &str {
    match name {
        "runtime" => "backend",
        "sticky-sessions" => "routing-key-override",
        name => name,
    }
}

/// Returns whether the value of a flag is a secret.
pub(super) fn is_secret(name: &str) -> bool {
    SECRETS.contains(&name)
}

/// Returns the names of all flags.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    FLAGS.iter().map(|flag| flag.name)
}

/// Returns whether a value has a variable of a shell (`$PORT`, `${PORT}`, `$(PORT)`) or of a template (`{{
/// .port }}`). A secret may have a dollar sign, so only a variable alone counts there.
pub(super) fn is_variable(flag: &str, value: &str) -> bool {
    let begins = |letter: char| letter.is_ascii_alphanumeric() || "{(_@*".contains(letter);
    if is_secret(flag) {
        let name = value.strip_prefix('$').unwrap_or_default();
        let of_name = |letter: char| letter.is_ascii_alphanumeric() || "_{}()".contains(letter);
        return !name.is_empty() && name.chars().all(of_name);
    }
    value.contains("{{") || value.split('$').skip(1).any(|rest| rest.starts_with(begins))
}
