//! The flags of production-stack's router, which is also called vllm-router. They become those of the other
//! vllm-router where these say the same.
//!
//! The flags are those of vllm-project/production-stack, `src/vllm_router/parsers/parser.py`.

use std::cell::Cell;

use super::{
    arguments::{CommandLine, Given},
    flags::{Arity, Flag, read, told},
};
use crate::report::{
    Kind::{Approximated, Missing, Translated},
    Place,
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
    // What the gateway does anyway, or otherwise.
    told("k8s-service-discovery-type", Arity::One, Approximated, "workers are pods, by their addresses"),
    told(
        "k8s-watcher-timeout-seconds",
        Arity::One,
        Approximated,
        "the watch lasts discovery.kubernetes.watch",
    ),
    told("static-model-types", Arity::One, Approximated, "the engine's /v1/models and /health tell"),
    told("static-backend-health-checks", Arity::Switch, Translated, HEALTH),
    told("static-backend-health-check-interval", Arity::One, Approximated, HEALTH),
    told("static-backend-health-check-timeout-seconds", Arity::One, Approximated, "set probe.timeout"),
    told("backend-health-check-timeout-seconds", Arity::One, Approximated, "set probe.timeout"),
    told(
        "session-key",
        Arity::One,
        Approximated,
        "a session is named in x-session-id: let clients send that",
    ),
    told("request-rewriter", Arity::One, Translated, "requests are not rewritten"),
    told("engine-stats-interval", Arity::One, Approximated, STATS),
    told("request-stats-window", Arity::One, Approximated, STATS),
    told("log-stats", Arity::Switch, Approximated, STATS),
    told("log-stats-interval", Arity::One, Approximated, STATS),
    told("log-level", Arity::One, Approximated, "set the environment variable RUST_LOG"),
    told("log-format", Arity::One, Approximated, "start the gateway with --log-json for JSON"),
    told("otel-service-name", Arity::One, Approximated, "the service is called pointsman in traces"),
    told("otel-secure", Arity::Switch, Approximated, "write https:// in traces.endpoint"),
    told(
        "kv-aware-threshold",
        Arity::One,
        Approximated,
        "the cost weighs cached blocks and load (behaviour G)",
    ),
    told("prefix-min-match-length", Arity::One, Approximated, "cache-aware has cache-threshold, a share"),
    told(
        "max-instance-failover-reroute-attempts",
        Arity::One,
        Approximated,
        "set routing.retries: a retry goes to another worker",
    ),
    told("version", Arity::Switch, Translated, "pointsman --version"),
    // What has no counterpart.
    told(
        "root-path",
        Arity::One,
        Missing,
        "paths begin at /: let the proxy before the gateway remove the prefix",
    ),
    told("static-aliases", Arity::One, Missing, "a model has the names of its engine (--served-model-name)"),
    told("callbacks", Arity::One, Missing, "policies choose workers and do not see requests' texts"),
    told("enable-batch-api", Arity::Switch, Missing, BATCH),
    told("file-storage-class", Arity::One, Missing, BATCH),
    told("file-storage-path", Arity::One, Missing, BATCH),
    told("batch-processor", Arity::One, Missing, BATCH),
    told(
        "dynamic-config-yaml",
        Arity::One,
        Missing,
        "import its keys as flags; this file is reloaded on change",
    ),
    told(
        "dynamic-config-json",
        Arity::One,
        Missing,
        "import its keys as flags; this file is reloaded on change",
    ),
    told(
        "feature-gates",
        Arity::One,
        Missing,
        "there is no semantic cache and no detection of personal data",
    ),
    told("semantic-cache-model", Arity::One, Missing, "answers are not cached"),
    told("semantic-cache-dir", Arity::One, Missing, "answers are not cached"),
    told("semantic-cache-threshold", Arity::One, Missing, "answers are not cached"),
    told("sentry-dsn", Arity::One, Missing, SENTRY),
    told("sentry-traces-sample-rate", Arity::One, Missing, SENTRY),
    told("sentry-profile-session-sample-rate", Arity::One, Missing, SENTRY),
    told("lmcache-controller-port", Arity::One, Missing, LMCACHE),
    told("lmcache-controller-reply-port", Arity::One, Missing, LMCACHE),
    told("lmcache-controller-heartbeat-port", Arity::One, Missing, LMCACHE),
    told("lmcache-health-check-interval", Arity::One, Missing, LMCACHE),
    told("lmcache-worker-timeout", Arity::One, Missing, LMCACHE),
    told(
        "external-providers-config",
        Arity::One,
        Missing,
        "add them as [[workers]] with engine = \"openai\"",
    ),
];

