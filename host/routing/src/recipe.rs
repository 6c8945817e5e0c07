//! What a generation runs, told without its policies: records keep this long after the instances are gone.

use std::sync::Arc;

use crate::{
    facts::Wants,
    policy::{Digest, Policy, World},
    slot::{Generation, Mode, Normalize, Picker, Program, SlotKind},
};

/// A generation's program as records tell it.
#[derive(Debug)]
pub struct Recipe {
    /// The slot it filled.
    pub slot: SlotKind,
    /// Its number.
    pub generation: Generation,
    /// Whether it served all, or a share.
    pub mode: Mode,
    /// The policies in the order they are asked: filters, then a selector or scorers, or one decode override.
    pub steps: Vec<Step>,
    /// How a row is picked from the scorers' costs.
    pub picker: Option<Picker>,
}

/// One policy of a program.
#[derive(Debug)]
pub struct Step {
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

impl Recipe {
    pub(crate) fn of(slot: SlotKind, generation: Generation, mode: Mode, program: &Program) -> Self {
        let step = |policy: &Arc<dyn Policy>| Step::of(policy, None);
        let (steps, picker) = match program {
            Program::Native(_) => (Vec::new(), None),
            Program::Selector { filters, selector } => {
                (filters.iter().chain([selector]).map(step).collect(), None)
            }
            Program::Scorers { filters, scorers, picker } => {
                let scorers =
                    scorers.iter().map(|one| Step::of(&one.policy, Some((one.weight, one.normalize))));
                (filters.iter().map(step).chain(scorers).collect(), Some(*picker))
            }
            Program::DecodeOverride(policy) => (vec![step(policy)], None),
        };
        Self { slot, generation, mode, steps, picker }
    }

    /// The policy that the program is named by: the first that is no filter.
    #[must_use]
    pub fn head(&self) -> Option<&Step> {
        self.steps.iter().find(|step| step.world != World::Filter)
    }
}

impl Step {
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
