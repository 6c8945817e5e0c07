//! Scorers: weights of the scores of the policy `queue-kv-prefix`.

use super::{
    Import,
    config::{Entry, Plugin, Profile},
    slot::SlotPlan,
};
use crate::report::{Kind, plain};

/// Scorers without counterpart, and what to do.
const MISSING: [(&str, &str); 10] = [
    (
        "no-hit-lru-scorer",
        "left out: new prompts go by the other scores; the policy `least-loaded` spreads them, too",
    ),
    (
        "context-length-aware",
        "left out: keep the pools apart by model, or write a policy with label-number/KEY",
    ),
    (
        "endpoint-attribute-scorer",
        "left out: policies do not see attributes; label-number/KEY is a worker's label",
    ),
    (
        "header-label-affinity-scorer",
        "left out: policies see no headers; required taints select labelled workers",
    ),
    (
        "topology-affinity-scorer",
        "left out: set topology and kv_transfer = \"preferred:DOMAIN:WEIGHT\" on the prefill workers",
    ),
    (
        "kv-aware-scorer",
        "left out: it is Dynamo's; builtin = \"kv-aware\" has the formula of its cost (behaviour G)",
    ),
    ("mm-embeddings-cache-scorer", "left out: images count as parts of the prompt's blocks (behaviour H6)"),
    ("multicluster-queue-scorer", "left out: a gateway serves one cluster"),
    ("multicluster-kv-cache-utilization-scorer", "left out: a gateway serves one cluster"),
    ("multicluster-prefix-cache-scorer", "left out: a gateway serves one cluster"),
];

/// Scorers that become weights, and the name of the weight.
const WEIGHTS: [(&str, &str); 9] = [
    ("queue-scorer", "queue"),
    ("kv-cache-utilization-scorer", "kv"),
    ("prefix-cache-scorer", "prefix"),
    ("precise-prefix-cache-scorer", "prefix"),
    ("load-aware-scorer", "load"),
    ("running-requests-size-scorer", "running"),
    ("active-request-scorer", "active"),
    ("token-load-scorer", "tokens"),
    ("lora-affinity-scorer", "lora"),
];

/// Returns whether the type is a scorer's.
pub(super) fn is_scorer(kind: &str) -> bool {
    let others = ["session-affinity-scorer", "latency-scorer"];
    others.contains(&kind)
        || WEIGHTS.iter().any(|(name, _)| *name == kind)
        || MISSING.iter().any(|(name, _)| *name == kind)
}

