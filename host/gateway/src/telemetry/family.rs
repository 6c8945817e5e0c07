//! A family of series by their labels. That of `prometheus_client` finds them by SipHash, which keeps senders
//! from choosing keys that collide. Here labels are constants, names in the configuration and a limited
//! number of models. Clients do not choose them, so a faster hash is enough.

use std::{collections::HashMap, fmt, hash::Hash, sync::Arc};

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder},
    metrics::{MetricType, TypedMetric},
};

type Series<S, M> = HashMap<S, M, foldhash::fast::RandomState>;

/// The series of a metric by their labels.
#[derive(Clone, Debug)]
pub struct Family<S, M> {
    series: Arc<RwLock<Series<S, M>>>,
    new: fn() -> M,
}

impl<S, M: Default> Default for Family<S, M> {
    fn default() -> Self {
        Self::new(M::default)
    }
}

impl<S, M> Family<S, M> {
    /// Returns a family without series, each of which begins as `new` makes it.
    pub(crate) fn new(new: fn() -> M) -> Self {
        Self { series: Arc::default(), new }
    }
}

impl<S: Clone + Hash + Eq, M> Family<S, M> {
    /// Returns the series with these labels, if there is one.
    #[must_use]
    pub fn get(&self, labels: &S) -> Option<MappedRwLockReadGuard<'_, M>> {
        RwLockReadGuard::try_map(self.series.read(), |series| series.get(labels)).ok()
    }

    /// Returns the series with these labels. Begins it if the family does not have it.
    pub fn get_or_create(&self, labels: &S) -> MappedRwLockReadGuard<'_, M> {
        loop {
            if let Some(series) = self.get(labels) {
                return series;
            }
            self.series.write().entry(labels.clone()).or_insert_with(self.new);
        }
    }

    /// Removes the series with these labels.
    pub(crate) fn remove(&self, labels: &S) {
        self.series.write().remove(labels);
    }
}

impl<S: EncodeLabelSet, M: EncodeMetric + TypedMetric> EncodeMetric for Family<S, M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        self.series
            .read()
            .iter()
            .try_for_each(|(labels, series)| series.encode(encoder.encode_family(labels)?))
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.series.read().is_empty()
    }
}
