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

/// Known flags that have one translation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    /// Names, with spaces between them.
    names: &'static str,
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

pub(super) const fn read(names: &'static str, arity: Arity) -> Flag {
    Flag { names, arity, note: None }
}

pub(super) const fn translated(names: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { names, arity, note: Some((Kind::Translated, ours)) }
}

pub(super) const fn approximated(names: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { names, arity, note: Some((Kind::Approximated, ours)) }
}

pub(super) const fn missing(names: &'static str, arity: Arity, ours: &'static str) -> Flag {
    Flag { names, arity, note: Some((Kind::Missing, ours)) }
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
    read(
        "host port decode intra-node-data-parallel-size kv-connector pd-kv-events kv-event-source \
         kv-event-replay-source kv-event-block-size block-size kv-event-model api-key backend policy \
         prefill-policy decode-policy cache-threshold balance-abs-threshold balance-rel-threshold \
         router-temperature kv-penalty-host kv-penalty-disk kv-aware-session-affinity-ttl-secs \
         max-idle-secs assignment-mode max-payload-size request-timeout-secs shutdown-grace-period-secs \
         max-concurrent-requests queue-size queue-timeout-secs rate-limit-tokens-per-second \
         retry-max-retries health-check-interval-secs health-check-timeout-secs health-check-endpoint \
         prometheus-port prometheus-host service-discovery-port service-discovery-namespace tls-cert-path \
         tls-key-path client-cert-path client-key-path otlp-traces-endpoint otel-sampling-ratio \
         history-backend",
        One,
    ),
    read(
        "worker-urls cors-allowed-origins request-id-headers selector prefill-selector decode-selector \
         ca-cert-paths control-plane-api-keys",
        Many,
    ),
    read("prefill", Pair),
    read("vllm-pd-disaggregation pd-disaggregation disable-retries service-discovery enable-trace", Switch),
    // Flags for things that the gateway always does, or does in another way.
    translated("enable-igw", Switch, "built in: several models at once, each with its workers"),
    translated("dp-aware", Switch, "built in: SGLang reports its ranks, and the gateway chooses one"),
    approximated("log-level", One, "set the environment variable RUST_LOG"),
    approximated("log-json", Switch, "start the gateway with --log-json"),
    approximated("log-dir", One, "logs go to stderr: let the service manager keep them"),
    missing("prometheus-duration-buckets", Many, "buckets are fixed (docs/metrics.md)"),
    approximated("worker-startup-timeout-secs", One, "the gateway starts at once and waits for workers"),
    approximated(
        "worker-startup-check-interval worker-startup-delay",
        One,
        "workers are asked every probe.interval",
    ),
    approximated("remove-unhealthy-workers", Switch, "they stay listed and get no requests"),
    approximated("load-monitor-interval", One, "engine figures are read every probe.load_interval"),
    approximated("health-failure-threshold health-success-threshold", One, HEALTH),
    missing("disable-health-check", Switch, "workers are always asked: an engine has to answer /health"),
    approximated("health-check-port", One, "probes ask /healthz and /readyz of server.admin_listen"),
    approximated(
        "retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor",
        One,
        BACKOFF,
    ),
    approximated(
        "cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs",
        One,
        BREAKER,
    ),
    missing("disable-circuit-breaker", Switch, "the breaker of a worker cannot be turned off"),
    approximated("eviction-interval-secs eviction-interval max-tree-size", One, INDEX),
    approximated("reasoning-parser tool-call-parser", One, PARSER),
    approximated("model-path", One, "set models.NAME.tokenizer to a directory, or leave prompts in bytes"),
    approximated("tokenizer-path", One, "set models.NAME.tokenizer to its directory"),
    approximated("chat-template", One, "it is read from the directory of models.NAME.tokenizer"),
    translated("disable-tokenizer-autoload", Switch, "no tokenizer is loaded unless models.NAME names it"),
    approximated("tokenizer-cache-enable-l0 tokenizer-cache-enable-l1", Switch, CACHE),
    approximated("tokenizer-cache-l0-max-entries tokenizer-cache-l1-max-memory", One, CACHE),
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
    missing(
        "wasm-middleware wasm-middleware-sha256 wasm-middleware-route",
        One,
        "policies choose workers and do not change requests",
    ),
    missing("enable-wasm", Switch, "policies choose workers and do not change requests"),
    missing("api-key-validation-urls", One, "keys are checked here: [[auth.keys]], or [auth.jwt]"),
    missing("mcp-config-path", One, "tools of MCP servers are not called"),
    missing(
        "oracle-wallet-path oracle-tns-alias oracle-connect-descriptor oracle-username oracle-password \
         oracle-pool-min oracle-pool-max oracle-pool-timeout-secs postgres-db-url postgres-pool-max \
         redis-url redis-pool-max redis-retention-days schema-config storage-hook-wasm-path",
        One,
        STORE,
    ),
    missing("oracle-external-auth", Switch, STORE),
    missing("storage-context-headers", Many, STORE),
    missing("jwt-issuer jwt-audience jwt-jwks-uri", One, JWT),
    missing("jwt-role-mapping", Many, JWT),
    approximated("enable-mesh", Switch, MESH),
    approximated("mesh-advertise-host mesh-host mesh-port mesh-server-name", One, MESH),
    approximated("mesh-peer-urls router-selector", Many, MESH),
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
    find_in(FLAGS, name)
}

/// Returns a flag of a table by its name.
pub(super) fn find_in(table: &[Flag], name: &str) -> Option<Flag> {
    table.iter().find(|flag| flag.names.split_whitespace().any(|known| known == name)).copied()
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
    names_in(FLAGS).map(|(name, _)| name)
}

/// Returns the names in a table, with the number of values of each.
#[cfg(test)]
pub(super) fn names_in(table: &'static [Flag]) -> impl Iterator<Item = (&'static str, Arity)> {
    table.iter().flat_map(|flag| flag.names.split_whitespace().map(|name| (name, flag.arity)))
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
