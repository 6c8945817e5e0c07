//! Content of one slot, gathered from a profile, and its TOML.

use std::collections::BTreeMap;

use toml::Value;

use crate::{draft::Draft, report::plain};

/// The policy that has the scores of llm-d.
pub(super) const SCORER: &str = "queue-kv-prefix";

/// How a worker is chosen from the scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Picker {
    #[default]
    Max,
    Random,
    WeightedRandom,
}

/// A slot in the making.
#[derive(Debug, Default)]
pub(super) struct SlotPlan {
    /// Settings of the scorer, each with its origin in the file.
    settings: BTreeMap<&'static str, (f64, String)>,
    /// Further settings: thresholds.
    options: BTreeMap<&'static str, (Value, String)>,
    /// Conditions of candidates, as formulas, each with its origin in the file.
    filters: Vec<(String, String)>,
    pub(super) picker: Picker,
    /// Origin of the picker in the file.
    pub(super) picker_source: String,
    /// Origin of the latency predictor in the file; `None` if the profile has none.
    pub(super) latency: Option<String>,
    /// Whether a scorer of the profile was left out.
    pub(super) lost: bool,
}

/// Weights that are written even when they are 0, because their default is another number.
const WITH_DEFAULT: [&str; 3] = ["queue", "kv", "prefix"];

impl SlotPlan {
    /// Adds to the weight of a score.
    pub(super) fn weigh(&mut self, score: &'static str, weight: f64, source: &str) {
        let entry = self.settings.entry(score).or_insert((0.0, String::new()));
        entry.0 += weight;
        entry.1 = if entry.1.is_empty() { source.to_owned() } else { format!("{}, {source}", entry.1) };
    }

    /// Sets a threshold. Returns whether it agrees with the one that is already set.
    pub(super) fn option(&mut self, key: &'static str, value: impl Into<Value>, source: &str) -> bool {
        let value = value.into();
        let known = self.options.entry(key).or_insert((value.clone(), source.to_owned()));
        known.0 == value
    }

    /// Keeps only the candidates for which a formula holds.
    pub(super) fn keep(&mut self, formula: String, source: String) {
        self.filters.push((formula, source));
    }

    /// Returns whether a score has a weight.
    pub(super) fn has_scores(&self) -> bool {
        self.settings.values().any(|(weight, _)| *weight > 0.0)
    }

    /// Returns whether a score by the engines' own figures has a weight.
    pub(super) fn uses_engine_figures(&self) -> bool {
        ["queue", "kv", "load", "running"].iter().any(|score| self.settings.contains_key(score))
    }

    /// Writes the slot. Returns what it runs, for the report.
    pub(super) fn write(&self, draft: &mut Draft, slot: &str, profile: &str) -> &'static str {
        let table = format!("policies.slots.{slot}");
        let runs = self.write_ranking(draft, &table, &format!("profile `{}`", plain(profile)));
        for (formula, source) in &self.filters {
            draft.element(&format!("{table}.filters"), source).set("policy", "formula", "");
            let settings = draft.table_of_element(&format!("{table}.filters.settings"));
            settings.set("keep", formula.as_str(), "");
        }
        runs
    }

    fn write_ranking(&self, draft: &mut Draft, table: &str, of: &str) -> &'static str {
        if self.picker == Picker::Random {
            return self.write_native(draft, table, "random", &format!("{of}: {}", self.picker_source));
        }
        if !self.has_scores() {
            if let Some(source) = &self.latency {
                draft.set(table, "builtin", "predicted-latency", format!("{of}: {source}"));
                return "predicted-latency";
            }
            let (native, reason) = if self.lost {
                ("least-loaded", "its scorers have no counterpart")
            } else {
                ("random", "without a scorer all are equal")
            };
            return self.write_native(draft, table, native, &format!("{of}: {reason}"));
        }
        let picker = if self.picker == Picker::WeightedRandom { "weighted-random" } else { "min" };
        draft.set(table, "picker", picker, format!("{of}: {}", self.picker_source));
        draft.element(&format!("{table}.scorers"), "").set("policy", SCORER, "");
        let settings = draft.table_of_element(&format!("{table}.scorers.settings"));
        for (score, (weight, source)) in &self.settings {
            settings.set(score, *weight, source);
        }
        for score in WITH_DEFAULT {
            settings.set(score, 0.0, "not in the profile");
        }
        for (key, (value, source)) in &self.options {
            settings.set(key, value.clone(), source);
        }
        SCORER
    }

    /// Writes a selector of the host, or the policy like it, which takes filters.
    fn write_native(
        &self,
        draft: &mut Draft,
        table: &str,
        native: &'static str,
        source: &str,
    ) -> &'static str {
        match native {
            _ if self.filters.is_empty() => {
                draft.set(table, "native", native, source);
            }
            "random" => {
                draft.set(table, "builtin", "formula", format!("{source}; ties are drawn"));
                draft.set(&format!("{table}.settings"), "cost", "0", "");
            }
            _ => {
                draft.set(table, "builtin", native, source);
            }
        }
        native
    }
}