impl Import<'_> {
    /// Translates a scorer of a profile.
    pub(super) fn scorer(
        &mut self,
        plan: &mut SlotPlan,
        plugin: &Plugin<'_>,
        entry: &Entry<'_>,
        profile: &Profile<'_>,
    ) -> anyhow::Result<()> {
        let weight = entry.weight.unwrap_or(1.0);
        let theirs = format!(
            "scorer `{}`, weight {weight}, in the profile `{}`",
            plain(plugin.name),
            plain(profile.name)
        );
        let source = format!("{} at {}, weight {weight}", plain(plugin.name), entry.place);
        let missing = MISSING.iter().find(|(name, _)| *name == plugin.kind);
        let (kind, ours) = if let Some((_, advice)) = missing {
            plugin.read_all();
            plan.lost = true;
            (Kind::Missing, (*advice).to_owned())
        } else if plugin.kind == "session-affinity-scorer" {
            self.session_affinity(plugin)?
        } else if plugin.kind == "latency-scorer" {
            plugin.read_all();
            latency(plan, &source)
        } else if weight < 0.0 {
            plan.lost = true;
            (Kind::Missing, "left out: weights are 0 or more".to_owned())
        } else {
            self.weighted(plan, plugin, weight, &source)?
        };
        self.report.add(kind, entry.place, theirs, ours);
        Ok(())
    }

    /// Adds the weight of a scorer, with its thresholds.
    fn weighted(
        &mut self,
        plan: &mut SlotPlan,
        plugin: &Plugin<'_>,
        weight: f64,
        source: &str,
    ) -> anyhow::Result<(Kind, String)> {
        let score = WEIGHTS.iter().find(|(name, _)| *name == plugin.kind).map_or("", |(_, score)| *score);
        if !self.thresholds(plan, plugin, score)? {
            plan.lost = true;
            let ours = "left out: another scorer of this type in the profile has other parameters";
            return Ok((Kind::Missing, ours.to_owned()));
        }
        plan.weigh(score, weight, source);
        let setting = format!("weight `{score}`");
        Ok(match score {
            "prefix" => return self.prefix_score(plugin, &setting),
            "tokens" => (
                Kind::Approximated,
                format!("{setting}: tokens count until the prefill ended, without an estimate of the output"),
            ),
            "lora" => (
                Kind::Approximated,
                format!("{setting}: 1 where the adapter is loaded, else 0; llm-d also has 0.8 and 0.6"),
            ),
            "active" => (Kind::Translated, format!("{setting}: requests that this gateway has booked")),
            _ => (Kind::Translated, setting),
        })
    }

    /// Sets the thresholds of a scorer. Returns whether they fit those of another one.
    fn thresholds(&mut self, plan: &mut SlotPlan, plugin: &Plugin<'_>, score: &str) -> anyhow::Result<bool> {
        let source = |key: &str| format!("{key} of {}", plain(plugin.name));
        Ok(match score {
            "load" => {
                // llm-d takes its default for any number that is not positive.
                let threshold = plugin.number("threshold")?.filter(|threshold| *threshold >= 1.0);
                plan.option("load-threshold", to_i64(threshold.unwrap_or(128.0)), &source("threshold"))
            }
            "active" => {
                let idle = plugin.number("idleThreshold")?.filter(|idle| *idle >= 0.0).unwrap_or(0.0);
                let most = plugin.number("maxBusyScore")?.filter(|most| (0.0..=1.0).contains(most));
                // Neither has an effect in llm-d any more, or names what is built in here.
                plugin.param("requestTimeout");
                plugin.param("inFlightLoadProducerName");
                plan.option("idle-threshold", to_i64(idle), &source("idleThreshold"))
                    && plan.option("max-busy-score", most.unwrap_or(1.0), &source("maxBusyScore"))
            }
            "tokens" => {
                let threshold = plugin.number("queueThresholdTokens")?.filter(|tokens| *tokens >= 1.0);
                plugin.param("inFlightLoadProducerName");
                let source = source("queueThresholdTokens");
                plan.option("token-threshold", to_i64(threshold.unwrap_or(4_194_304.0)), &source)
            }
            "prefix" => self.prefix_limit(plan, plugin)?,
            _ => true,
        })
    }

    /// Turns on the gateway's sessions, for a scorer or a filter.
    pub(super) fn session_affinity(&mut self, plugin: &Plugin<'_>) -> anyhow::Result<(Kind, String)> {
        let config = plugin.param("sessionIdConfig");
        let ttl = config.and_then(|config| config.get("evictionTtlSeconds"));
        let ttl = ttl.map(|node| super::config::number(node, "evictionTtlSeconds")).transpose()?;
        let seconds = to_i64(ttl.filter(|ttl| *ttl >= 1.0).unwrap_or(300.0));
        let by_id = plugin.text("strategy") == Some("session_id");
        plugin.param("profileName");
        plugin.param("encodedEndpointHeaderConfig");
        let source = plain(plugin.name);
        let fits = self.draft.set("routing", "session_affinity", format!("{seconds}s"), source);
        let how = if by_id {
            "clients name the session in x-session-id; other headers and attributes do not count"
        } else {
            "clients name a session in x-session-id; the header with the encoded endpoint is not read"
        };
        let hard = if plugin.kind == "session-affinity-filter" { "" } else { ", whatever the other scores" };
        let kept = if fits { "" } else { "; another plugin gave another time, which is kept" };
        let ours = format!("routing.session_affinity: a session stays on its worker{hard}; {how}{kept}");
        Ok((Kind::Approximated, ours))
    }
}

fn latency(plan: &mut SlotPlan, source: &str) -> (Kind, String) {
    plan.latency = Some(source.to_owned());
    let ours = "builtin = \"predicted-latency\" when it is the profile's only scorer, else left out: times \
                are predicted from booked work and measured speed, not by llm-d's trained model, and SLOs \
                do not count";
    (Kind::Approximated, ours.to_owned())
}

/// A whole number of a parameter, within a `u32`.
#[expect(clippy::cast_possible_truncation, reason = "clamped to the range of a u32")]
fn to_i64(number: f64) -> i64 {
    number.clamp(0.0, f64::from(u32::MAX)) as i64
}
