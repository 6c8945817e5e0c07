//! What a generation runs, told without its policies: records keep this long after the instances are gone.

use std::sync::Arc;

use crate::{
    facts::Wants,
    policy::{Digest, Policy, World},
    slot::{Generation, Lane, Normalize, Picker, Program, SlotKind},
};

/// A generation's program as records tell it.
#[derive(Debug)]
pub struct ProgramSummary {
    /// The slot it filled.
    pub slot: SlotKind,
    /// Its number.
    pub generation: Generation,
    /// Whether it served all, or a share.
    pub lane: Lane,
    /// The policies in the order they are asked: filters, then a selector or scorers, or one decode override.
    pub policies: Vec<PolicySummary>,
    /// How a row is picked from the scorers' costs.
    pub picker: Option<Picker>,
}

/// One policy of a program.
#[derive(Debug)]
pub struct PolicySummary {
    /// The name it gives itself.
    pub name: Arc<str>,
    /// The version it gives itself.
    pub version: Arc<str>,
    /// Digest of its bytes.
    pub digest: Digest,
    /// The world it fills.
    pub world: World,
    /// The facts it is handed.
    pub wants: Wants,
    /// A scorer's weight and the scale of its costs.
    pub weighed: Option<(f32, Normalize)>,
}

impl ProgramSummary {
    pub(crate) fn of(slot: SlotKind, generation: Generation, lane: Lane, program: &Program) -> Self {
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
        Self { slot, generation, lane, policies, picker }
    }

    /// The policy that the program is named by: the first that is no filter.
    #[must_use]
    pub fn ranker(&self) -> Option<&PolicySummary> {
        self.policies.iter().find(|step| step.world != World::Filter)
    }
}

impl PolicySummary {
    fn of(policy: &Arc<dyn Policy>, weighed: Option<(f32, Normalize)>) -> Self {
        let info = policy.info();
        Self {
            name: info.name.clone(),
            version: info.version.clone(),
            digest: info.digest,
            world: info.world,
            wants: info.wants.clone(),
            weighed,
        }
    }
}
