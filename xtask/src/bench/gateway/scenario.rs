//! Load shapes with which routers are measured, as `xtask/bench.toml` has them.

use std::time::Duration;

use anyhow::ensure;
use serde::Deserialize;

use crate::load::Arrivals;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenarios {
    scenario: Vec<Scenario>,
}

/// Engines behind the router.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Shape {
    /// Workers that serve whole requests.
    Aggregated { workers: usize },
    /// Two prefill and two decode workers.
    Disaggregated(Handshake),
}

/// Way in which the engines of a pair find each other's KV.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Handshake {
    Vllm,
    Sglang,
}

/// Relation between the prompts of a run.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Prompts {
    /// The same 16 prompts are repeated. The index and a cache of tokens contain them.
    Repeated,
    /// Each prompt begins with new words, so none of its blocks is known. The text after these words is
    /// always the same.
    Distinct,
    /// Each prompt consists of new random words.
    NewWords,
    /// Each client has conversations of 20 turns. Every turn repeats the earlier ones and adds to them.
    Conversations,
}

/// One scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Scenario {
    pub(super) name: String,
    pub(super) description: String,
    pub(super) shape: Shape,
    /// Time between two events of a stream.
    #[serde(with = "humantime_serde")]
    pub(super) pace: Duration,
    /// Number of events of a stream; 0 if the answer is not streamed.
    pub(super) events: u32,
    pub(super) load: Arrivals,
    pub(super) requests: u64,
    pub(super) prompt_bytes: usize,
    pub(super) prompts: Prompts,
    /// Whether the gateway counts tokens, which requires `--tokenizer`.
    pub(super) tokens: bool,
    /// Whether long new prompts fill the gateway's prefix index up to its limit before the measurement.
    pub(super) fill: bool,
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            name: String::new(),
            description: String::new(),
            shape: Shape::Aggregated { workers: 4 },
            pace: Duration::ZERO,
            events: 0,
            load: Arrivals::Clients(16),
            requests: 0,
            prompt_bytes: 60,
            prompts: Prompts::Distinct,
            tokens: false,
            fill: false,
        }
    }
}

/// Returns scenarios by name, or all if no name is given. Those that count tokens need a tokenizer.
pub(super) fn choose(names: &[impl AsRef<str>], tokenizer: bool) -> anyhow::Result<Vec<Scenario>> {
    let Scenarios { mut scenario } = toml::from_str(include_str!("../../../bench.toml"))?;
    let all: Vec<String> = scenario.iter().map(|one: &Scenario| one.name.clone()).collect();
    scenario.retain(|one| {
        (!one.tokens || tokenizer) && (names.is_empty() || names.iter().any(|name| name.as_ref() == one.name))
    });
    ensure!(!scenario.is_empty(), "no such scenario: expected {}", all.join(", "));
    Ok(scenario)
}

#[cfg(test)]
mod tests {
    use super::choose;

    #[test]
    fn scenarios_are_chosen_by_name_and_tokenizer() {
        let names = |names: &[&str], tokenizer| {
            choose(names, tokenizer).unwrap().into_iter().map(|one| one.name).collect::<Vec<_>>()
        };
        assert_eq!(names(&["a", "dn"], false), ["a"]);
        assert_eq!(names(&["a", "dn"], true), ["a", "dn"]);
        assert_eq!(names(&[], true).len(), 16);
        assert!(choose(&["z"], true).is_err());
    }
}
