//! What a leg asks of the descriptions of workers. Candidates of a group have the same answer.

use pointsman_workers::{Candidate, Leg, Pool, WorkerSpec};

use crate::{decision_facts::MAX_GROUPS, query::Query, router::no_worker::Phrase};

/// Which candidates may serve a leg by their descriptions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Described {
    /// All of them.
    All,
    /// Those of the groups whose bits are set, of at most [`MAX_GROUPS`].
    Groups(u64),
    /// There are too many groups: each candidate has to be asked.
    Unknown,
}

impl Described {
    pub(super) fn of(query: &Query<'_>, pool: &Pool) -> Self {
        if !asks(query) {
            return Self::All;
        }
        if pool.group_count() > MAX_GROUPS {
            return Self::Unknown;
        }
        let mut refused = 0_u64;
        for (bit, spec) in pool.groups().enumerate() {
            refused |= u64::from(refused_by_description(query, spec).is_some()) << bit;
        }
        if refused == 0 { Self::All } else { Self::Groups(!refused) }
    }

    /// Returns whether the candidate of a row may serve the leg by its description; `None`: it has to be
    /// asked.
    pub(super) fn may_serve(self, pool: &Pool, row: u32) -> Option<bool> {
        match self {
            Self::All => Some(true),
            Self::Groups(groups) => {
                let group = *pool.group_of_rows().get(row as usize)?;
                Some(groups & (1 << group) != 0)
            }
            Self::Unknown => None,
        }
    }
}

/// Returns whether the leg asks anything of descriptions.
fn asks(query: &Query<'_>) -> bool {
    let request = query.request;
    let needs_partner = query.leg == Leg::Prefill && !query.probe;
    !request.required_taints.is_empty()
        || request.lora.is_some()
        || needs_partner
        || query.other_leg.is_some()
}

/// Returns why a worker with this description may not serve the leg, when it may not. Reads nothing that
/// differs within a group.
pub(super) fn refused_by_description(query: &Query<'_>, spec: &WorkerSpec) -> Option<Phrase> {
    let request = query.request;
    if !request.required_taints.iter().all(|taint| spec.taints.contains(taint)) {
        return Some(("lacks a required taint", "lack a required taint"));
    }
    if let Some(lora) = request.lora.as_deref().filter(|_| !spec.loras.is_empty())
        && !spec.loras.iter().any(|loaded| loaded == lora)
    {
        return Some(("lacks the LoRA", "lack the LoRA"));
    }
    if let Some(peer) = query.peer() {
        if !spec.pairs_with(peer) {
            return Some((
                "uses another handoff protocol than the other leg",
                "use another handoff protocol than the other leg",
            ));
        }
        let (prefill, decode) = if query.leg == Leg::Prefill { (spec, peer) } else { (peer, spec) };
        if prefill.forbids_transfer_to(decode) {
            return Some((
                "is outside the prefill worker's transfer domain",
                "are outside the prefill worker's transfer domain",
            ));
        }
    }
    let needs_partner = query.leg == Leg::Prefill && query.other_leg.is_none() && !query.probe;
    (needs_partner && !has_partner(query, spec)).then_some((
        "has no decode worker with its handoff protocol",
        "have no decode worker with their handoff protocol",
    ))
}

/// Whether some decode worker is up that can take over from this prefill worker.
fn has_partner(query: &Query<'_>, spec: &WorkerSpec) -> bool {
    let up = |candidate: &Candidate| candidate.ineligible().is_none_or(|reason| !reason.is_down());
    let fits = |decode: &WorkerSpec| decode.pairs_with(spec) && !spec.forbids_transfer_to(decode);
    let decode = query.snapshot.pool(query.model, Leg::Decode);
    decode.iter().any(|candidate| fits(candidate.worker.spec()) && up(candidate))
}
