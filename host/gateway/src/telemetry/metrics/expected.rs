//! Series that exist at zero before anything is counted: a rate would miss the first event of a series that
//! begins with it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::atomic::{AtomicBool, Ordering},
};

use foldhash::fast::RandomState;
use parking_lot::{RwLock, RwLockWriteGuard};
use pointsman_orchestration::Lost;
use pointsman_workers::ModelName;

use super::{DropReason, Metrics, Name, OTHER, ReasonLabels, RequestLabels, ResultLabels, SourceLabels};
use crate::openai::request::Endpoint;

/// Endpoints whose series exist before the first request of a model.
const EXPECTED_ENDPOINTS: [Endpoint; 2] = [Endpoint::ChatCompletions, Endpoint::Completions];
/// Maximum number of models that are labels.
pub(crate) const MAX_MODELS: usize = 10_000;

/// Models that have series of their own, and whether one of their requests was counted.
#[derive(Debug, Default)]
pub(crate) struct LabelledModels(RwLock<HashMap<ModelName, AtomicBool, RandomState>>);

impl LabelledModels {
    /// Returns the label for a request that is counted: the name of its model, or `other` when too many
    /// models have series already.
    pub(crate) fn of_request(&self, model: &ModelName) -> Name {
        let known = self.0.read();
        if let Some(is_counted) = known.get(model) {
            is_counted.store(true, Ordering::Relaxed);
            return Name(model.0.clone());
        }
        if known.len() >= MAX_MODELS {
            return Name(OTHER.clone());
        }
        drop(known);
        let mut models = self.0.write();
        if models.len() >= MAX_MODELS && !models.contains_key(model) {
            return Name(OTHER.clone());
        }
        models.insert(model.clone(), AtomicBool::new(true));
        Name(model.0.clone())
    }
}

impl Metrics {
    /// Creates the series for requests of models, as far as there is room. Removes those of other models
    /// without a request: an engine may list ever new names.
    pub(crate) fn expect_models(&self, expected: &BTreeSet<&ModelName>) {
        let mut models = self.labelled.0.write();
        models.retain(|model, is_counted| {
            let stays = expected.contains(model) || is_counted.load(Ordering::Relaxed);
            if !stays {
                expected_labels(model).for_each(|labels| {
                    self.requests.remove(&labels);
                });
            }
            stays
        });
        for model in expected.iter().copied() {
            if models.len() < MAX_MODELS && !models.contains_key(model) {
                models.insert(model.clone(), AtomicBool::new(false));
            }
        }
        // Requests that end meanwhile do not wait.
        let models = RwLockWriteGuard::downgrade(models);
        let labelled = expected.iter().copied().filter(|model| models.contains_key(*model));
        labelled.flat_map(expected_labels).for_each(|labels| drop(self.requests.get_or_create(&labels)));
    }

    /// Creates the series whose labels are fixed, of lengths, of shares, and of what alerts look for.
    pub(crate) fn expect_fixed(&self) {
        let sources = [
            (&self.isl, &["usage", "tokens", "estimate"][..]),
            (&self.osl, &["usage", "counted"]),
            (&self.hit_rate, &["usage", "predicted"]),
        ];
        for (family, sources) in sources {
            for source in sources.iter().copied() {
                drop(family.get_or_create(&SourceLabels { source }));
            }
        }
        let lost = Lost::ALL.map(Lost::as_str).into_iter().map(|result| (&self.handoffs, result));
        for (family, result) in lost.chain([(&self.key_set_fetches, "failed")]) {
            drop(family.get_or_create(&ResultLabels { result }));
        }
        let dropped = DropReason::ALL.map(DropReason::as_str).into_iter();
        let dropped = dropped.map(|reason| (&self.trace_spans_dropped, reason));
        let undelivered = ["queue", "disk"].map(|reason| (&self.decision_log_dropped, reason));
        for (family, reason) in dropped.chain(undelivered) {
            drop(family.get_or_create(&ReasonLabels { reason }));
        }
    }
}

fn expected_labels(model: &ModelName) -> impl Iterator<Item = RequestLabels> {
    EXPECTED_ENDPOINTS.into_iter().map(|endpoint| RequestLabels {
        endpoint: endpoint.label(),
        model: Name(model.0.clone()),
        status: 200,
        code: "ok",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> ModelName {
        ModelName::new(&format!("m{number}"))
    }

    fn count(metrics: &Metrics, model: &ModelName) -> Name {
        let label = metrics.labelled.of_request(model);
        let [labels, _] = EXPECTED_ENDPOINTS.map(|endpoint| RequestLabels {
            endpoint: endpoint.label(),
            model: label.clone(),
            status: 200,
            code: "ok",
        });
        metrics.requests.get_or_create(&labels).inc();
        label
    }

    #[test]
    fn m4_series_of_models_that_left_go_unless_a_request_was_counted() {
        let metrics = Metrics::default();
        let (served, left, next) = (name(0), name(1), name(2));
        let is_there = |model| expected_labels(model).map(|labels| metrics.requests.get(&labels).is_some());
        metrics.expect_models(&[&served, &left].into());
        count(&metrics, &served);
        metrics.expect_models(&[&next].into());
        // M4.7
        assert!(is_there(&served).chain(is_there(&next)).all(|there| there));
        assert!(!is_there(&left).any(|there| there));
        assert_eq!(metrics.labelled.0.read().len(), 2);
    }

    #[test]
    fn m4_many_models_share_the_label_other() {
        let metrics = Metrics::default();
        let models: Vec<ModelName> = (0..MAX_MODELS + 1).map(name).collect();
        let (last, first) = models.split_last().unwrap();
        metrics.expect_models(&first.iter().collect());
        // M4.7
        assert_eq!(count(&metrics, last), Name(OTHER.clone()));
        assert_eq!(count(&metrics, &name(7)), Name(name(7).0));
        metrics.expect_models(&[last].into());
        assert_eq!(count(&metrics, last), Name(last.0.clone()), "there is room again");
    }
}
