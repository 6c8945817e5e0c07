//! Metrics of TLS on the listeners and on connections to engines.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

use super::{family::Family, labels::ListenerLabels};

/// A failed handshake.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FailureLabels {
    listener: &'static str,
    reason: &'static str,
}

/// A change of the files.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReloadLabels {
    listener: &'static str,
    outcome: &'static str,
}

/// Metrics of TLS.
#[derive(Debug, Default)]
pub(crate) struct TlsMetrics {
    failures: Family<FailureLabels, Counter>,
    reloads: Family<ReloadLabels, Counter>,
    expiry: Family<ListenerLabels, Gauge>,
    in_force: Family<ListenerLabels, Gauge>,
}

impl TlsMetrics {
    /// Counts a handshake that failed.
    pub(crate) fn failed(&self, listener: &'static str, reason: &'static str) {
        self.failures.get_or_create(&FailureLabels { listener, reason }).inc();
    }

    /// Counts a change of the files: `applied` or `refused`.
    pub(crate) fn reloaded(&self, listener: &'static str, outcome: &'static str) {
        self.reloads.get_or_create(&ReloadLabels { listener, outcome }).inc();
    }

    /// Sets when the certificate of a listener expires; `None` if it has none.
    pub(crate) fn expires(&self, listener: &'static str, seconds: Option<i64>) {
        set(&self.expiry, listener, seconds);
    }

    /// Sets whether the latest files of a listener are in force; `None` if it has no certificate.
    pub(crate) fn in_force(&self, listener: &'static str, in_force: Option<bool>) {
        set(&self.in_force, listener, in_force.map(i64::from));
    }

    /// Registers the metrics for one scrape.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "pointsman_tls_handshake_failures",
            "Number of TLS handshakes that failed, by listener and reason",
            self.failures.clone(),
        );
        registry.register(
            "pointsman_tls_reloads",
            "Number of changed certificate files, by listener (or engines, for connections to them) and whether they were applied or refused",
            self.reloads.clone(),
        );
        registry.register(
            "pointsman_tls_certificate_expiry_timestamp_seconds",
            "Time at which the certificate of a listener (or engines, for the one shown to them) expires, in seconds since 1970",
            self.expiry.clone(),
        );
        registry.register(
            "pointsman_tls_last_reload_successful",
            "1 if the latest certificate files of a listener (or engines, for connections to them) are in force, else 0; GET /status says why",
            self.in_force.clone(),
        );
    }
}

/// Sets a gauge of a listener; `None`: it has no series.
fn set(family: &Family<ListenerLabels, Gauge>, listener: &'static str, value: Option<i64>) {
    let labels = ListenerLabels { listener };
    match value {
        Some(value) => {
            family.get_or_create(&labels).set(value);
        }
        None => {
            family.remove(&labels);
        }
    }
}
