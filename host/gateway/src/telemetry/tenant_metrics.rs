//! Metrics of tenants. A label names a tenant only if the configuration names it, because tokens of an
//! identity server and proxies may name any number of other tenants.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, histogram::Histogram},
    registry::Registry,
};
use tokio::time::Duration;

use super::{family::Family, labels::Name};

/// Maximum number of tenants with their own series, until the daemon ends. Tenants of earlier configurations
/// count, too.
const MAX_NAMES: usize = 1_000;
/// Upper bounds of the time in the queue, in seconds. They are few, because each tenant has a histogram.
const QUEUE_BUCKETS: [f64; 8] = [0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

/// Label value of tenants that the configuration does not name.
static OTHER: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("other"));
/// Label value of requests without a tenant.
static NONE: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from("none"));

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TenantLabels {
    tenant: Name,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndLabels {
    tenant: Name,
    code: &'static str,
}

/// The metric families, and the tenants that have series.
#[derive(Debug)]
pub(crate) struct TenantFamilies {
    requests: Family<EndLabels, Counter>,
    prompt_tokens: Family<TenantLabels, Counter>,
    output_tokens: Family<TenantLabels, Counter>,
    queue: Family<TenantLabels, Histogram>,
    /// Locked only when a configuration comes into force.
    named: Mutex<HashMap<Arc<str>, Arc<TenantSeries>>>,
}

/// Series of one tenant.
#[derive(Debug)]
pub(crate) struct TenantSeries {
    tenant: Arc<str>,
    prompt_tokens: Counter,
    output_tokens: Counter,
    queue: Histogram,
}

/// Series of the tenants of one configuration.
#[derive(Debug)]
pub(crate) struct TenantMetrics {
    named: HashMap<Arc<str>, Arc<TenantSeries>>,
    other: Arc<TenantSeries>,
    none: Arc<TenantSeries>,
}

impl TenantMetrics {
    /// Returns the series of a tenant that the configuration names, those of all other tenants, or for `None`
    /// those of requests without a tenant.
    #[must_use]
    pub(crate) fn of(&self, tenant: Option<&str>) -> &Arc<TenantSeries> {
        tenant.map_or(&self.none, |tenant| self.named.get(tenant).unwrap_or(&self.other))
    }
}

impl TenantSeries {
    /// Records the time that a request waited in the admission queue.
    pub(super) fn queued(&self, waited: Duration) {
        self.queue.observe(waited.as_secs_f64());
    }
}

impl Default for TenantFamilies {
    fn default() -> Self {
        Self {
            requests: Family::default(),
            prompt_tokens: Family::default(),
            output_tokens: Family::default(),
            queue: Family::new(|| Histogram::new(QUEUE_BUCKETS)),
            named: Mutex::default(),
        }
    }
}

impl TenantFamilies {
    /// Returns the series of the tenants that a configuration names.
    #[must_use]
    pub(crate) fn named<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> TenantMetrics {
        let mut known = self.named.lock();
        let mut named = HashMap::new();
        for name in names {
            let series = match known.get(name) {
                Some(series) => series.clone(),
                None if known.len() >= MAX_NAMES => continue,
                None => {
                    let name: Arc<str> = name.into();
                    let series = self.series(&name);
                    known.insert(name, series.clone());
                    series
                }
            };
            named.insert(series.tenant.clone(), series);
        }
        TenantMetrics { named, other: self.series(&OTHER), none: self.series(&NONE) }
    }

    /// Counts a request of a tenant that ended, with the tokens that it used.
    pub(super) fn ended(&self, series: &TenantSeries, code: &'static str, input: u64, output: u64) {
        let labels = EndLabels { tenant: Name(series.tenant.clone()), code };
        self.requests.get_or_create(&labels).inc();
        series.prompt_tokens.inc_by(input);
        series.output_tokens.inc_by(output);
    }

    /// Registers the metrics for one scrape.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "pointsman_tenant_requests",
            "Number of requests of a tenant by how they ended: `ok` or the code of an error",
            self.requests.clone(),
        );
        registry.register(
            "pointsman_tenant_prompt_tokens",
            "Number of prompt tokens of a tenant's requests that an engine ran, as the engine reported or the gateway counted them",
            self.prompt_tokens.clone(),
        );
        registry.register(
            "pointsman_tenant_output_tokens",
            "Number of output tokens of a tenant's requests, as the engine reported or the gateway counted or estimated them",
            self.output_tokens.clone(),
        );
        registry.register(
            "pointsman_tenant_queue_seconds",
            "Time of a wait of a tenant's request in the admission queue in seconds; only requests that waited",
            self.queue.clone(),
        );
    }

    fn series(&self, tenant: &Arc<str>) -> Arc<TenantSeries> {
        let labels = TenantLabels { tenant: Name(tenant.clone()) };
        Arc::new(TenantSeries {
            tenant: tenant.clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&labels).clone(),
            output_tokens: self.output_tokens.get_or_create(&labels).clone(),
            queue: self.queue.get_or_create(&labels).clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_beyond_the_limit_share_a_series_whatever_is_reloaded() {
        let families = TenantFamilies::default();
        let names: Vec<String> = (0..MAX_NAMES + 1).map(|n| format!("t{n}")).collect();
        let (half, rest) = names.split_at(MAX_NAMES / 2);
        drop(families.named(half.iter().map(String::as_str)));
        let metrics = families.named(rest.iter().map(String::as_str));
        let label = |metrics: &TenantMetrics, tenant: Option<&String>| {
            metrics.of(tenant.map(String::as_str)).tenant.to_string()
        };
        assert_eq!(label(&metrics, rest.first()), rest[0]);
        assert_eq!(label(&metrics, rest.last()), "other", "those before a reload count, too");
        assert_eq!(label(&metrics, half.first()), "other", "the configuration in force does not name it");
        assert_eq!(label(&metrics, None), "none");
        let again = families.named(half.iter().map(String::as_str));
        assert_eq!(label(&again, half.first()), half[0]);
    }
}
