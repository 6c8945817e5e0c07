//! First legs of a pair whose partners are all busy: they would wait, or be refused, although another pair is
//! free.

use pointsman_workers::{Candidate, Pool, WorkerSpec};

use super::described::{fits, needs_partner, other, partners};
use crate::{busy::BusyRules, decision_facts::MAX_GROUPS, query::Query};

/// Leaves out the candidates all of whose partners are busy, if others are left. Candidates of a group have
/// the same partners.
pub(super) fn prefer_free_partners(query: &Query<'_>, busy: &BusyRules, pool: &Pool, rows: &mut Vec<u32>) {
    if !needs_partner(query) || !(2..=MAX_GROUPS).contains(&pool.group_count()) {
        return;
    }
    let mut free = 0_u64;
    for (bit, spec) in pool.groups().enumerate() {
        free |= u64::from(has_free_partner(query, busy, spec)) << bit;
    }
    let groups = pool.group_of_rows();
    let is_free = |row: &u32| groups.get(*row as usize).is_some_and(|group| free & (1 << group) != 0);
    if rows.iter().any(is_free) {
        rows.retain(is_free);
    }
}

fn has_free_partner(query: &Query<'_>, busy: &BusyRules, spec: &WorkerSpec) -> bool {
    let leg = other(query.leg);
    let limits = busy.limits_of(query, leg);
    let is_free = |candidate: &Candidate| {
        candidate.ineligible().is_none()
            && !(limits.requests_wait && candidate.worker.is_at_learned_limit())
            && limits.thresholds.exceeded(candidate.load().view()).is_none()
    };
    let mut others = partners(query, query.snapshot.pool(query.model, leg));
    others.any(|candidate| fits(query.leg, spec, candidate.worker.spec()) && is_free(candidate))
}
