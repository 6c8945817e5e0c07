//! Metrics of the endpoint picker.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

use super::{family::Family, labels::ResultLabels};

/// Which endpoint served: `picked`, `other`, or `unknown` when the proxy does not say.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndpointLabels {
    endpoint: &'static str,
}

/// Metrics of the endpoint picker.
#[derive(Debug, Default)]
pub(crate) struct ExtProcMetrics {
    streams: Gauge,
    picks: Family<ResultLabels, Counter>,
    served: Family<EndpointLabels, Counter>,
}

impl ExtProcMetrics {
    /// Counts a request about which a proxy began to ask.
    pub(crate) fn begun(&self) {
        self.streams.inc();
    }

    /// Counts the end of a request about which a proxy asked.
    pub(crate) fn ended(&self) {
        self.streams.dec();
    }

    /// Counts an answer to a proxy: `picked`, `refused`, or `own` for an answer of the gateway itself.
    pub(crate) fn picked(&self, result: &'static str) {
        self.picks.get_or_create(&ResultLabels { result }).inc();
    }

    /// Counts which endpoint served a request.
    pub(crate) fn served(&self, endpoint: &'static str) {
        self.served.get_or_create(&EndpointLabels { endpoint }).inc();
    }

    /// Registers the metrics for one scrape.
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "pointsman_ext_proc_streams",
            "Number of requests that proxies carry now and asked an endpoint for",
            self.streams.clone(),
        );
        registry.register(
            "pointsman_ext_proc_picks",
            "Number of requests of proxies by how they were answered: picked, refused, or own for an answer of the gateway itself",
            self.picks.clone(),
        );
        registry.register(
            "pointsman_ext_proc_served",
            "Number of answers by the endpoint that served: picked, other, or unknown when the proxy does not say",
            self.served.clone(),
        );
    }
}
