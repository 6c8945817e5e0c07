//! The flags of production-stack's router, which is also called vllm-router.
//!
//! They come from vllm-project/production-stack, `src/vllm_router/parsers/parser.py`.

use super::flags::{
    self,
    Arity::{One, Switch},
    Flag, approximated, missing, read, translated,
};

const STATS: &str =
    "engine figures are read every probe.load_interval, and metrics cover an hour (docs/metrics.md)";
const LMCACHE: &str = "no LMCache controller is asked: give workers kv_events, and what they hold is known";
const BATCH: &str = "files and batches are not served";
const SENTRY: &str = "errors go to the log and to metrics";
const HEALTH: &str = "every worker is asked, every probe.interval";

/// All flags, apart from `--host` and `--port`.
const FLAGS: &[Flag] = &[
    // Read by the translation.
    read(
        "service-discovery static-backends static-models static-model-labels prefill-model-labels \
         decode-model-labels k8s-port k8s-namespace k8s-label-selector routing-logic otel-endpoint",
        One,
    ),
    // Flags for things that the gateway always does, or does in another way.
    approximated("k8s-service-discovery-type", One, "workers are pods, by their addresses"),
    approximated("k8s-watcher-timeout-seconds", One, "the watch lasts discovery.kubernetes.watch"),
    approximated("static-model-types", One, "read from engines: /v1/models, /health"),
    translated("static-backend-health-checks", Switch, HEALTH),
    approximated("static-backend-health-check-interval", One, HEALTH),
    approximated(
        "static-backend-health-check-timeout-seconds backend-health-check-timeout-seconds",
        One,
        "set probe.timeout",
    ),
    approximated("session-key", One, "a session is named in x-session-id: let clients send that"),
    translated("request-rewriter", One, "requests are not rewritten"),
    approximated("engine-stats-interval request-stats-window log-stats-interval", One, STATS),
    approximated("log-stats", Switch, STATS),
    approximated("log-level", One, "set the environment variable RUST_LOG"),
    approximated("log-format", One, "start the gateway with --log-json for JSON"),
    approximated("otel-service-name", One, "the service is called pointsman in traces"),
    translated("otel-secure", Switch, "https:// in traces.endpoint"),
    approximated("kv-aware-threshold", One, "the cost weighs cached blocks and load (behaviour G)"),
    approximated("prefix-min-match-length", One, "cache-aware has cache-threshold, a share"),
    approximated(
        "max-instance-failover-reroute-attempts",
        One,
        "set routing.retries: a retry goes to another worker",
    ),
    translated("version", Switch, "pointsman --version"),
    // Flags without a counterpart.
    missing("root-path", One, "paths begin at /: let the proxy before the gateway remove the prefix"),
    missing("static-aliases", One, "a model has the names of its engine (--served-model-name)"),
    missing("callbacks", One, "policies choose workers and do not see requests' texts"),
    missing("enable-batch-api", Switch, BATCH),
    missing("file-storage-class file-storage-path batch-processor", One, BATCH),
    missing(
        "dynamic-config-yaml dynamic-config-json",
        One,
        "import its keys as flags; this file is reloaded on change",
    ),
    missing("feature-gates", One, "there is no semantic cache and no detection of personal data"),
    missing(
        "semantic-cache-model semantic-cache-dir semantic-cache-threshold",
        One,
        "answers are not cached",
    ),
    missing("sentry-dsn sentry-traces-sample-rate sentry-profile-session-sample-rate", One, SENTRY),
    missing(
        "lmcache-controller-port lmcache-controller-reply-port lmcache-controller-heartbeat-port \
         lmcache-health-check-interval lmcache-worker-timeout",
        One,
        LMCACHE,
    ),
    missing("external-providers-config", One, "add them as [[workers]] with engine = \"openai\""),
];

/// Flags that the other vllm-router has, too.
const COMMON: [&str; 3] = ["service-discovery", "log-level", "version"];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<Flag> {
    flags::find_in(FLAGS, name)
}

/// Returns whether arguments belong to this router.
pub(super) fn is_meant<'a>(arguments: impl Iterator<Item = &'a str>) -> bool {
    let mut arguments = arguments.peekable();
    while let Some(argument) = arguments.next() {
        let Some(flag) = argument.strip_prefix("--") else { continue };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, arguments.peek().copied()),
        };
        let of_kind = ["static", "k8s", "external-only"];
        if name == "service-discovery" && value.is_some_and(|value| of_kind.contains(&value)) {
            return true;
        }
        if find(name).is_some() && !COMMON.contains(&name) {
            return true;
        }
    }
    false
}

/// Returns the names of all flags.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = (&'static str, flags::Arity)> {
    flags::names_in(FLAGS)
}
