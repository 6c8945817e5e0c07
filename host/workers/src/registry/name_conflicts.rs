//! Names that one worker lists as a model and another as an adapter, or as adapters of different models:
//! requests for such a name would be answered by different models in turn.

use std::{collections::hash_map::Entry, fmt};

use super::{FastMap, Member, Registry};
use crate::id::{ModelName, WorkerId};

/// Maximum number of conflicts that are reported.
const MAX_TOLD: usize = 32;

/// A name that two workers list in different ways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameConflict {
    name: ModelName,
    /// The worker that lists it as a model (`None`), or as an adapter of this one.
    first: (WorkerId, Option<ModelName>),
    /// The worker that lists it as an adapter of another model.
    other: (WorkerId, ModelName),
}

/// The names of one snapshot.
#[derive(Debug, Default)]
pub(super) struct NameConflicts {
    /// Names that engines list as those of models, each with the first worker.
    base_models: FastMap<ModelName, WorkerId>,
    first: Vec<NameConflict>,
}

impl Registry {
    /// Has the pools follow workers that began or ended to drain, if that changes which workers a name has.
    pub fn follow_drains(&self) {
        let members = self.members.lock();
        let has_conflict = |conflicts: &NameConflicts| !conflicts.first.is_empty();
        if has_conflict(&self.snapshot().name_conflicts) || has_conflict(&NameConflicts::among(&members)) {
            self.publish(&members);
        }
    }
}

impl NameConflicts {
    pub(super) fn among(members: &[Member]) -> Self {
        // One that drains will be gone. One that is down may come back and serve its model.
        let staying = members.iter().filter(|member| !member.worker.draining() && !member.worker.leaving());
        let mut base_models = FastMap::default();
        for member in staying.clone() {
            // One that the operator left out is not served there.
            let is_served =
                |model: &&ModelName| member.worker.spec().models.is_empty() || member.models.contains(model);
            for model in member.base_models.iter().filter(is_served) {
                base_models.entry(model.clone()).or_insert(member.worker.id());
            }
        }
        let mut conflicts = Self { base_models, first: Vec::new() };
        let mut parents: FastMap<&ModelName, (WorkerId, &ModelName)> = FastMap::default();
        for member in staying {
            let id = member.worker.id();
            for (adapter, parent) in &member.adapters {
                let first = match (conflicts.base_models.get(adapter), parents.entry(adapter)) {
                    (Some(worker), _) => Some((*worker, None)),
                    (None, Entry::Vacant(vacant)) => {
                        vacant.insert((id, parent));
                        None
                    }
                    (None, Entry::Occupied(known)) => {
                        let (worker, model) = *known.get();
                        (model != parent).then(|| (worker, Some(model.clone())))
                    }
                };
                first.into_iter().for_each(|first| conflicts.add(adapter, first, (id, parent.clone())));
            }
        }
        conflicts
    }

    fn add(&mut self, name: &ModelName, first: (WorkerId, Option<ModelName>), other: (WorkerId, ModelName)) {
        if self.first.len() < MAX_TOLD && !self.first.iter().any(|conflict| conflict.name == *name) {
            self.first.push(NameConflict { name: name.clone(), first, other });
        }
    }

    /// Returns whether an engine lists the name as that of a model. Its adapters elsewhere do not count.
    pub(super) fn is_base_model(&self, name: &ModelName) -> bool {
        self.base_models.contains_key(name)
    }

    pub(super) fn first(&self) -> &[NameConflict] {
        &self.first
    }
}

/// Warns of the names that had no conflict in the snapshot before.
pub(super) fn warn_of_new(now: &NameConflicts, before: &NameConflicts) {
    let is_known = |name: &ModelName| before.first.iter().any(|conflict| conflict.name == *name);
    for conflict in now.first.iter().filter(|conflict| !is_known(&conflict.name)) {
        let (name, problem) = (conflict.name.as_str(), conflict.to_string());
        tracing::warn!(name, problem, "name conflict of models and adapters");
    }
}

