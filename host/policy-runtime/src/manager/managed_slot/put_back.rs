//! What a rollback puts back into the active lane: the content of before, behind the filters that the
//! configuration names now.

use std::sync::Arc;

use pointsman_routing::{Policy, Program};

use super::{
    super::{
        halves::Halves,
        managed_lane::{Content, Source},
    },
    ManagedSlot,
};

/// Why content is rolled back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Command,
    /// A failed call of the policy that runs in this step of the program.
    Failure {
        step: usize,
    },
}

impl ManagedSlot {
    /// Puts the previous content back into the active lane, and keeps the configured filters of `content` if
    /// they did not fail. Returns which of them are not in force, as the end of a message. Returns `None` if
    /// there is nothing to put back: what failed ran before, too, behind other filters.
    pub(super) fn put_back(&mut self, content: Content, cause: Cause) -> Option<String> {
        let previous = self.previous?;
        let (new, old) = (content.halves, previous.halves);
        let active = self.slot.pin().program.clone();
        let filters = active.filters().get(..new.filter_count).unwrap_or_default();
        // The filters of a promoted trial are those of its own lane.
        let are_configured = content.source != Source::Promoted;
        let others_ran_before = new.rest == old.rest;
        let keeps = are_configured
            && match cause {
                Cause::Failure { step } => step >= new.filter_count,
                Cause::Command => !others_ran_before,
            };
        if keeps && others_ran_before {
            return None;
        }
        let program = self.slot.previous()?;
        let halves = Halves { filters: new.filters, filter_count: new.filter_count, rest: old.rest };
        let kept = program.with_filters(old.filter_count, filters);
        let kept = kept.filter(|_| keeps && !self.is_quarantined(halves.whole()));
        let are_off = are_configured && kept.is_none() && new.filters != old.filters;
        let message = if are_off { filters_off(filters, &program, old.filter_count) } else { String::new() };
        let restored = match kept {
            Some(_) => Content { fingerprint: halves.whole(), halves, ..previous },
            None => previous,
        };
        self.slot.rollback_to(kept.unwrap_or(program))?;
        self.previous = None;
        self.active.set_content(restored);
        Some(message)
    }
}

/// Names the configured filters that are not in force, and those that are: the first `count` of `program`.
fn filters_off(configured: &[Arc<dyn Policy>], program: &Program, count: usize) -> String {
    let names = |filters: &[Arc<dyn Policy>]| {
        let names: Vec<String> = filters.iter().map(|filter| format!("`{}`", filter.info().name)).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    };
    let before = program.filters().get(..count).unwrap_or_default();
    format!(
        "; the filters of the configuration are not in force: {}; those of before are: {}",
        names(configured),
        names(before)
    )
}
