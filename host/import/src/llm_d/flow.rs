//! Flow control: the queue, and when workers count as busy.

use anyhow::bail;

use super::{
    Import,
    config::{Plugin, number},
};
use crate::{
    report::{Kind, Place, plain},
    yaml::Node,
};

/// llm-d's limits of a request's wait and of a priority band.
const DEFAULT_TTL: &str = "60s";
const DEFAULT_REQUESTS: i64 = 5_000;

/// Report entry for thresholds when flow control is off.
const SHEDS_ONLY: &str = "left out: without flow control, llm-d sheds only requests of negative priority by it; set \
                          routing.busy to keep requests from busy workers";

/// All legs.
const LEGS: [&str; 3] = ["prefill", "decode", "aggregated"];

impl Import<'_> {
    /// Translates `flowControl` and the saturation detector.
    pub(super) fn flow_control(&mut self) -> anyhow::Result<()> {
        let config = self.config;
        let section = config.root.get("flowControl").filter(|node| !node.is_null());
        let is_on = config.has_gate("flowControl");
        if let Some(section) = section.filter(|_| !is_on) {
            let ours = "left out: llm-d reads it only with the feature gate flowControl";
            let place = Place::Line(section.line);
            let detector = section.get("saturationDetector");
            let only_detector = section.entries().len() == 1 && detector.is_some();
            let kind = if only_detector { Kind::Approximated } else { Kind::Translated };
            self.report.add(kind, place, "flowControl", ours);
        } else if is_on {
            self.queue(section)?;
        }
        let of_section = section.and_then(|section| section.get("saturationDetector"));
        let detector = of_section.or_else(|| config.root.get("saturationDetector"));
        let name = detector.and_then(|it| it.get("pluginRef")).and_then(Node::text);
        match detector.filter(|section| !section.entries().is_empty()) {
            Some(section) => self.detector_section(section, name, is_on),
            None => self.detector("utilization-detector", is_on),
        }
    }

    /// Translates the section `saturationDetector`: a reference to a plugin, or, as in earlier versions, the
    /// thresholds themselves.
    fn detector_section(&mut self, node: &Node, name: Option<&str>, is_on: bool) -> anyhow::Result<()> {
        let section = Plugin::section("saturationDetector", node);
        section.param("pluginRef");
        if let Some(name) = name {
            self.detector(name, is_on)?;
        } else if is_on {
            let (kind, ours) = self.detector_thresholds(&section, &LEGS)?;
            self.report.add(kind, section.place, section.name, ours);
        } else {
            for key in ["queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold"] {
                section.param(key);
            }
            self.report.add(Kind::Approximated, section.place, section.name, SHEDS_ONLY);
        }
        for (key, _) in node.entries() {
            if !section.has_read(&key.text) {
                let theirs = format!("saturationDetector.{}", plain(&key.text));
                let ours = "it has no counterpart: leave it out";
                self.report.add(Kind::Missing, Place::Line(key.line), theirs, ours);
            }
        }
        Ok(())
    }

    fn queue(&mut self, section: Option<&Node>) -> anyhow::Result<()> {
        let place = Place::Line(section.map_or(1, |section| section.line));
        let get = |key: &str| section.and_then(|section| section.get(key)).filter(|node| !node.is_null());
        let requests = get("maxRequests").map(quantity).transpose()?.filter(|requests| *requests > 0);
        let bytes = get("maxBytes").map(quantity).transpose()?.filter(|bytes| *bytes > 0);
        let ttl = get("defaultRequestTTL").map(duration).transpose()?;
        let source =
            |given: bool, key: &str| if given { key.to_owned() } else { format!("default of {key}") };
        self.draft
            .table("queue")
            .set("limit", requests.unwrap_or(DEFAULT_REQUESTS), source(requests.is_some(), "maxRequests"))
            .set(
                "timeout",
                ttl.as_deref().unwrap_or(DEFAULT_TTL),
                source(ttl.is_some(), "defaultRequestTTL"),
            );
        if let Some(bytes) = bytes {
            self.draft.set("queue", "bytes", bytes, "maxBytes");
        }
        self.report.add(
            Kind::Approximated,
            place,
            "flowControl",
            "[queue]: requests wait while every eligible worker is busy (routing.busy, max_concurrency) or \
             queue.max_inflight is reached; llm-d's limits count requests in flight, too",
        );
        for (key, node) in section.map(Node::entries).unwrap_or_default() {
            let (kind, ours) = match key.text.as_str() {
                "maxRequests" | "maxBytes" | "defaultRequestTTL" | "saturationDetector" => continue,
                "noEndpointRequestTTL" => (Kind::Missing, "without a worker the answer is 503 at once"),
                "usageLimitPolicyPluginRef" => (Kind::Missing, "thresholds are fixed: set routing.busy"),
                "enableEviction" if node.text() == Some("false") => (Kind::Translated, "requests stay"),
                "enableEviction" => (Kind::Missing, "requests in flight are not ended for others"),
                "defaultPriorityBand" | "defaultNegativePriorityBand" | "priorityBands" => (
                    Kind::Missing,
                    "priorities order the queue and share one limit; bound tenants with [tenants.NAME]",
                ),
                _ => (Kind::Missing, "it is not known: leave it out"),
            };
            self.report.add(kind, Place::Line(key.line), format!("flowControl.{}", key.text), ours);
        }
        Ok(())
    }

    /// The saturation detector, given or llm-d's own.
    fn detector(&mut self, name: &str, is_on: bool) -> anyhow::Result<()> {
        let config = self.config;
        let plugin = config.plugin(name).or_else(|| config.of_kind(name));
        match plugin {
            Some(plugin) if plugin.kind == "utilization-detector" => self.utilization_detector(plugin, is_on),
            Some(plugin) if plugin.kind == "concurrency-detector" => self.concurrency_detector(plugin),
            Some(_) => Ok(()),
            None if is_on => {
                for leg in LEGS {
                    let table = format!("routing.busy.{leg}");
                    self.draft.table(&table).set("engine_queue", 5, "llm-d's default").set(
                        "kv_usage",
                        0.8,
                        "llm-d's default",
                    );
                }
                let ours = "routing.busy with llm-d's thresholds: each worker is judged alone, not the \
                            average of the pool";
                self.report.add(Kind::Approximated, Place::Default, "utilization-detector", ours);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn utilization_detector(&mut self, plugin: &Plugin<'_>, is_on: bool) -> anyhow::Result<()> {
        if is_on {
            let (kind, ours) = self.detector_thresholds(plugin, &LEGS)?;
            self.note_translation(plugin, kind, ours);
        } else if !plugin.is_told.get() {
            plugin.read_all();
            self.note_translation(plugin, Kind::Approximated, SHEDS_ONLY);
        }
        Ok(())
    }

    fn concurrency_detector(&mut self, plugin: &Plugin<'_>) -> anyhow::Result<()> {
        let headroom = 1.0 + plugin.number("headroom")?.unwrap_or(0.0);
        let most = plugin.number("maxConcurrency")?.unwrap_or(100.0) * headroom;
        let in_tokens = plugin.text("concurrencyMode") == Some("tokens");
        plugin.param("maxTokenConcurrency");
        plugin.param("inFlightLoadProducerName");
        if in_tokens {
            let ours =
                "limit requests instead: max_concurrency of each worker; or routing.busy.LEG.prefill_tokens";
            self.note_translation(plugin, Kind::Missing, ours);
            return Ok(());
        }
        let limit = u32::try_from(to_i64(most)).unwrap_or(u32::MAX).max(1);
        self.max_concurrency = Some((limit, format!("maxConcurrency of {}", plain(plugin.name))));
        let ours =
            format!("max_concurrency = {limit} of each worker: each is judged alone, not the whole pool");
        self.note_translation(plugin, Kind::Approximated, ours);
        Ok(())
    }
}

/// A duration as Go writes it: `90s`, `1h30m`, `90.5s`; llm-d's default where it is not positive.
///
/// # Errors
/// The text is something else.
fn duration(node: &Node) -> anyhow::Result<String> {
    let text = node.text().unwrap_or_default();
    let Some(millis) = millis(text) else {
        bail!("line {}: `{}` is not a duration: expected 30s, 1m30s or 500ms", node.line, plain(text))
    };
    Ok(match to_i64(millis.ceil()) {
        0 => DEFAULT_TTL.to_owned(),
        whole if whole % 1_000 == 0 => format!("{}s", whole / 1_000),
        millis => format!("{millis}ms"),
    })
}

/// Milliseconds of a duration as Go writes it; `None`: it is something else.
fn millis(text: &str) -> Option<f64> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-6),
        ("us", 1e-3),
        ("µs", 1e-3),
        ("μs", 1e-3),
        ("ms", 1.0),
        ("s", 1e3),
        ("m", 6e4),
        ("h", 3.6e6),
    ];
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Some(0.0);
    }
    let mut sum = 0.0;
    let mut is_empty = true;
    while !rest.is_empty() {
        let end = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let (digits, after) = rest.split_at(end);
        let (unit, factor) = UNITS.iter().find(|(unit, _)| after.starts_with(unit))?;
        sum += digits.parse::<f64>().ok()? * factor;
        rest = after.strip_prefix(unit)?;
        is_empty = false;
    }
    (!is_empty).then_some(sign * sum)
}

