//! Settings that a trial takes from its slot, because it has none of its own.

use pointsman_routing::Lane;

use super::{
    super::{plan::Refused, program_builder::ProgramBuilder},
    ManagedSlot,
};
use crate::{
    refusal::Refusal,
    spec::{InheritedBy, LaneSpec},
};

impl ManagedSlot {
    /// Returns the spec of a lane. Settings that are for a policy by name are for any once the active lane
    /// has a file, which gets them as well. Otherwise the name is the one that this policy gives itself.
    pub(super) fn spec_now(&self, mode: Lane, builder: &ProgramBuilder) -> LaneSpec {
        let mut spec = self.spec_of(mode).clone();
        if let Some(InheritedBy::Named(name)) = &mut spec.inherited_by {
            if builder.has(&self.active.file) {
                spec.inherited_by = Some(InheritedBy::Any);
            } else if let Some(own) = self.spec.active.rank.as_ref().and_then(|rank| builder.name_of(rank)) {
                own.clone_into(name);
            }
        }
        spec
    }

    /// Says which settings the policy in a trial's file got that refuses them, unless they are the trial's
    /// own.
    pub(super) fn inherited_settings(&self, mode: Lane, refused: &Refused) -> Option<String> {
        let lane = self.lane_of(mode);
        let inherited_by = lane.inherited_by.as_ref()?;
        if refused.file != lane.found || !matches!(*refused.refusal, Refusal::Configure(_)) {
            return None;
        }
        let (slot, model) = self.name();
        let section = model.map_or("policies".to_owned(), |model| format!("models.\"{model}\""));
        let table = format!("[{section}.slots.{slot}]");
        Some(match inherited_by {
            InheritedBy::Any => format!(
                "; the {mode} got the settings of {table}: set `{mode}.settings` there to give it others, `{{}}` for none"
            ),
            InheritedBy::Named(name) => format!(
                "; the settings of {table} are for `{name}`, and another policy gets none: set `{mode}.settings` there \
                 to give it some"
            ),
        })
    }
}
