//! The flags that `smg` 1.13 has besides those of sglang-router. None changes which workers there are.

use super::flags::{
    self,
    Arity::{Many, One, Switch},
    Flag, approximated, missing, translated,
};

const LOAD: &str = "built-in policies weigh bookings and engine figures by rules of their own: see policies";
const OVERLOAD: &str = "a worker whose engine refuses requests is left out for a pause; [routing.busy] sets limits of \
                        engine figures";
const WARM_UP: &str = "a worker that just started gets a rising share of decisions (behaviour F6)";
const STUCK: &str = "set probe.stuck_after (behaviour B7)";
const CACHE: &str = "the prefix index follows KV events, or its own decisions for index.ttl";
const SESSION: &str = "set routing.session_affinity: a session is named in x-session-id";
const MEDIA: &str = "not needed: engines fetch and prepare images themselves";
const JOBS: &str = "not needed: changes of the fleet are not queued";
const TIMES: &str = "set [timeouts] and [server]: connections and bodies have deadlines";
const RATES: &str = "set [tenants]: requests and tokens a minute, weights and priorities";
const KEYS: &str = "set [[auth.keys]] with the digest of each key and its tenant (pointsman key)";
const FILE: &str = "write [[discovery.files]]: its workers have the keys of [[workers]]";
const PODS: &str = "set labels and annotations of the pods (docs/kubernetes.md)";
const PREFILL: &str = "set max_concurrency of the prefill workers, and [queue]";
const STORE: &str = "stored responses are not served (behaviour I6)";
const RL: &str = "engines are not controlled through the gateway: ask them directly";
const MESH: &str = "[replicas]: gateways speak over NATS, whose url may be tls://";
const CONNECTIONS: &str = "engines are called over HTTP/1.1; set upstream.idle_timeout";
const AUDIT: &str = "changes by the admin API are in the log, with who made them";
const ALIAS: &str = "a model has the names of its engine (--served-model-name)";

/// All flags.
const FLAGS: &[Flag] = &[
    approximated(
        "least-load-kv-pressure-weight least-load-default-throughput least-load-mean-prefill-tokens \
         least-load-max-waiting-requests power-of-two-load-metric balance-token-usage-threshold \
         prefix-hash-balance-abs-threshold spill-abs-threshold spill-rel-threshold overlap-decay \
         selection-policy selection-temperature selection-accounting-ttl-ms",
        One,
        LOAD,
    ),
    approximated("dp-minimum-tokens-scheduler", Switch, LOAD),
    approximated(
        "overload-token-usage-threshold worker-overload-waiting-requests worker-overload-token-usage",
        One,
        OVERLOAD,
    ),
    approximated("worker-overload-protection worker-overload-shed", Switch, OVERLOAD),
    missing("disable-worker-overload-protection", Switch, OVERLOAD),
    approximated(
        "worker-warmup-secs worker-warmup-share worker-warmup-blocks worker-warmup-thin-ratio \
         worker-warmup-divert-every",
        One,
        WARM_UP,
    ),
    approximated("worker-stall-secs worker-wedge-secs worker-stale-secs", One, STUCK),
    approximated(
        "kv-index kv-indexer-ttl-secs kv-indexer-max-entries cache-index cache-ttl-secs \
         cache-match-threshold",
        One,
        CACHE,
    ),
    approximated("cache-boundaries", Many, CACHE),
    approximated("sticky-key-idle-secs", One, SESSION),
    approximated("routing-key-override", Switch, SESSION),
    approximated("routing-key-headers", Many, SESSION),
    approximated(
        "multimodal-tensor-transport multimodal-shm-min-bytes multimodal-max-inflight-bytes \
         mm-per-request-image-limit mm-processing mm-pixel-cache-mb mm-allowed-media-domains \
         rdma-listen-ip rdma-slot-ttl-s",
        One,
        MEDIA,
    ),
    approximated("mm-pixel-rdma mm-allow-private-media-hosts log-mm-timing", Switch, MEDIA),
    translated("job-queue-capacity job-queue-concurrency", One, JOBS),
    approximated("disable-load-monitoring", Switch, "set probe.load_interval = 0"),
    translated(
        "engine-metrics worker-auto-recovery no-remove-unhealthy-workers",
        Switch,
        "built in: engine figures are read",
    ),
    missing("no-worker-auto-recovery", Switch, "a worker is used again when it is healthy"),
    approximated(
        "header-read-timeout-secs idle-connection-timeout-secs stream-body-stall-timeout-secs \
         max-buffered-request-bytes",
        One,
        TIMES,
    ),
    missing("sse-keepalive-secs", One, "streams get no comments of the gateway"),
    approximated(
        "prefill-max-inflight-requests-per-worker prefill-queue-size prefill-queue-timeout-secs \
         pd-admission-wait-secs",
        One,
        PREFILL,
    ),
    missing(
        "priority-scheduler-default-max-class priority-scheduler-config \
         priority-scheduler-tenant-metric-top-n tenant-rate-limit-config",
        One,
        RATES,
    ),
    missing("priority-scheduler-enabled tenant-rate-limit-enabled", Switch, RATES),
    missing("tenant-header-name", One, KEYS),
    missing("trust-tenant-header", Switch, KEYS),
    missing("tenant-api-key", Many, KEYS),
    missing("discovery-provider discovery-file discovery-check-interval-secs", One, FILE),
    missing("kv-connector-annotation kv-engine-id-annotation model-id-from", One, PODS),
    missing(
        "max-background-responses history-memory-max-responses history-memory-max-items \
         history-memory-retention-secs postgres-op-timeout-secs redis-op-timeout-secs \
         postgres-pool-max-size redis-pool-max-size oracle-dsn oracle-user",
        One,
        STORE,
    ),
    missing("rl-control-timeout-secs rl-fanout-concurrency", One, RL),
    missing("enable-rl", Switch, RL),
    approximated("mesh-tls-ca-cert mesh-tls-cert mesh-tls-key", One, MESH),
    approximated("upstream-pool-idle-timeout-secs", One, CONNECTIONS),
    approximated("upstream-http2", Switch, CONNECTIONS),
    missing("model-alias", Many, ALIAS),
    approximated("parser", One, "not needed: the engine parses"),
    approximated(
        "tokenizer-cache-l0-max-memory",
        One,
        "set models.NAME.tokenizer_cache_bytes with models.NAME.tokenizer",
    ),
    missing("zmq-engine-count", One, "engines are called over HTTP"),
    missing("jemalloc-prof-dir", One, "heap profiles are not written"),
    approximated(
        "drain-settle-secs",
        One,
        "a worker that leaves drains: its requests end, for up to timeouts.drain",
    ),
    missing(
        "stream-request-bodies-over",
        One,
        "bodies are read before a worker is chosen: see server.max_body_bytes",
    ),
    approximated("runtime-worker-threads", One, "set server.threads"),
    missing("webrtc-bind-addr webrtc-stun-server", One, "WebRTC is not served"),
    missing("jwt-role-claim", One, "the admin API has no roles of tokens"),
    approximated("disable-audit-logging", Switch, AUDIT),
];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<Flag> {
    flags::find_in(FLAGS, name)
}
