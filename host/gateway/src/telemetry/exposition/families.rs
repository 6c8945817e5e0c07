//! Metric families whose values a collector reads: one call for each family.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric, MetricEncoder},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::telemetry::labels::Escaped;

/// Labels of one series: names and values.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Writes families of one scrape.
pub(super) struct Families<'a>(pub(super) DescriptorEncoder<'a>);

/// A distribution that another part of the gateway counted.
pub(super) struct Distribution {
    /// Sum of all observations.
    pub(super) sum: f64,
    /// Upper bounds in ascending order, each with the number of observations in its bucket. The last bound is
    /// `f64::MAX`.
    pub(super) buckets: Vec<(f64, u64)>,
}

impl Families<'_> {
    pub(super) fn gauge<V: EncodeGaugeValue>(&mut self, name: &str, help: &str, value: V) -> fmt::Result {
        ConstGauge::new(value).encode(self.0.encode_descriptor(
            name,
            &sentence(help),
            None,
            MetricType::Gauge,
        )?)
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_descriptor(
            name,
            &sentence(help),
            None,
            MetricType::Counter,
        )?)
    }

    pub(super) fn gauges<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Gauge, series, |mut encoder, value| encoder.encode_gauge(&value))
    }

    pub(super) fn counters(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Counter, series, |encoder, value| {
            ConstCounter::new(value).encode(encoder)
        })
    }

    pub(super) fn histograms(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, Distribution)>,
    ) -> fmt::Result {
        self.family(name, help, MetricType::Histogram, series, |mut encoder, value| {
            let Distribution { sum, buckets } = value;
            let count = buckets.iter().map(|(_, count)| count).sum();
            encoder.encode_histogram::<prometheus_client::encoding::NoLabelSet>(sum, count, &buckets, None)
        })
    }

    fn family<V>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        series: impl IntoIterator<Item = (Labels, V)>,
        mut encode: impl FnMut(MetricEncoder<'_>, V) -> fmt::Result,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, &sentence(help), None, kind)?;
        for (labels, value) in series {
            let labels: Vec<_> = labels.iter().map(|(name, value)| (*name, Escaped(value))).collect();
            encode(family.encode_family(&labels)?, value)?;
        }
        Ok(())
    }
}

/// Returns a help text with a full stop at its end, as registered metrics have it.
fn sentence(help: &str) -> String {
    format!("{help}.")
}
