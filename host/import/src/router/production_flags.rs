//! The flags of production-stack's router, which is also called vllm-router.
//!
//! They come from vllm-project/production-stack, `src/vllm_router/parsers/parser.py`.

use super::flags::{Arity, Flag, read, with_note};
use crate::report::Kind::{Approximated, Missing, Translated};

const STATS: &str =
    "engine figures are read every probe.load_interval, and metrics cover an hour (docs/metrics.md)";
const LMCACHE: &str = "no LMCache controller is asked: give workers kv_events, and what they hold is known";
const BATCH: &str = "files and batches are not served";
const SENTRY: &str = "errors go to the log and to metrics";
const HEALTH: &str = "every worker is asked, every probe.interval";

/// All flags, apart from `--host` and `--port`.
const FLAGS: &[Flag] = &[
    // Read by the translation.
    read("service-discovery", Arity::One),
    read("static-backends", Arity::One),
    read("static-models", Arity::One),
    read("static-model-labels", Arity::One),
    read("prefill-model-labels", Arity::One),
    read("decode-model-labels", Arity::One),
    read("k8s-port", Arity::One),
    read("k8s-namespace", Arity::One),
    read("k8s-label-selector", Arity::One),
    read("routing-logic", Arity::One),
    read("otel-endpoint", Arity::One),
    // Flags for things that the gateway always does, or does in another way.
    with_note("k8s-service-discovery-type", Arity::One, Approximated, "workers are pods, by their addresses"),
    with_note(
        "k8s-watcher-timeout-seconds",
        Arity::One,
        Approximated,
        "the watch lasts discovery.kubernetes.watch",
    ),
    with_note("static-model-types", Arity::One, Approximated, "read from engines: /v1/models, /health"),
    with_note("static-backend-health-checks", Arity::Switch, Translated, HEALTH),
    with_note("static-backend-health-check-interval", Arity::One, Approximated, HEALTH),
    with_note("static-backend-health-check-timeout-seconds", Arity::One, Approximated, "set probe.timeout"),
    with_note("backend-health-check-timeout-seconds", Arity::One, Approximated, "set probe.timeout"),
    with_note(
        "session-key",
        Arity::One,
        Approximated,
        "a session is named in x-session-id: let clients send that",
    ),
    with_note("request-rewriter", Arity::One, Translated, "requests are not rewritten"),
    with_note("engine-stats-interval", Arity::One, Approximated, STATS),
    with_note("request-stats-window", Arity::One, Approximated, STATS),
    with_note("log-stats", Arity::Switch, Approximated, STATS),
    with_note("log-stats-interval", Arity::One, Approximated, STATS),
    with_note("log-level", Arity::One, Approximated, "set the environment variable RUST_LOG"),
    with_note("log-format", Arity::One, Approximated, "start the gateway with --log-json for JSON"),
    with_note("otel-service-name", Arity::One, Approximated, "the service is called pointsman in traces"),
    with_note("otel-secure", Arity::Switch, Translated, "https:// in traces.endpoint"),
    with_note(
        "kv-aware-threshold",
        Arity::One,
        Approximated,
        "the cost weighs cached blocks and load (behaviour G)",
    ),
    with_note(
        "prefix-min-match-length",
        Arity::One,
        Approximated,
        "cache-aware has cache-threshold, a share",
    ),
    with_note(
        "max-instance-failover-reroute-attempts",
        Arity::One,
        Approximated,
        "set routing.retries: a retry goes to another worker",
    ),
    with_note("version", Arity::Switch, Translated, "pointsman --version"),
    // Flags without a counterpart.
    with_note(
        "root-path",
        Arity::One,
        Missing,
        "paths begin at /: let the proxy before the gateway remove the prefix",
    ),
    with_note(
        "static-aliases",
        Arity::One,
        Missing,
        "a model has the names of its engine (--served-model-name)",
    ),
    with_note("callbacks", Arity::One, Missing, "policies choose workers and do not see requests' texts"),
    with_note("enable-batch-api", Arity::Switch, Missing, BATCH),
    with_note("file-storage-class", Arity::One, Missing, BATCH),
    with_note("file-storage-path", Arity::One, Missing, BATCH),
    with_note("batch-processor", Arity::One, Missing, BATCH),
    with_note(
        "dynamic-config-yaml",
        Arity::One,
        Missing,
        "import its keys as flags; this file is reloaded on change",
    ),
    with_note(
        "dynamic-config-json",
        Arity::One,
        Missing,
        "import its keys as flags; this file is reloaded on change",
    ),
    with_note(
        "feature-gates",
        Arity::One,
        Missing,
        "there is no semantic cache and no detection of personal data",
    ),
    with_note("semantic-cache-model", Arity::One, Missing, "answers are not cached"),
    with_note("semantic-cache-dir", Arity::One, Missing, "answers are not cached"),
    with_note("semantic-cache-threshold", Arity::One, Missing, "answers are not cached"),
    with_note("sentry-dsn", Arity::One, Missing, SENTRY),
    with_note("sentry-traces-sample-rate", Arity::One, Missing, SENTRY),
    with_note("sentry-profile-session-sample-rate", Arity::One, Missing, SENTRY),
    with_note("lmcache-controller-port", Arity::One, Missing, LMCACHE),
    with_note("lmcache-controller-reply-port", Arity::One, Missing, LMCACHE),
    with_note("lmcache-controller-heartbeat-port", Arity::One, Missing, LMCACHE),
    with_note("lmcache-health-check-interval", Arity::One, Missing, LMCACHE),
    with_note("lmcache-worker-timeout", Arity::One, Missing, LMCACHE),
    with_note(
        "external-providers-config",
        Arity::One,
        Missing,
        "add them as [[workers]] with engine = \"openai\"",
    ),
];

/// Flags that the other vllm-router has, too.
const COMMON: [&str; 3] = ["service-discovery", "log-level", "version"];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<Flag> {
    FLAGS.iter().find(|flag| flag.name == name).copied()
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
pub(super) fn names() -> impl Iterator<Item = (&'static str, Arity)> {
    FLAGS.iter().map(|flag| (flag.name, flag.arity))
}
