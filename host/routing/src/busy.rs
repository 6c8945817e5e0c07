//! Thresholds of load beyond which a candidate gets no request while another one may (F6).

use std::collections::{BTreeMap, HashMap};

use pointsman_workers::{DpRank, Leg, ModelName, RankView, Snapshot, WorkerId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::query::Query;

/// Thresholds of one leg. A candidate beyond any of them is busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BusyThresholds {
    /// Share of the KV cache in use, 0 to 1: as the engine reports it, otherwise of the booked blocks.
    #[schemars(extend("x-example" = "0.95"))]
    pub kv_usage: Option<f32>,
    /// Prompt tokens booked on the candidate whose prefill has not completed.
    #[schemars(extend("x-example" = "65536"))]
    pub prefill_tokens: Option<u32>,
    /// Requests that wait in the engine, as it reports them.
    #[schemars(extend("x-example" = "16"))]
    pub engine_queue: Option<u32>,
}

/// The thresholds by leg.
pub type BusyByLeg = BTreeMap<Leg, BusyThresholds>;

/// The thresholds of all models and legs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BusyRules {
    default: BusyByLeg,
    models: HashMap<ModelName, BusyByLeg>,
    requests_wait: bool,
}

/// Thresholds beyond which a candidate of one leg is busy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LegLimits {
    pub(crate) thresholds: BusyThresholds,
    /// Whether a request that finds no free worker waits in a queue.
    pub(crate) requests_wait: bool,
}

/// A candidate whose load exceeds a threshold of a model's leg.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BusyCandidate {
    /// The worker.
    #[serde(skip)]
    pub worker: WorkerId,
    /// Rank of the worker.
    pub dp_rank: DpRank,
    /// The model.
    pub model: ModelName,
    /// The leg that it gets no request of.
    pub leg: Leg,
    /// Name of the threshold that the candidate is beyond.
    pub reason: &'static str,
}

impl BusyThresholds {
    /// Returns these thresholds, with each missing one taken from `default`.
    #[must_use]
    fn or(self, default: Self) -> Self {
        Self {
            kv_usage: self.kv_usage.or(default.kv_usage),
            prefill_tokens: self.prefill_tokens.or(default.prefill_tokens),
            engine_queue: self.engine_queue.or(default.engine_queue),
        }
    }

    /// Returns which threshold a candidate with this load is beyond: its stable label.
    #[must_use]
    pub fn exceeded(&self, load: RankView<'_>) -> Option<&'static str> {
        if *self == Self::default() {
            return None;
        }
        if self.prefill_tokens.is_some_and(|most| load.active_prefill_tokens() > most) {
            return Some("prefill_tokens");
        }
        // A figure that the engine does not report refuses nothing.
        let engine = load.engine_load();
        let waiting = engine.and_then(|engine| engine.waiting);
        if self.engine_queue.zip(waiting).is_some_and(|(most, waiting)| waiting > most) {
            return Some("engine_queue");
        }
        let booked = || {
            let total = load.total_blocks()?;
            #[expect(clippy::cast_precision_loss, reason = "a share needs no more precision")]
            let share = load.decode_blocks() as f32 / total as f32;
            Some(share)
        };
        let most = self.kv_usage?;
        let usage = engine.and_then(|engine| engine.kv_usage).or_else(booked)?;
        (usage > most).then_some("kv_usage")
    }

    /// Returns the name of the first threshold that makes no sense, and what is wrong with it.
    ///
    /// # Errors
    /// The key and the problem.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        match self.kv_usage {
            Some(share) if !(0.0..=1.0).contains(&share) => {
                Err(("kv_usage", format!("`{share}` is not a share: expected 0 to 1")))
            }
            _ => Ok(()),
        }
    }
}

impl BusyRules {
    /// Rules with these thresholds for all models, and those of single models, which take precedence one by
    /// one.
    #[must_use]
    pub fn new(default: BusyByLeg, models: impl IntoIterator<Item = (ModelName, BusyByLeg)>) -> Self {
        let models = models.into_iter().filter(|(_, legs)| !legs.is_empty());
        Self { default, models: models.collect(), requests_wait: false }
    }