/// A quantity of Kubernetes: `100`, `1k`, `500M`, `1Gi`.
///
/// # Errors
/// The text is something else, or does not fit.
fn quantity(node: &Node) -> anyhow::Result<i64> {
    const UNITS: [(&str, f64); 8] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
    ];
    let text = node.text().unwrap_or_default();
    let unit = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)));
    let Some((digits, factor)) = unit else {
        return Ok(to_i64(number(node, "quantity")?));
    };
    let count = digits.parse::<f64>().ok().filter(|count| count.is_finite());
    let count = count.ok_or_else(|| {
        anyhow::anyhow!("line {}: `{}` is not a quantity: expected 100, 1k or 1Gi", node.line, plain(text))
    })?;
    Ok(to_i64(count * factor))
}

/// A whole number that a double represents exactly.
#[expect(clippy::cast_possible_truncation, reason = "clamped to the whole numbers of a double")]
fn to_i64(number: f64) -> i64 {
    number.clamp(0.0, 9e15) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_and_durations_of_kubernetes_are_read() {
        let node = |text: &str| crate::yaml::parse(text).unwrap().remove(0);
        for (text, count) in [("100", 100), ("1k", 1_000), ("\"1Gi\"", 1 << 30), ("1.5Mi", 1_572_864)] {
            assert_eq!(quantity(&node(text)).unwrap(), count, "{text}");
        }
        for text in ["many", "1Xi", "inf"] {
            assert!(quantity(&node(text)).is_err(), "{text}");
        }
        for (text, time) in [
            ("30s", "30s"),
            ("2m", "120s"),
            ("2h", "7200s"),
            ("5m0s", "300s"),
            ("1h30m", "5400s"),
            ("1m30s", "90s"),
            ("90.5s", "90500ms"),
            ("500ms", "500ms"),
            ("1500us", "2ms"),
            ("0s", "60s"),
            ("\"0\"", "60s"),
            ("-5s", "60s"),
        ] {
            // S2.5
            assert_eq!(duration(&node(text)).unwrap(), time, "{text}");
        }
        for text in ["60", "\"\"", "soon", "1x", "5m0", "s", "1.2.3s"] {
            let refused = duration(&node(text)).unwrap_err().to_string();
            // S2.1
            assert!(refused.starts_with("line 1: `") && refused.contains("is not a duration"), "{refused}");
        }
    }
}