impl fmt::Display for NameConflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, (first, model), (other, parent)) = (self.name.as_str(), &self.first, &self.other);
        let parent = parent.as_str();
        match model.as_ref().map(ModelName::as_str) {
            None => write!(
                f,
                "worker {first} lists `{name}` as a model and worker {other} as an adapter of `{parent}`: requests \
                 for it go to the workers that list it as a model; give the adapter another name, or drain or \
                 remove worker {first}"
            ),
            Some(model) => write!(
                f,
                "worker {first} lists `{name}` as an adapter of `{model}` and worker {other} as one of `{parent}`: \
                 requests for it go to both; give the adapters different names, or their model the same name"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ListedModels, Registry, tests::registry};
    use crate::{
        id::{Leg, ModelName, WorkerId},
        worker::{Health, Worker},
    };

    fn learn(registry: &Registry, id: u64, base_models: &[&str], adapters: &[(&str, &str)]) {
        let names = base_models.iter().chain(adapters.iter().map(|(adapter, _)| adapter));
        let listed = ListedModels {
            models: names.map(|name| ModelName::new(name)).collect(),
            base_models: base_models.iter().map(|name| ModelName::new(name)).collect(),
            adapters: adapters.iter().map(|(one, of)| (ModelName::new(one), ModelName::new(of))).collect(),
        };
        registry.learn_models(WorkerId(id), listed, false);
    }

    fn serving(registry: &Registry, name: &str) -> Vec<u64> {
        let snapshot = registry.snapshot();
        let pool = snapshot.pool(&ModelName::new(name), Leg::Aggregated);
        pool.iter().map(|candidate| candidate.worker_id().0).collect()
    }

    fn told(registry: &Registry) -> Vec<String> {
        registry.snapshot().name_conflicts().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn b3_the_name_of_a_model_is_that_of_no_adapter() {
        let registry = registry(3);
        learn(&registry, 1, &["base"], &[("m", "base"), ("own", "base")]);
        assert_eq!((serving(&registry, "m"), told(&registry).len()), (vec![1], 0));
        learn(&registry, 2, &["m"], &[]);
        learn(&registry, 3, &["base"], &[("m", "base"), ("own", "base")]);
        // B3.15
        assert_eq!((serving(&registry, "m"), serving(&registry, "own")), (vec![2], vec![1, 3]));
        assert_eq!(registry.snapshot().parent_of(&ModelName::new("m")), None);
        let text = "worker 2 lists `m` as a model and worker 1 as an adapter of `base`: requests for it go to the \
                    workers that list it as a model; give the adapter another name, or drain or remove worker 2";
        assert_eq!(told(&registry), [text]);
        let two = registry.snapshot().get(WorkerId(2)).unwrap().clone();
        // B3.15: one that is down
        two.set_health(Health::Unhealthy);
        registry.follow_drains();
        assert_eq!(serving(&registry, "m"), [2]);
        // B3.15: one that drains or leaves
        for set in [Worker::set_draining, Worker::set_leaving] {
            set(&two, true);
            registry.follow_drains();
            assert_eq!((serving(&registry, "m"), told(&registry).len()), (vec![1, 2, 3], 0));
            set(&two, false);
            registry.follow_drains();
            assert_eq!((serving(&registry, "m"), told(&registry).len()), (vec![2], 1));
        }
        registry.remove(WorkerId(2));
        assert_eq!((serving(&registry, "m"), told(&registry).len()), (vec![1, 3], 0));
        // vLLM's Rust frontend does not say which names are adapters.
        let listed =
            ListedModels { models: vec![ModelName::new("own")], base_models: vec![], adapters: vec![] };
        registry.learn_models(WorkerId(3), listed, false);
        assert_eq!((serving(&registry, "own"), told(&registry).len()), (vec![1, 3], 0));
    }

    #[test]
    fn b3_an_adapter_with_the_name_of_its_engines_model_is_that_model() {
        let registry = registry(2);
        learn(&registry, 1, &["m"], &[("m", "m"), ("own", "m")]);
        // B3.15
        assert_eq!((serving(&registry, "m"), serving(&registry, "own")), (vec![1], vec![1]));
        assert_eq!(registry.snapshot().parent_of(&ModelName::new("m")), None);
        assert_eq!(told(&registry), [""; 0]);
        learn(&registry, 2, &["m"], &[("m", "m")]);
        // B3.15
        assert_eq!((serving(&registry, "m"), told(&registry).len()), (vec![1, 2], 0));
    }

    #[test]
    fn b3_an_adapter_of_two_models_has_the_first_by_name_and_is_told() {
        for order in [[1, 2], [2, 1]] {
            let registry = registry(2);
            for id in order {
                let model = if id == 1 { "a" } else { "b" };
                learn(&registry, id, &[model], &[("ad", model)]);
            }
            // B3.15
            assert_eq!(serving(&registry, "ad"), [1, 2]);
            let snapshot = registry.snapshot();
            assert_eq!(snapshot.parent_of(&ModelName::new("ad")).map(ModelName::as_str), Some("a"));
            let text = "worker 1 lists `ad` as an adapter of `a` and worker 2 as one of `b`: requests for it go to \
                        both; give the adapters different names, or their model the same name";
            assert_eq!(told(&registry), [text]);
        }
    }
}