    /// Says whether a request that finds no free worker waits in a queue.
    #[must_use]
    pub fn with_queue(mut self, requests_wait: bool) -> Self {
        self.requests_wait = requests_wait;
        self
    }

    /// Returns whether a request that finds no free worker waits in a queue.
    #[must_use]
    pub(crate) fn requests_wait(&self) -> bool {
        self.requests_wait
    }

    /// Returns the thresholds of a model's leg. An adapter has those of its model where it has none.
    #[must_use]
    pub fn of(&self, model: &ModelName, leg: Leg, workers: &Snapshot) -> BusyThresholds {
        let of_leg = |legs: &BusyByLeg| legs.get(&leg).copied().unwrap_or_default();
        let of_model = |model| self.models.get(model).map(of_leg).unwrap_or_default();
        let parent = workers.parent_of(model).map(of_model).unwrap_or_default();
        of_model(model).or(parent).or(of_leg(&self.default))
    }

    pub(crate) fn limits_of(&self, query: &Query<'_>, leg: Leg) -> LegLimits {
        let thresholds = self.of(query.model, leg, query.snapshot);
        LegLimits { thresholds, requests_wait: self.requests_wait }
    }

    /// Returns every candidate that is beyond a threshold now.
    #[must_use]
    pub fn busy_candidates(&self, snapshot: &Snapshot) -> Vec<BusyCandidate> {
        if *self == Self::default() {
            return Vec::new();
        }
        let mut busy = Vec::new();
        for model in snapshot.models() {
            for leg in [Leg::Prefill, Leg::Decode, Leg::Aggregated] {
                let thresholds = self.of(model, leg, snapshot);
                let beyond = snapshot.pool(model, leg).iter().filter_map(|candidate| {
                    let reason = thresholds.exceeded(candidate.load().view())?;
                    let (worker, dp_rank) = (candidate.worker_id(), candidate.rank);
                    Some(BusyCandidate { worker, dp_rank, model: model.clone(), leg, reason })
                });
                busy.extend(beyond);
            }
        }
        busy
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{EngineLoad, Worker, WorkerSpec};
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn b8_a_figure_that_the_engine_does_not_tell_refuses_nothing() {
        let flag = "role=decode,engine=vllm,url=http://a:1";
        let worker = Worker::new(WorkerSpec::parse_flag(flag).unwrap());
        let rules = BusyThresholds { kv_usage: Some(0.5), engine_queue: Some(2), prefill_tokens: None };
        let exceeded = |waiting, kv_usage| {
            let load = EngineLoad { running: None, waiting, kv_usage, read_at: Instant::now() };
            worker.set_engine_load(Some(load));
            rules.exceeded(worker.load(DpRank(0)).unwrap().view())
        };
        // B8.4
        assert_eq!(exceeded(None, None), None);
        assert_eq!(
            (exceeded(Some(3), None), exceeded(None, Some(0.6))),
            (Some("engine_queue"), Some("kv_usage"))
        );
    }

    #[test]
    fn f6_a_model_s_own_threshold_precedes_the_one_for_all_models() {
        let all = BusyThresholds { kv_usage: Some(0.9), engine_queue: Some(4), prefill_tokens: None };
        let own = BusyThresholds { kv_usage: Some(0.5), ..BusyThresholds::default() };
        let (model, workers) = (ModelName::new("m"), Snapshot::default());
        let rules =
            BusyRules::new([(Leg::Decode, all)].into(), [(model.clone(), [(Leg::Decode, own)].into())]);
        assert_eq!(rules.of(&model, Leg::Decode, &workers), BusyThresholds { kv_usage: Some(0.5), ..all });
        assert_eq!(rules.of(&ModelName::new("other"), Leg::Decode, &workers), all);
        assert_eq!(rules.of(&model, Leg::Prefill, &workers), BusyThresholds::default());
        let beyond = |kv_usage| BusyThresholds { kv_usage, ..all }.check().is_err();
        assert!(beyond(Some(1.1)) && beyond(Some(f32::NAN)) && !beyond(Some(1.0)) && !beyond(None));
    }
}
