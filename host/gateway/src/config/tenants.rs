//! `[tenants.NAME]`: the share of a tenant while requests wait, and its limits.

use std::{collections::BTreeMap, time::Duration};

use pointsman_config_file::{Report, section};

/// Name of the section for all tenants without a section of their own.
pub(crate) const ALL_TENANTS: &str = "*";

/// Share and limits of a tenant. A key that is left out takes its value from [tenants."*"], which applies to
/// each tenant without a section, and to all requests without a tenant together.
#[section(rules)]
pub struct TenantEntry {
    /// Share of the served tokens while requests wait, relative to those of other tenants; default: 1.0.
    #[key(example = "1.0", range = 0.001..=1e6, reason = "is not a weight")]
    pub weight: Option<f64>,
    /// Highest priority of its requests; default: any.
    #[key(example = "0.0")]
    pub max_priority: Option<f32>,
    /// Target for the time to first token of its requests that name none; default: that of the model.
    #[key(example = "\"2s\"", positive)]
    pub ttft_target: Option<Duration>,
    /// The same for the inter-token latency.
    #[key(example = "\"50ms\"", positive)]
    pub itl_target: Option<Duration>,
    /// Requests in a minute; 0: no limit.
    #[key(example = "0")]
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute; 0: no limit.
    #[key(example = "0")]
    pub input_tokens_per_minute: Option<u64>,
    /// Output tokens in a minute; 0: no limit.
    #[key(example = "0")]
    pub output_tokens_per_minute: Option<u64>,
    /// Requests in flight; 0: no limit.
    #[key(example = "0")]
    pub concurrency: Option<u64>,
    /// How often a stream may be continued when its engine failed, within the model's limit; 0: never.
    #[key(example = "0", range = 0..=8)]
    pub continuations: Option<u32>,
    /// Limits of the tenant for one model and its adapters, besides those for all.
    #[key(example = "\"NAME\"", nested, by_key)]
    pub models: BTreeMap<String, TenantModelEntry>,
}

/// Limits of a tenant for one model.
#[section]
#[derive(Copy, Eq)]
pub struct TenantModelEntry {
    /// Requests in a minute; 0: no limit.
    #[key(example = "0")]
    pub requests_per_minute: Option<u64>,
    /// Prompt tokens in a minute; 0: no limit.
    #[key(example = "0")]
    pub input_tokens_per_minute: Option<u64>,
    /// Output tokens in a minute; 0: no limit.
    #[key(example = "0")]
    pub output_tokens_per_minute: Option<u64>,
    /// Requests in flight; 0: no limit.
    #[key(example = "8")]
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
            ttft_target: self.ttft_target.or(others.ttft_target),
            itl_target: self.itl_target.or(others.itl_target),
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            input_tokens_per_minute: self.input_tokens_per_minute.or(others.input_tokens_per_minute),
            output_tokens_per_minute: self.output_tokens_per_minute.or(others.output_tokens_per_minute),
            concurrency: self.concurrency.or(others.concurrency),
            continuations: self.continuations.or(others.continuations),
            models,
        }
    }

    /// Returns whether there is a limit, over all models or for one.
    pub(crate) fn has_limits(&self) -> bool {
        self.limits().has_any() || self.models.values().copied().any(TenantModelEntry::has_any)
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

    fn rules(&self, report: &mut Report<'_>) {
        if self.max_priority.is_some_and(|priority| !priority.is_finite()) {
            report.add("max_priority", "is not a finite number: leave the key out for no limit");
        }
    }
}

impl TenantModelEntry {
    fn has_any(self) -> bool {
        let Self { requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, concurrency } =
            self;
        [requests_per_minute, input_tokens_per_minute, output_tokens_per_minute, concurrency]
            .into_iter()
            .flatten()
            .any(|limit| limit > 0)
    }

    fn or(self, others: Self) -> Self {
        Self {
            requests_per_minute: self.requests_per_minute.or(others.requests_per_minute),
            input_tokens_per_minute: self.input_tokens_per_minute.or(others.input_tokens_per_minute),
            output_tokens_per_minute: self.output_tokens_per_minute.or(others.output_tokens_per_minute),
            concurrency: self.concurrency.or(others.concurrency),
        }
    }
}
