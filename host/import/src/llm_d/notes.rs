//! Plugins whose type alone decides their translation.

use crate::report::Kind::{self, Approximated, Missing, Translated};

const SYNCER: &str = "[replicas]: gateways send each other their bookings over NATS, set its url";

/// Plugins that are built in, in other words or not at all.
const NOTES: &[(&str, Kind, &str)] = &[
    // Plugins whose work the gateway does by itself.
    ("metrics-data-source", Translated, "built in: probe.load_interval"),
    ("core-metrics-extractor", Translated, "built in: figures of vLLM and SGLang"),
    ("models-data-source", Translated, "built in: GET /v1/models of each engine"),
    ("models-data-extractor", Translated, "built in: GET /v1/models of each engine"),
    ("endpoint-notification-source", Translated, "built in: workers join and leave by their sources"),
    ("k8s-notification-source", Translated, "built in: [[discovery.kubernetes]] watches"),
    ("inflight-load-producer", Translated, "built in: bookings of this gateway"),
    ("session-id-producer", Translated, "built in: the session is in x-session-id"),
    ("disagg-headers-handler", Translated, "not needed: the gateway calls both engines itself"),
    ("prefill-header-handler", Translated, "not needed: the gateway calls both engines itself"),
    ("openai-parser", Translated, "built in"),
    ("anthropic-parser", Translated, "built in: /v1/messages"),
    ("vllmhttp-parser", Translated, "built in: the endpoints of docs/configuration.md"),
    (
        "sglanghttp-parser",
        Approximated,
        "the OpenAI endpoints are built in; SGLang's own /generate is not served",
    ),
    ("fcfs-ordering-policy", Translated, "built in: arrival within a priority"),
    ("slo-deadline-ordering-policy", Translated, "built in: x-slo-ttft-ms orders a tenant's requests"),
    ("edf-ordering-policy", Approximated, "give requests a target for the first token (x-slo-ttft-ms)"),
    ("static-usage-limit-policy", Translated, "built in: the thresholds do not change"),
    ("global-strict-fairness-policy", Approximated, "tenants share by weighted tokens ([tenants.NAME])"),
    ("round-robin-fairness-policy", Approximated, "tenants share by weighted tokens ([tenants.NAME])"),
    ("single-profile-handler", Translated, "one profile serves all requests"),
    ("always-disagg-pd-decider", Translated, "left out: no handler refers to it"),
    ("prefix-based-pd-decider", Translated, "left out: no handler refers to it"),
    ("local-syncer", Translated, "nothing is shared without [replicas]"),
    ("redis-syncer", Approximated, SYNCER),
    ("redis-state-store", Approximated, SYNCER),
    ("cross-replica-publisher", Approximated, SYNCER),
    ("models-responder", Translated, "built in: GET /v1/models"),
    (
        "approx-prefix-cache-producer",
        Translated,
        "built in: the prefix index; no scorer of a profile reads this",
    ),
    ("precise-prefix-cache-producer", Translated, "left out: no scorer of a profile reads it"),
    // Plugins without a counterpart.
    ("passthrough-parser", Missing, "paths that the gateway does not know are answered with 404"),
    ("vllmgrpc-parser", Missing, "engines are called over HTTP: give them an OpenAI server"),
    ("vertexai-parser", Missing, "send OpenAI requests"),
    (
        "always-disagg-multimodal-decider",
        Missing,
        "there is no encode leg; the prefill worker encodes images",
    ),
    ("mm-embeddings-cache-producer", Missing, "images count as parts of the prompt's blocks (behaviour H6)"),
    (
        "burst-prefix-cache-producer",
        Missing,
        "requests are not collected in windows: each is decided on arrival",
    ),
    ("p2p-source-producer", Missing, "the gateway does not make engines fetch blocks from each other"),
    ("multicluster-approx-prefix-cache-producer", Missing, "a gateway serves one cluster"),
    (
        "multicluster-file-discovery",
        Missing,
        "a gateway serves one cluster: use [[discovery.files]] for each",
    ),
    ("multicluster-metrics-data-source", Missing, "a gateway serves one cluster"),
    ("multicluster-metrics-extractor", Missing, "a gateway serves one cluster"),
    (
        "predicted-latency-producer",
        Missing,
        "left out: builtin = \"predicted-latency\" predicts without a sidecar",
    ),
    ("latency-slo-admitter", Missing, "set limits instead: [tenants], routing.busy and queue.timeout"),
    (
        "probabilistic-admitter",
        Missing,
        "set limits instead: queue.max_inflight, routing.busy, server.busy_status",
    ),
    ("request-attribute-reporter", Missing, "see the metrics, receipts and traces of docs/metrics.md"),
    ("agent-identity", Missing, "name tenants by keys ([[auth.keys]]) or server.tenant_header"),
    ("program-aware-fairness", Missing, "tenants share by weighted tokens ([tenants.NAME])"),
    ("priority-holdback-policy", Missing, "no capacity is held back for a priority: use tenants.NAME.weight"),
    ("soft-reflective-ceiling-policy", Missing, "thresholds are fixed: set routing.busy"),
    ("sheddable-eviction-filter", Missing, "requests in flight are not ended for others"),
    ("priority-then-time-eviction-order-policy", Missing, "requests in flight are not ended for others"),
    (
        "dcgm-data-source",
        Missing,
        "the gateway reads no GPU figures: give workers labels, or use engine figures",
    ),
    (
        "dcgm-extractor",
        Missing,
        "the gateway reads no GPU figures: give workers labels, or use engine figures",
    ),
    (
        "topology-extractor",
        Missing,
        "set topology of each worker (pods: the annotation pointsman.dev/topology.KEY)",
    ),
    ("disaggregatedset-rollout-pod-extractor", Missing, "drain the workers of the old set (pointsman drain)"),
    ("destination-endpoint-served-verifier", Missing, "it is for tests"),
];

/// Returns how a plugin of this type is translated; `None` when that depends on more than the type.
pub(super) fn of(kind: &str) -> Option<(Kind, &'static str)> {
    NOTES.iter().find(|(name, ..)| *name == kind).map(|(_, kind, ours)| (*kind, *ours))
}

/// Returns how a feature gate is translated.
pub(super) fn gate(gate: &str) -> (Kind, &'static str) {
    let (name, value) = gate.split_once('=').unwrap_or((gate, "true"));
    match name {
        _ if value == "false" => (Translated, "left out: it is off"),
        "flowControl" => (Translated, "[queue]: see flowControl"),
        "dataLayer" | "prepareDataPlugins" | "experimentalDatalayer" => (Translated, "built in"),
        "haPopulateNonLeaderDatastore" => {
            (Translated, "not needed: every gateway serves, there is no leader")
        }
        _ => (Missing, "it is not known: leave it out"),
    }
}
