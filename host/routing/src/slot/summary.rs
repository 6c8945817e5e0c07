//! Summary of a generation's program for decision records, which outlive the loaded policies.

use std::sync::Arc;

use pointsman_workers::ModelName;

use super::{Lane, Normalize, Picker, Program, SlotKind};
use crate::{
    facts::Wants,
    ids::Generation,
    policy::{Digest, Policy, World},
};

/// Summary of a generation's program.
#[derive(Debug)]
pub struct ProgramSummary {
    /// The slot.
    pub slot: SlotKind,
    /// Model of the slot; `None`: the slot of all models.
    pub model: Option<ModelName>,
    /// The generation's number.
    pub generation: Generation,
    /// The lane it served in.
    pub lane: Lane,
    /// Names of the last filter and of the policy that ranks, as `GET /policies` shows them; `native` without
    /// a policy.
    pub name: Arc<str>,
    /// The policies in call order: filters, then a selector or scorers; or one decode override.
    pub policies: Vec<PolicySummary>,
    /// Picks a row from the scorers' costs.
    pub picker: Option<Picker>,
}

/// One policy of a program.
#[derive(Debug)]
pub struct PolicySummary {
    /// The name that the policy declares.
    pub name: Arc<str>,
    /// The version that the policy declares.
    pub version: Arc<str>,
    /// Digest of the policy's bytes.
    pub digest: Digest,
    /// Digest of the policy's settings; `None`: it has none.
    pub settings_digest: Option<Digest>,
    /// The world that the policy implements.
    pub world: World,
    /// The facts that the policy gets.
    pub wants: Wants,
    /// A scorer's weight and the normalization of its costs.
    pub weight: Option<(f32, Normalize)>,
}

impl ProgramSummary {
    pub(crate) fn of(
        (slot, model): (SlotKind, &Option<ModelName>),
        generation: Generation,
        lane: Lane,
        program: &Program,
    ) -> Self {
        let step = |policy: &Arc<dyn Policy>| PolicySummary::of(policy, None);
        let (policies, picker) = match program {
            Program::Native(_) => (Vec::new(), None),
            Program::Selector { filters, selector } => {
                (filters.iter().chain([selector]).map(step).collect(), None)
            }
            Program::Scorers { filters, scorers, picker } => {
                let scorers = scorers
                    .iter()
                    .map(|one| PolicySummary::of(&one.policy, Some((one.weight, one.normalize))));
                (filters.iter().map(step).chain(scorers).collect(), Some(*picker))
            }
            Program::DecodeOverride(policy) => (vec![step(policy)], None),
        };
        let filter = program.filters().last().map(|filter| filter.info());
        let names: Vec<&str> = filter.into_iter().chain(program.ranker()).map(|info| &*info.name).collect();
        let name = if names.is_empty() { "native".into() } else { names.join("+").into() };
        Self { slot, model: model.clone(), generation, lane, name, policies, picker }
    }

    /// The last filter, which is the one that [`Self::name`] has.
    #[must_use]
    pub fn filter(&self) -> Option<&PolicySummary> {
        self.policies.iter().rfind(|step| step.world == World::Filter)
    }

    /// The policy that ranks: the first that is not a filter.
    #[must_use]
    pub fn ranker(&self) -> Option<&PolicySummary> {
        self.policies.iter().find(|step| step.world != World::Filter)
    }
}

impl PolicySummary {
    fn of(policy: &Arc<dyn Policy>, weight: Option<(f32, Normalize)>) -> Self {
        let info = policy.info();
        Self {
            name: info.name.clone(),
            version: info.version.clone(),
            digest: info.digest,
            settings_digest: info.settings_digest,
            world: info.world,
            wants: info.wants.clone(),
            weight,
        }
    }
}
