//! The flags of both routers: how many values each takes, and the fate of flags that need no translation.

use Arity::{Many, One, Pair, Switch};

use crate::report::Kind;

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

pub(super) const fn translated(name: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { name, arity, note: Some((Kind::Translated, ours)) }
}

pub(super) const fn approximated(name: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { name, arity, note: Some((Kind::Approximated, ours)) }
}

pub(super) const fn missing(name: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { name, arity, note: Some((Kind::Missing, ours)) }
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
    read("host", One),
    read("port", One),
    read("worker-urls", Many),
    read("prefill", Pair),
    read("decode", One),
    read("vllm-pd-disaggregation", Switch),
    read("pd-disaggregation", Switch),
    read("intra-node-data-parallel-size", One),
    read("kv-connector", One),
    read("pd-kv-events", One),
    read("kv-event-source", One),
    read("kv-event-replay-source", One),
    read("kv-event-block-size", One),
    read("block-size", One),
    read("kv-event-model", One),
    read("api-key", One),
    read("backend", One),
    read("policy", One),
    read("prefill-policy", One),
    read("decode-policy", One),
    read("cache-threshold", One),
    read("balance-abs-threshold", One),
    read("balance-rel-threshold", One),
    read("router-temperature", One),
    read("kv-penalty-host", One),
    read("kv-penalty-disk", One),
    read("kv-aware-session-affinity-ttl-secs", One),
    read("max-idle-secs", One),
    read("assignment-mode", One),
    read("max-payload-size", One),
    read("request-timeout-secs", One),
    read("shutdown-grace-period-secs", One),
    read("max-concurrent-requests", One),
    read("queue-size", One),
    read("queue-timeout-secs", One),
    read("rate-limit-tokens-per-second", One),
    read("retry-max-retries", One),
    read("disable-retries", Switch),
    read("health-check-interval-secs", One),
    read("health-check-timeout-secs", One),
    read("health-check-endpoint", One),
    read("prometheus-port", One),
    read("prometheus-host", One),
    read("cors-allowed-origins", Many),
    read("request-id-headers", Many),
    read("service-discovery", Switch),
    read("selector", Many),
    read("prefill-selector", Many),
    read("decode-selector", Many),
    read("service-discovery-port", One),
    read("service-discovery-namespace", One),
    read("tls-cert-path", One),
    read("tls-key-path", One),
    read("client-cert-path", One),
    read("client-key-path", One),
    read("ca-cert-paths", Many),
    read("control-plane-api-keys", Many),
    read("enable-trace", Switch),
    read("otlp-traces-endpoint", One),
    read("otel-sampling-ratio", One),
    read("history-backend", One),
    // Flags for things that the gateway always does, or does in another way.
    translated("enable-igw", Switch, "built in: several models at once, each with its workers"),
    translated("dp-aware", Switch, "built in: SGLang reports its ranks, and the gateway chooses one"),
    approximated("log-level", One, "set the environment variable RUST_LOG"),
    approximated("log-json", Switch, "start the gateway with --log-json"),
    approximated("log-dir", One, "logs go to stderr: let the service manager keep them"),
    missing("prometheus-duration-buckets", Many, "buckets are fixed (docs/metrics.md)"),
    approximated("worker-startup-timeout-secs", One, "the gateway starts at once and waits for workers"),
    approximated("worker-startup-check-interval", One, "workers are asked every probe.interval"),
    approximated("worker-startup-delay", One, "workers are asked every probe.interval"),
    approximated("remove-unhealthy-workers", Switch, "they stay listed and get no requests"),
    approximated("load-monitor-interval", One, "engine figures are read every probe.load_interval"),
    approximated("health-failure-threshold", One, HEALTH),
    approximated("health-success-threshold", One, HEALTH),
    missing("disable-health-check", Switch, "workers are always asked: an engine has to answer /health"),
    approximated("health-check-port", One, "probes ask /healthz and /readyz of server.admin_listen"),
    approximated("retry-initial-backoff-ms", One, BACKOFF),
    approximated("retry-max-backoff-ms", One, BACKOFF),
    approximated("retry-backoff-multiplier", One, BACKOFF),
    approximated("retry-jitter-factor", One, BACKOFF),
    approximated("cb-failure-threshold", One, BREAKER),
    approximated("cb-success-threshold", One, BREAKER),
    approximated("cb-timeout-duration-secs", One, BREAKER),
    approximated("cb-window-duration-secs", One, BREAKER),
    missing("disable-circuit-breaker", Switch, "the breaker of a worker cannot be turned off"),
    approximated("eviction-interval-secs", One, INDEX),
    approximated("eviction-interval", One, INDEX),
    approximated("max-tree-size", One, INDEX),
    approximated("reasoning-parser", One, PARSER),
    approximated("tool-call-parser", One, PARSER),
    approximated("model-path", One, "set models.NAME.tokenizer to a directory, or leave prompts in bytes"),
    approximated("tokenizer-path", One, "set models.NAME.tokenizer to its directory"),
    approximated("chat-template", One, "it is read from the directory of models.NAME.tokenizer"),
    translated("disable-tokenizer-autoload", Switch, "no tokenizer is loaded unless models.NAME names it"),
    approximated("tokenizer-cache-enable-l0", Switch, CACHE),
    approximated("tokenizer-cache-l0-max-entries", One, CACHE),
    approximated("tokenizer-cache-enable-l1", Switch, CACHE),
    approximated("tokenizer-cache-l1-max-memory", One, CACHE),
    translated("control-plane-audit-enabled", Switch, "built in: the log target `audit`"),
    // Flags without a counterpart.
    missing(
        "otel-excluded-paths",
        Many,
        "spans are those of requests to engines: health checks have none, and no other path is left out",
    ),
    missing("mini-lb", Switch, "a load balancer for debugging: leave it out"),
    missing("kv-penalty-external", One, "the cost knows device, host and disk, no external tier"),
    missing("bucket-adjust-interval-secs", One, "no policy has buckets of prompt lengths"),
    missing(
        "prefix-token-count",
        One,
        "no policy hashes prefixes: use cache-aware, which follows cached blocks",
    ),
    missing("prefix-hash-load-factor", One, "no policy hashes prefixes: use cache-aware and its thresholds"),
    missing("vllm-discovery-address", One, "let workers register themselves: PUT /workers/{id}?ttl=SECONDS"),
    missing("enable-program-scheduling", Switch, "requests are not grouped into programs: use sessions"),
    missing("program-scheduling-config-json", One, "requests are not grouped into programs: use sessions"),
    missing("wasm-middleware", One, "policies choose workers and do not change requests"),
    missing("wasm-middleware-sha256", One, "policies choose workers and do not change requests"),
    missing("wasm-middleware-route", One, "policies choose workers and do not change requests"),
    missing("enable-wasm", Switch, "policies choose workers and do not change requests"),
    missing("api-key-validation-urls", One, "keys are checked here: [[auth.keys]], or [auth.jwt]"),
    missing("mcp-config-path", One, "tools of MCP servers are not called"),
    missing("oracle-wallet-path", One, STORE),
    missing("oracle-tns-alias", One, STORE),
    missing("oracle-connect-descriptor", One, STORE),
    missing("oracle-external-auth", Switch, STORE),
    missing("oracle-username", One, STORE),
    missing("oracle-password", One, STORE),
    missing("oracle-pool-min", One, STORE),
    missing("oracle-pool-max", One, STORE),
    missing("oracle-pool-timeout-secs", One, STORE),
    missing("postgres-db-url", One, STORE),
    missing("postgres-pool-max", One, STORE),
    missing("redis-url", One, STORE),
    missing("redis-pool-max", One, STORE),
    missing("redis-retention-days", One, STORE),
    missing("schema-config", One, STORE),
    missing("storage-hook-wasm-path", One, STORE),
    missing("storage-context-headers", Many, STORE),
    missing("jwt-issuer", One, JWT),
    missing("jwt-audience", One, JWT),
    missing("jwt-jwks-uri", One, JWT),
    missing("jwt-role-mapping", Many, JWT),
    approximated("enable-mesh", Switch, MESH),
    approximated("mesh-advertise-host", One, MESH),
    approximated("mesh-host", One, MESH),
    approximated("mesh-port", One, MESH),
    approximated("mesh-peer-urls", Many, MESH),
    approximated("mesh-server-name", One, MESH),
    approximated("router-selector", Many, MESH),
    missing("epd-disaggregation", Switch, "there is no encode leg: prefill workers encode images"),
    missing("encode", Pair, "there is no encode leg: prefill workers encode images"),
    missing("encode-policy", One, "there is no encode leg: prefill workers encode images"),
    missing("encode-selector", Many, "there is no encode leg: prefill workers encode images"),
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
