//! `[queue]`: requests that wait for a worker, and how many may be in flight.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration};

/// `[queue]`: requests that wait while every eligible worker is busy, or while as many as may be are in
/// flight.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Queue {
    /// Number of requests that may wait; 0: none.
    pub limit: usize,
    /// Size of the bodies of all requests that wait, bytes.
    pub bytes: usize,
    /// How long a request may wait.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// Number of requests in flight from which on others wait; 0: no limit.
    pub max_inflight: usize,
    /// Weight of an input token when tenants share workers.
    pub input_weight: f64,
    /// Weight of an output token.
    pub output_weight: f64,
    /// Bounds of single models, besides those of all.
    pub models: BTreeMap<String, QueueOfModel>,
}

/// `[queue.models.NAME]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QueueOfModel {
    /// Number of requests that may wait; 0: as many as of all models.
    pub limit: usize,
    /// Number of requests in flight from which on others wait; 0: no limit.
    pub max_inflight: usize,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            limit: 0,
            bytes: 256 * 1024 * 1024,
            timeout: Duration::from_secs(30),
            max_inflight: 0,
            input_weight: 1.0,
            output_weight: 2.0,
            models: BTreeMap::new(),
        }
    }
}

impl Queue {
    /// Returns what is wrong with the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let weights = [("input_weight", self.input_weight), ("output_weight", self.output_weight)];
        let bad = weights.into_iter().filter(|(_, weight)| !(0.0..=1e6).contains(weight));
        let bad = bad.map(|(key, weight)| {
            Problem::new(format!("queue.{key}"), format!("`{weight}` is not a weight: expected 0 to 1000000"))
        });
        bad.collect()
    }

    /// Appends the dotted path of each key whose value differs in `new`.
    pub(super) fn changed_keys(&self, new: &Self, paths: &mut Vec<String>) {
        let Self { limit, bytes, timeout, max_inflight, input_weight, output_weight, models } = self;
        #[expect(clippy::float_cmp, reason = "compares what two files say")]
        let weights = (*input_weight != new.input_weight, *output_weight != new.output_weight);
        let keys = [
            ("limit", *limit != new.limit),
            ("bytes", *bytes != new.bytes),
            ("timeout", *timeout != new.timeout),
            ("max_inflight", *max_inflight != new.max_inflight),
            ("input_weight", weights.0),
            ("output_weight", weights.1),
        ];
        paths.extend(keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| format!("queue.{key}")));
        for name in models.keys().chain(new.models.keys()).collect::<BTreeSet<_>>() {
            let of = |models: &BTreeMap<String, QueueOfModel>| models.get(name).copied().unwrap_or_default();
            let (QueueOfModel { limit, max_inflight }, new) = (of(models), of(&new.models));
            let keys = [("limit", limit != new.limit), ("max_inflight", max_inflight != new.max_inflight)];
            let changed = keys.into_iter().filter(|(_, changed)| *changed);
            paths.extend(changed.map(|(key, _)| format!("queue.models.{name}.{key}")));
        }
    }
}
