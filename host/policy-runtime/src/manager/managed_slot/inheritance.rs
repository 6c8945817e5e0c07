//! Settings and ranking that a trial takes from its slot, because it has none of its own.

use pointsman_routing::Lane;

use super::{
    super::{
        plan::{Plan, Refused},
        program_builder::ProgramBuilder,
    },
    ManagedSlot,
};
use crate::{
    refusal::Refusal,
    spec::{InheritedBy, LaneSpec, Rank},
};

impl ManagedSlot {
    /// Returns the spec of a lane. Settings that are for a policy by name are for any once the active lane
    /// has a file, which gets them as well. Otherwise the name is the one that this policy gives itself. A
    /// filter in a trial's file gets a ranking, too.
    pub(super) fn spec_now(&self, mode: Lane, builder: &ProgramBuilder) -> LaneSpec {
        let mut spec = self.spec_of(mode).clone();
        if let Some(InheritedBy::Named(name)) = &mut spec.inherited_by {
            if builder.has(&self.active.file) {
                spec.inherited_by = Some(InheritedBy::Any);
            } else if let Some(own) = self.spec.active.rank.as_ref().and_then(|rank| builder.name_of(rank)) {
                own.clone_into(name);
            }
        }
        if self.takes_rank(mode, builder) {
            spec.rank = self.rank_behind_filter(builder);
        }
        spec
    }

    /// Returns whether a filter in the file of a lane gets the ranking of the active lane.
    fn takes_rank(&self, mode: Lane, builder: &ProgramBuilder) -> bool {
        let has_own = mode == Lane::Active || self.spec_of(mode).rank.is_some();
        !has_own && builder.has(&self.lane_of(mode).file)
    }

    /// Returns the ranking of the active lane: that of its file, or the configured one. A file that was
    /// rolled back does not rank in a trial either.
    fn rank_behind_filter(&self, builder: &ProgramBuilder) -> Option<Rank> {
        let (file, lane) = (&self.active.file, &self.spec.active);
        let is_out = || self.active.asked.is_some_and(|asked| self.is_quarantined(asked));
        if builder.ranks(file, lane) && !is_out() {
            return Some(Rank::File { file: file.clone(), lane: Box::new(lane.clone()) });
        }
        lane.rank.clone()
    }

    /// Returns whether a trial's filter has to wait for the file that ranks behind it: the file is missing,
    /// perhaps in the middle of a replacement.
    pub(super) fn misses_rank(&self, mode: Lane, plan: &Plan, builder: &ProgramBuilder) -> bool {
        let is_missing = self.active.own.is_some() && !builder.has(&self.active.file);
        is_missing && plan.rank.is_some() && self.takes_rank(mode, builder)
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