/// Flags that the other vllm-router has, too.
const COMMON: [&str; 3] = ["service-discovery", "log-level", "version"];

/// Returns a flag by its name.
pub(super) fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}

/// Returns whether arguments are those of this router.
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

/// What the flags of the other vllm-router say together.
struct Router<'a> {
    given: &'a [Given],
    /// The routing logic runs prefill and decode on engines of their own.
    splits: bool,
    /// Labels of the engines, of those that prefill, and of those that decode.
    labels: Vec<&'a str>,
    prefill: Vec<&'a str>,
    decode: Vec<&'a str>,
    models: Vec<&'a str>,
}

/// Puts the flags of the other vllm-router in the place of this router's.
pub(super) fn translate(line: &mut CommandLine) {
    let given = std::mem::take(&mut line.given);
    let router = Router::of(&given);
    let mut out = router.defaults();
    for given in &given {
        if given.name == "static-backends" && router.is_last(given) {
            let models = owned(&router.models);
            line.models = split(given.value()).iter().map(|url| (*url).to_owned()).zip(models).collect();
        }
        out.extend(router.translated(given));
    }
    line.given = out;
}

impl<'a> Router<'a> {
    fn of(given: &'a [Given]) -> Self {
        let router =
            Self { given, splits: false, labels: vec![], prefill: vec![], decode: vec![], models: vec![] };
        let list = |name: &str| router.last(name).map(|given| split(given.value())).unwrap_or_default();
        let logic = router.last("routing-logic").map_or("", Given::value);
        Self {
            splits: logic.starts_with("disaggregated_prefill"),
            labels: list("static-model-labels"),
            prefill: list("prefill-model-labels"),
            decode: list("decode-model-labels"),
            models: list("static-models"),
            given,
        }
    }

