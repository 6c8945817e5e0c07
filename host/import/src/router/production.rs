//! Translates the flags of production-stack's router, which is also called vllm-router, to those of the other
//! vllm-router where these say the same.

use std::cell::Cell;

use anyhow::bail;

use super::{
    arguments::{CommandLine, Given},
    production_flags::find,
};
use crate::report::{
    Kind::{Missing, Translated},
    Place,
};

/// Translation of the routing logic of a pair that hands over by LMCache.
const LMCACHE: &str = "its engines hand the KV cache over by LMCache, without kv_transfer_params in requests: start \
                       them with NixlConnector, or every request fails";

/// Combined meaning of the other vllm-router's flags.
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
///
/// # Errors
/// Lists with an entry for each engine differ in length.
pub(super) fn translate(line: &mut CommandLine) -> anyhow::Result<()> {
    let given = std::mem::take(&mut line.given);
    let router = Router::of(&given);
    router.check_lengths()?;
    let mut out = router.defaults();
    for given in &given {
        if given.name == "static-backends" && router.is_last(given) {
            let models = owned(&router.models);
            line.models = split(given.value()).iter().map(|url| (*url).to_owned()).zip(models).collect();
        }
        out.extend(router.translated(given));
    }
    line.given = out;
    Ok(())
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
        self.given.iter().rev().find(|given| given.name == name && !given.is_variable)
    }

    /// Refuses lists with an entry for each engine that are shorter or longer than that of the engines.
    fn check_lengths(&self) -> anyhow::Result<()> {
        let Some(engines) = self.last("static-backends") else { return Ok(()) };
        let count = split(engines.value()).len();
        for (flag, list) in [("static-models", &self.models), ("static-model-labels", &self.labels)] {
            if let Some(given) = self.last(flag).filter(|_| !list.is_empty() && list.len() != count) {
                bail!(
                    "{}: {} entries for {count} of --static-backends: give one for each",
                    given.at(),
                    list.len()
                );
            }
        }
        Ok(())
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
            .map(|(name, flag, value)| Given {
                written: format!("--{name}"),
                ..as_flag(flag, &[value], None)
            })
            .collect()
    }

    /// The flags of this router that one of the other means.
    fn translated(&self, given: &Given) -> Vec<Given> {
        let value = given.value();
        let as_noted = |note| vec![Given { note: Some(note), ..given.again() }];
        match given.name.as_str() {
            _ if given.is_variable => vec![given.again()],
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
            "otel-endpoint" => {
                let is_secure = self.last("otel-secure").is_some();
                let host = value.split_once("://").map_or(value, |(_, host)| host);
                let secure = format!("https://{host}");
                let endpoint = if is_secure && !host.is_empty() { secure.as_str() } else { value };
                vec![
                    as_flag("enable-trace", &[], Some(given)),
                    as_flag("otlp-traces-endpoint", &[endpoint], Some(given)),
                ]
            }
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
            let note = "nothing distinguishes the pods of prefill and decode: give each leg one label";
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
        "kvaware" => "kv_aware",
        // `prefixaware` is a rule of this router only. Another one is not known, and reported as such.
        other => other,
    };
    let mut out = vec![as_flag("policy", &[policy], Some(given))];
    if logic.starts_with("disaggregated_prefill") {
        out.push(as_flag("vllm-pd-disaggregation", &[], Some(given)));
    }
    if logic == "disaggregated_prefill" {
        out.push(Given { note: Some((Missing, LMCACHE)), ..given.again() });
    }
    out
}

/// A flag of the other vllm-router, in the place of this router's.
fn as_flag(name: &str, values: &[&str], original: Option<&Given>) -> Given {
    Given {
        name: name.to_owned(),
        written: original.map_or_else(|| format!("--{name}"), |given| given.written.clone()),
        values: values.iter().map(|value| (*value).to_owned()).collect(),
        place: original.map_or(Place::Default, |given| given.place),
        is_told: Cell::new(false),
        original: original.map(Given::shown),
        note: None,
        is_variable: false,
    }
}

fn split(text: &str) -> Vec<&str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect()
}

fn owned(parts: &[&str]) -> Vec<String> {
    parts.iter().map(|part| (*part).to_owned()).collect()
}
