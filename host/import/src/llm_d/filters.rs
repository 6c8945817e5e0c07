//! Filters: roles of workers and busy thresholds.

use super::{
    Import,
    config::{Plugin, count, number},
    slot::SlotPlan,
};
use crate::{
    report::{Kind, Place, plain},
    yaml::Node,
};

/// The label of llm-d that names a role.
const ROLE_LABEL: &str = "llm-d.ai/role";

/// Filters without counterpart, and what to do.
const MISSING: [(&str, &str); 7] = [
    ("encode-filter", "left out: there is no encode leg; the prefill worker encodes images"),
    (
        "slo-headroom-tier-filter",
        "left out: builtin = \"predicted-latency\" has predictions, but no SLO tiers",
    ),
    (
        "topology-affinity-filter",
        "left out: set topology and kv_transfer = \"required:DOMAIN\" on the prefill workers",
    ),
    (
        "endpoint-attribute-filter",
        "left out: policies do not see attributes; label-number/KEY is a worker's label",
    ),
    ("header-based-testing-filter", "left out: it is for tests; x-worker-instance-id names a worker"),
    ("multicluster-session-affinity-filter", "left out: a gateway serves one cluster"),
    ("disaggregatedset-rollout-screener", "left out: drain the workers of the old set (pointsman drain)"),
];

/// Filters that become something else.
const KNOWN: [&str; 9] = [
    "decode-filter",
    "prefill-filter",
    "by-label",
    "by-label-selector",
    "label-selector-filter",
    "utilization-filter",
    "utilization-detector",
    "session-affinity-filter",
    "prefix-cache-affinity-filter",
];

/// Returns whether the type is a filter's.
pub(super) fn is_filter(kind: &str) -> bool {
    KNOWN.contains(&kind) || MISSING.iter().any(|(name, _)| *name == kind)
}

impl Import<'_> {
    /// Translates a filter of a profile that becomes the slots `legs`.
    pub(super) fn filter(
        &mut self,
        plan: &mut SlotPlan,
        plugin: &Plugin<'_>,
        place: Place,
        legs: &[&str],
    ) -> anyhow::Result<()> {
        let theirs = format!("filter `{}`", plain(plugin.name));
        let missing = MISSING.iter().find(|(name, _)| *name == plugin.kind);
        let (kind, ours) = match plugin.kind {
            _ if missing.is_some() => {
                plugin.read_all();
                (Kind::Missing, missing.map_or("", |(_, advice)| advice).to_owned())
            }
            "decode-filter" | "prefill-filter" => {
                let ours = format!("the role of each worker; in Kubernetes from the label {ROLE_LABEL}");
                (Kind::Translated, ours)
            }
            "by-label" | "by-label-selector" | "label-selector-filter" => label_filter(plugin),
            "session-affinity-filter" => self.session_affinity(plugin)?,
            "prefix-cache-affinity-filter" => self.cache_affinity(plan, plugin, place)?,
            "utilization-detector" => self.detector_thresholds(plugin, legs)?,
            _ => self.utilization(plugin, legs)?,
        };
        self.report.add(kind, place, theirs, ours);
        Ok(())
    }

    /// Busy thresholds of a list of conditions.
    fn utilization(&mut self, plugin: &Plugin<'_>, legs: &[&str]) -> anyhow::Result<(Kind, String)> {
        let soft = plugin.text("fallbackOnEmpty") == Some("true");
        plugin.param("inFlightLoadProducerName");
        let mut left_out = Vec::new();
        for condition in plugin.param("conditions").map(Node::list).unwrap_or_default() {
            let metric = condition.get("metric").and_then(Node::text).unwrap_or_default();
            let Some(most) = condition.get("maxValue") else { continue };
            match metric {
                "waiting-queue" => self.busy(legs, "engine_queue", floor(number(most, "maxValue")?), plugin),
                "kv-cache-utilization" => self.busy(legs, "kv_usage", number(most, "maxValue")?, plugin),
                "active-requests" => {
                    let limit = count(most, "maxValue")?.saturating_add(1);
                    self.max_concurrency =
                        Some((limit, format!("active-requests of {}", plain(plugin.name))));
                }
                other => left_out.push(plain(other)),
            }
        }
        let thresholds = "routing.busy (and max_concurrency for active-requests)";
        if !left_out.is_empty() {
            let ours =
                format!("{thresholds}, without the metrics {}: they are left out", left_out.join(", "));
            return Ok((Kind::Missing, ours));
        }
        Ok(if soft {
            let ours =
                "when all workers are beyond a threshold, requests wait or are refused; llm-d uses them";
            (Kind::Approximated, format!("{thresholds}: {ours}"))
        } else {
            (Kind::Translated, thresholds.to_owned())
        })
    }

    /// Busy thresholds of a saturation detector.
    pub(super) fn detector_thresholds(
        &mut self,
        plugin: &Plugin<'_>,
        legs: &[&str],
    ) -> anyhow::Result<(Kind, String)> {
        let headroom = 1.0 + plugin.number("headroom")?.unwrap_or(0.0);
        let queue = plugin.number("queueDepthThreshold")?.unwrap_or(5.0) * headroom;
        let usage = (plugin.number("kvCacheUtilThreshold")?.unwrap_or(0.8) * headroom).min(1.0);
        plugin.param("metricsStalenessThreshold");
        self.busy(legs, "engine_queue", floor(queue), plugin);
        self.busy(legs, "kv_usage", usage, plugin);
        let ours = "routing.busy: each worker is judged alone, and one without recent figures is not busy; \
                    llm-d's flow control takes the average of the pool";
        Ok((Kind::Approximated, ours.to_owned()))
    }

    fn busy(&mut self, legs: &[&str], key: &str, value: impl Into<toml::Value>, plugin: &Plugin<'_>) {
        let value = value.into();
        for leg in legs {
            let table = format!("routing.busy.{leg}");
            if !self.draft.set(&table, key, value.clone(), plain(plugin.name)) {
                let theirs = format!("{key} {value} of `{}`", plain(plugin.name));
                let ours = format!("{table}.{key}: another plugin gave another threshold, which is kept");
                self.report.add(Kind::Approximated, plugin.place, theirs, ours);
            }
        }
    }
}

/// A filter by a label: the role, or something that workers are selected by elsewhere.
fn label_filter(plugin: &Plugin<'_>) -> (Kind, String) {
    let labels = plugin.param("matchLabels").map(Node::entries).unwrap_or_default();
    let terms = plugin.param("matchExpressions").map(Node::list).unwrap_or_default();
    let of_terms = terms.iter().filter_map(|term| term.get("key")).filter_map(Node::text);
    let mut keys: Vec<&str> = labels.iter().map(|(key, _)| key.text.as_str()).chain(of_terms).collect();
    keys.extend(plugin.text("label"));
    for key in ["validValues", "allowsNoLabel"] {
        plugin.param(key);
    }
    if !keys.is_empty() && keys.iter().all(|key| *key == ROLE_LABEL) {
        return (
            Kind::Approximated,
            "the role of each worker: check that the labels give the same roles".to_owned(),
        );
    }
    let ours = "left out: give the selector of [[discovery.kubernetes]] these labels, or the workers a taint";
    (Kind::Missing, ours.to_owned())
}

/// A limit of requests; a part of it does not count.
#[expect(clippy::cast_possible_truncation, reason = "clamped to the range of a u32")]
fn floor(number: f64) -> i64 {
    number.clamp(0.0, f64::from(u32::MAX)) as i64
}