    /// The flag that counts of those with a name.
    fn last(&self, name: &str) -> Option<&'a Given> {
        self.given.iter().rev().find(|given| given.name == name)
    }

    fn is_last(&self, given: &Given) -> bool {
        self.last(&given.name).is_some_and(|last| last.place == given.place)
    }

    /// The defaults in which the routers differ.
    fn defaults(&self) -> Vec<Given> {
        let mut defaults = vec![("host", "host", "0.0.0.0"), ("port", "port", "8001")];
        if self.last("service-discovery").is_some_and(|given| given.value() == "k8s") {
            defaults.push(("k8s-port", "service-discovery-port", "8000"));
        }
        let absent = defaults.into_iter().filter(|(name, ..)| self.last(name).is_none());
        absent
            .map(|(_, flag, value)| Given { place: Place::Default, ..as_flag(flag, &[value], None) })
            .collect()
    }

    /// The flags of this router that one of the other means.
    fn translated(&self, given: &Given) -> Vec<Given> {
        let value = given.value();
        let as_noted = |note| vec![Given { note: Some(note), ..given.again() }];
        match given.name.as_str() {
            _ if !self.is_last(given) => vec![as_flag(&given.name, &[value], Some(given))],
            "service-discovery" if value == "k8s" => vec![as_flag("service-discovery", &[], Some(given))],
            "service-discovery" if value == "static" => {
                as_noted((Translated, "the workers of --static-backends"))
            }
            "service-discovery" => {
                as_noted((Missing, "no engines are named: add them as [[workers]] with engine = \"openai\""))
            }
            "static-backends" => {
                let legs = (self.prefill.as_slice(), self.decode.as_slice());
                backends(given, &split(value), &self.labels, self.splits, legs)
            }
            "static-models" => as_noted((Translated, "models of each worker")),
            "static-model-labels" | "prefill-model-labels" | "decode-model-labels" if self.splits => {
                as_noted((Translated, "the roles of the workers"))
            }
            "static-model-labels" | "prefill-model-labels" | "decode-model-labels" => {
                as_noted((Translated, "left out: only a routing logic of prefill and decode reads it"))
            }
            "k8s-port" => vec![as_flag("service-discovery-port", &[value], Some(given))],
            "k8s-namespace" => vec![as_flag("service-discovery-namespace", &[value], Some(given))],
            "k8s-label-selector" if self.splits => self.selectors(given),
            "k8s-label-selector" => vec![as_flag("selector", &[value], Some(given))],
            "routing-logic" => policies(given, value),
            "otel-endpoint" => vec![
                as_flag("enable-trace", &[], Some(given)),
                as_flag("otlp-traces-endpoint", &[value], Some(given)),
            ],
            name => vec![Given { note: find(name).and_then(|flag| flag.note), ..given.again() }],
        }
    }

    /// The selectors of the pods of each leg.
    fn selectors(&self, given: &Given) -> Vec<Given> {
        let mut out = Vec::new();
        for (flag, labels) in [("prefill-selector", &self.prefill), ("decode-selector", &self.decode)] {
            if let [label] = labels.as_slice() {
                out.push(as_flag(flag, &[&format!("{},model={label}", given.value())], Some(given)));
            }
        }
        if out.len() < 2 {
            let note = "the pods of prefill and decode are not told apart: give each leg one label";
            out.push(Given { note: Some((Missing, note)), ..given.again() });
        }
        out
    }
}

/// The workers of a list of URLs; their roles by the labels of their models.
fn backends(
    given: &Given,
    urls: &[&str],
    labels: &[&str],
    splits: bool,
    (prefill, decode): (&[&str], &[&str]),
) -> Vec<Given> {
    if !splits {
        return vec![as_flag("worker-urls", urls, Some(given))];
    }
    let mut out = Vec::new();
    for (at, url) in urls.iter().enumerate() {
        let label = labels.get(at).copied().unwrap_or_default();
        let flag = match label {
            _ if prefill.contains(&label) => "prefill",
            _ if decode.contains(&label) => "decode",
            _ => "worker-urls",
        };
        out.push(as_flag(flag, &[url], Some(given)));
    }
    out
}

/// The policy of a routing logic.
fn policies(given: &Given, logic: &str) -> Vec<Given> {
    let policy = match logic {
        "roundrobin" | "disaggregated_prefill" | "disaggregated_prefill_orchestrated" => "round_robin",
        "session" => "consistent_hash",
        "prefixaware" => "cache_aware",
        "kvaware" => "kv_aware",
        // It is not known: reported as such.
        other => other,
    };
    let mut out = vec![as_flag("policy", &[policy], Some(given))];
    if logic.starts_with("disaggregated_prefill") {
        out.push(as_flag("vllm-pd-disaggregation", &[], Some(given)));
    }
    out
}

/// A flag of the other vllm-router, in the place of this router's.
fn as_flag(name: &str, values: &[&str], original: Option<&Given>) -> Given {
    Given {
        name: name.to_owned(),
        values: values.iter().map(|value| (*value).to_owned()).collect(),
        place: original.map_or(Place::Default, |given| given.place),
        is_told: Cell::new(false),
        original: original.map(Given::shown),
        note: None,
    }
}

fn split(text: &str) -> Vec<&str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn owned(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).to_owned()).collect()
}

/// Returns the names of all flags.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = (&'static str, Arity)> {
    FLAGS.iter().map(|flag| (flag.name, flag.arity))
}
