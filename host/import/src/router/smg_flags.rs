//! The flags that `smg` 1.13 has besides those of sglang-router. None changes which workers there are.

use super::flags::{Arity, Flag};
use crate::report::Kind::{self, Approximated, Missing, Translated};

const LOAD: &str = "built-in policies weigh bookings and engine figures by rules of their own: see policies";
const OVERLOAD: &str = "a worker whose engine refuses requests is left out for a pause; [routing.busy] sets limits of \
                        engine figures";
const WARM_UP: &str = "a worker that just started gets a rising share of decisions (behaviour F6)";
const STUCK: &str = "set probe.wedge_after (behaviour B7)";
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

/// Flags with one translation: number of values, kind and translation, names.
type Group = (Arity, Kind, &'static str, &'static [&'static str]);

const GROUPS: &[Group] = &[
    (
        Arity::One,
        Approximated,
        LOAD,
        &[
            "least-load-kv-pressure-weight",
            "least-load-default-throughput",
            "least-load-mean-prefill-tokens",
            "least-load-max-waiting-requests",
            "power-of-two-load-metric",
            "balance-token-usage-threshold",
            "prefix-hash-balance-abs-threshold",
            "spill-abs-threshold",
            "spill-rel-threshold",
            "overlap-decay",
            "selection-policy",
            "selection-temperature",
            "selection-accounting-ttl-ms",
        ],
    ),
    (Arity::Switch, Approximated, LOAD, &["dp-minimum-tokens-scheduler"]),
    (
        Arity::One,
        Approximated,
        OVERLOAD,
        &[
            "overload-token-usage-threshold",
            "worker-overload-waiting-requests",
            "worker-overload-token-usage",
        ],
    ),
    (Arity::Switch, Approximated, OVERLOAD, &["worker-overload-protection", "worker-overload-shed"]),
    (Arity::Switch, Missing, OVERLOAD, &["disable-worker-overload-protection"]),
    (
        Arity::One,
        Approximated,
        WARM_UP,
        &[
            "worker-warmup-secs",
            "worker-warmup-share",
            "worker-warmup-blocks",
            "worker-warmup-thin-ratio",
            "worker-warmup-divert-every",
        ],
    ),
    (Arity::One, Approximated, STUCK, &["worker-stall-secs", "worker-wedge-secs", "worker-stale-secs"]),
    (
        Arity::One,
        Approximated,
        CACHE,
        &[
            "kv-index",
            "kv-indexer-ttl-secs",
            "kv-indexer-max-entries",
            "cache-index",
            "cache-ttl-secs",
            "cache-match-threshold",
        ],
    ),
    (Arity::Many, Approximated, CACHE, &["cache-boundaries"]),
    (Arity::One, Approximated, SESSION, &["sticky-key-idle-secs"]),
    (Arity::Switch, Approximated, SESSION, &["routing-key-override"]),
    (Arity::Many, Approximated, SESSION, &["routing-key-headers"]),
    (
        Arity::One,
        Approximated,
        MEDIA,
        &[
            "multimodal-tensor-transport",
            "multimodal-shm-min-bytes",
            "multimodal-max-inflight-bytes",
            "mm-per-request-image-limit",
            "mm-processing",
            "mm-pixel-cache-mb",
            "mm-allowed-media-domains",
            "rdma-listen-ip",
            "rdma-slot-ttl-s",
        ],
    ),
    (Arity::Switch, Approximated, MEDIA, &["mm-pixel-rdma", "mm-allow-private-media-hosts", "log-mm-timing"]),
    (Arity::One, Translated, JOBS, &["job-queue-capacity", "job-queue-concurrency"]),
    (Arity::Switch, Approximated, "set probe.load_interval = 0", &["disable-load-monitoring"]),
    (
        Arity::Switch,
        Translated,
        "built in: engine figures are read",
        &["engine-metrics", "worker-auto-recovery", "no-remove-unhealthy-workers"],
    ),
    (Arity::Switch, Missing, "a worker is used again when it is healthy", &["no-worker-auto-recovery"]),
    (
        Arity::One,
        Approximated,
        TIMES,
        &[
            "header-read-timeout-secs",
            "idle-connection-timeout-secs",
            "stream-body-stall-timeout-secs",
            "max-buffered-request-bytes",
        ],
    ),
    (Arity::One, Missing, "streams get no comments of the gateway", &["sse-keepalive-secs"]),
    (
        Arity::One,
        Approximated,
        PREFILL,
        &[
            "prefill-max-inflight-requests-per-worker",
            "prefill-queue-size",
            "prefill-queue-timeout-secs",
            "pd-admission-wait-secs",
        ],
    ),
    (
        Arity::One,
        Missing,
        RATES,
        &[
            "priority-scheduler-default-max-class",
            "priority-scheduler-config",
            "priority-scheduler-tenant-metric-top-n",
            "tenant-rate-limit-config",
        ],
    ),
    (Arity::Switch, Missing, RATES, &["priority-scheduler-enabled", "tenant-rate-limit-enabled"]),
    (Arity::One, Missing, KEYS, &["tenant-header-name"]),
    (Arity::Switch, Missing, KEYS, &["trust-tenant-header"]),
    (Arity::Many, Missing, KEYS, &["tenant-api-key"]),
    (Arity::One, Missing, FILE, &["discovery-provider", "discovery-file", "discovery-check-interval-secs"]),
    (Arity::One, Missing, PODS, &["kv-connector-annotation", "kv-engine-id-annotation", "model-id-from"]),
    (
        Arity::One,
        Missing,
        STORE,
        &[
            "max-background-responses",
            "history-memory-max-responses",
            "history-memory-max-items",
            "history-memory-retention-secs",
            "postgres-op-timeout-secs",
            "redis-op-timeout-secs",
            "postgres-pool-max-size",
            "redis-pool-max-size",
            "oracle-dsn",
            "oracle-user",
        ],
    ),
    (Arity::One, Missing, RL, &["rl-control-timeout-secs", "rl-fanout-concurrency"]),
    (Arity::Switch, Missing, RL, &["enable-rl"]),
    (Arity::One, Approximated, MESH, &["mesh-tls-ca-cert", "mesh-tls-cert", "mesh-tls-key"]),
    (Arity::One, Approximated, CONNECTIONS, &["upstream-pool-idle-timeout-secs"]),
    (Arity::Switch, Approximated, CONNECTIONS, &["upstream-http2"]),
    (Arity::Many, Missing, ALIAS, &["model-alias"]),
    (Arity::One, Approximated, "not needed: the engine parses", &["parser"]),
    (
        Arity::One,
        Approximated,
        "set models.NAME.tokenizer_cache_bytes with models.NAME.tokenizer",
        &["tokenizer-cache-l0-max-memory"],
    ),
    (Arity::One, Missing, "engines are called over HTTP", &["zmq-engine-count"]),
    (Arity::One, Missing, "heap profiles are not written", &["jemalloc-prof-dir"]),
    (
        Arity::One,
        Approximated,
        "a worker that leaves drains: its requests end, for up to timeouts.drain",
        &["drain-settle-secs"],
    ),
    (
        Arity::One,
        Missing,
        "bodies are read before a worker is chosen: see server.max_body_bytes",
        &["stream-request-bodies-over"],
    ),
    (Arity::One, Approximated, "set server.threads", &["runtime-worker-threads"]),
    (Arity::One, Missing, "WebRTC is not served", &["webrtc-bind-addr", "webrtc-stun-server"]),
    (Arity::One, Missing, "the admin API has no roles of tokens", &["jwt-role-claim"]),
    (Arity::Switch, Approximated, AUDIT, &["disable-audit-logging"]),
];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<Flag> {
    GROUPS.iter().find_map(|(arity, kind, ours, names)| {
        let name = names.iter().find(|known| **known == name)?;
        Some(Flag { name, arity: *arity, note: Some((*kind, ours)) })
    })
}
