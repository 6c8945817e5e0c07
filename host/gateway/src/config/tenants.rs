//! `[tenants.NAME]`: the share of a tenant while requests wait, and its limits.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Problem;

/// Name of the section that stands for every tenant without one.
pub(crate) const ALL_TENANTS: &str = "*";

/// `[tenants.NAME]`. A key that is left out is that of `[tenants."*"]`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantEntry {
    /// Share of the served tokens while requests wait, relative to those of other tenants.
    pub weight: Option<f64>,
    /// Highest priority of its requests.
    pub max_priority: Option<f32>,
    /// Requests in a minute; 0: no limit.
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute; 0: no limit.
    pub input_tokens_per_minute: Option<u64>,
    /// Output tokens in a minute; 0: no limit.
    pub output_tokens_per_minute: Option<u64>,
    /// Requests in flight; 0: no limit.
    pub concurrency: Option<u64>,
    /// Limits of single models, besides those of all.
    pub models: BTreeMap<String, TenantModelEntry>,
}

/// `[tenants.NAME.models.MODEL]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantModelEntry {
    /// Requests in a minute; 0: no limit.
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute; 0: no limit.
    pub input_tokens_per_minute: Option<u64>,
    /// Output tokens in a minute; 0: no limit.
    pub output_tokens_per_minute: Option<u64>,
    /// Requests in flight; 0: no limit.
    pub concurrency: Option<u64>,
}

impl TenantEntry {
    /// Returns these values, with each missing one taken from `others`.
    #[must_use]
    pub(crate) fn or(&self, others: &Self) -> Self {
        let mut models = others.models.clone();
        for (name, own) in &self.models {
            let entry = models.entry(name.clone()).or_default();
            *entry = own.or(*entry);
        }
        Self {
            weight: self.weight.or(others.weight),
            max_priority: self.max_priority.or(others.max_priority),
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            input_tokens_per_minute: self.input_tokens_per_minute.or(others.input_tokens_per_minute),
            output_tokens_per_minute: self.output_tokens_per_minute.or(others.output_tokens_per_minute),
            concurrency: self.concurrency.or(others.concurrency),
            models,
        }
    }

    /// Returns the limits over all models.
    pub(crate) fn limits(&self) -> TenantModelEntry {
        TenantModelEntry {
            requests_per_minute: self.requests_per_minute,
            input_tokens_per_minute: self.input_tokens_per_minute,
            output_tokens_per_minute: self.output_tokens_per_minute,
            concurrency: self.concurrency,
        }
    }

    fn changed_keys(&self, new: &Self, path: &str, paths: &mut Vec<String>) {
        let mut add = |key: &str| paths.push(format!("{path}.{key}"));
        if self.weight != new.weight {
            add("weight");
        }
        if self.max_priority != new.max_priority {
            add("max_priority");
        }
        self.limits().changed_keys(new.limits(), path, paths);
        for name in self.models.keys().chain(new.models.keys()).collect::<BTreeSet<_>>() {
            let of = |entry: &Self| entry.models.get(name).copied().unwrap_or_default();
            of(self).changed_keys(of(new), &format!("{path}.models.{name}"), paths);
        }
    }
}

impl TenantModelEntry {
    fn or(self, others: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            input_tokens_per_minute: self.input_tokens_per_minute.or(others.input_tokens_per_minute),
            output_tokens_per_minute: self.output_tokens_per_minute.or(others.output_tokens_per_minute),
            concurrency: self.concurrency.or(others.concurrency),
        }
    }

    fn changed_keys(self, new: Self, path: &str, paths: &mut Vec<String>) {
        let Self { requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, concurrency } =
            self;
        let keys = [
            ("requests_per_minute", requests_per_minute != new.requests_per_minute),
            ("input_tokens_per_minute", input_tokens_per_minute != new.input_tokens_per_minute),
            ("output_tokens_per_minute", output_tokens_per_minute != new.output_tokens_per_minute),
            ("concurrency", concurrency != new.concurrency),
        ];
        let changed = keys.into_iter().filter(|(_, changed)| *changed);
        paths.extend(changed.map(|(key, _)| format!("{path}.{key}")));
    }
}

/// Returns what is wrong with the sections.
pub(super) fn problems(tenants: &BTreeMap<String, TenantEntry>) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (name, entry) in tenants {
        let path = format!("tenants.{name}");
        if name.is_empty() {
            problems.push(Problem::new(path.clone(), "the name of a tenant is empty: give it a name"));
        }
        if let Some(weight) = entry.weight.filter(|weight| !(0.001..=1e6).contains(weight)) {
            let message = format!("`{weight}` is not a weight: expected 0.001 to 1000000");
            problems.push(Problem::new(format!("{path}.weight"), message));
        }
        if entry.max_priority.is_some_and(|priority| !priority.is_finite()) {
            let message = "is not a finite number: leave the key out for no limit";
            problems.push(Problem::new(format!("{path}.max_priority"), message));
        }
    }
    problems
}

/// Appends the dotted path of each key whose value differs.
pub(super) fn changed_keys(
    before: &BTreeMap<String, TenantEntry>,
    after: &BTreeMap<String, TenantEntry>,
    paths: &mut Vec<String>,
) {
    for name in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        let missing = TenantEntry::default();
        let of = |tenants: &BTreeMap<String, TenantEntry>| tenants.get(name).unwrap_or(&missing).clone();
        of(before).changed_keys(&of(after), &format!("tenants.{name}"), paths);
    }
}
