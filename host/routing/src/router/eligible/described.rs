//! Conditions of a leg on the descriptions of workers. Candidates of a group have the same answer.

use std::{
    collections::{BTreeSet, HashSet},
    hash::{BuildHasher as _, RandomState},
};

use pointsman_workers::{Candidate, Ineligible, Leg, Pool, WorkerSpec};

use crate::{
    decision_facts::MAX_GROUPS,
    query::{Pairing, Query},
    router::no_worker::Phrase,
};

/// Candidates whose descriptions allow them to serve a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Described {
    /// All candidates.
    All,
    /// Candidates of the groups whose bits are set, at most [`MAX_GROUPS`].
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

    /// Returns whether the candidate of a row may serve the leg by its description; `None` if it has to be
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

/// Returns whether the leg has a constraint on the workers' descriptions.
fn asks(query: &Query<'_>) -> bool {
    let request = query.request;
    !request.required_taints.is_empty()
        || request.lora.is_some()
        || request.engine.is_some()
        || needs_partner(query)
        || query.other_leg.is_some()
}

/// Returns why a worker with this description may not serve the leg, when it may not. Reads nothing that
/// differs within a group.
pub(super) fn refused_by_description(query: &Query<'_>, spec: &WorkerSpec) -> Option<Phrase> {
    refused_with(query, spec, None)
}

/// Like [`refused_by_description`]. Looks for partners in `index`, if there is one.
pub(super) fn refused_with(
    query: &Query<'_>,
    spec: &WorkerSpec,
    index: Option<&PartnerIndex<'_>>,
) -> Option<Phrase> {
    let request = query.request;
    if request.engine.is_some_and(|engine| engine != spec.engine) {
        return Some(("runs an engine without this endpoint", "run an engine without this endpoint"));
    }
    let has_taint = |taint| spec.taints.contains(taint);
    if !query.only_consumes() && !request.required_taints.iter().all(has_taint) {
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
        if !fits(query.leg, spec, peer) {
            return Some((
                "is outside the prefill worker's transfer domain",
                "are outside the prefill worker's transfer domain",
            ));
        }
    }
    if !needs_partner(query) {
        return None;
    }
    let has_partner = index.map_or_else(|| has_partner(query, spec), |index| index.has_partner(query, spec));
    (!has_partner).then(|| without_partner(query))
}

/// The phrase for a worker without a partner.
fn without_partner(query: &Query<'_>) -> Phrase {
    match (query.pairing.other_pin, query.leg) {
        (None, Leg::Prefill) => (
            "has no decode worker that is up and has its handoff protocol",
            "have no decode worker that is up and has their handoff protocol",
        ),
        (None, _) => ("has no prefill worker to pair with", "have no prefill worker to pair with"),
        (Some(_), _) => (
            "cannot pair with the worker that the request names for the other leg",
            "cannot pair with the worker that the request names for the other leg",
        ),
    }
}

/// Returns whether the leg is the first of a pair, so that a worker for the other one has to be left.
pub(super) fn needs_partner(query: &Query<'_>) -> bool {
    let Pairing { is_first, other_pin, .. } = query.pairing;
    let decode_first = query.leg == Leg::Decode && (is_first || other_pin.is_some());
    (query.leg == Leg::Prefill || decode_first) && query.other_leg.is_none() && !query.probe
}

/// Returns whether some worker is up that can run the other leg of a pair with this one.
fn has_partner(query: &Query<'_>, spec: &WorkerSpec) -> bool {
    let others = query.snapshot.pool(query.model, other(query.leg));
    let fits = |candidate: &Candidate| fits(query.leg, spec, candidate.worker.spec());
    partners(query, others).any(|candidate| fits(candidate) && is_up(query, candidate))
}

/// Returns whether a worker may run the other leg, now or soon. One that drains still continues what it
/// stored.
pub(super) fn is_up(query: &Query<'_>, candidate: &Candidate) -> bool {
    let serves = |reason| query.continues && reason == Ineligible::Draining;
    candidate.ineligible().is_none_or(|reason| !reason.is_down() || serves(reason))
}

/// Candidates of the other leg: the worker's that a hint names, else all.
pub(super) fn partners<'a>(
    query: &Query<'_>,
    others: &'a [Candidate],
) -> impl Iterator<Item = &'a Candidate> {
    let pin = query.pairing.other_pin;
    others.iter().filter(move |candidate| {
        pin.is_none_or(|(worker, rank)| {
            candidate.worker_id() == worker && rank.is_none_or(|rank| candidate.rank == rank)
        })
    })
}

/// Returns whether two workers can run the legs of a request. `leg` is the leg of the first one.
pub(super) fn fits(leg: Leg, spec: &WorkerSpec, other: &WorkerSpec) -> bool {
    let (prefill, decode) = if leg == Leg::Prefill { (spec, other) } else { (other, spec) };
    decode.pairs_with(prefill) && !prefill.forbids_transfer_to(decode)
}

/// The other leg of a pair.
pub(super) fn other(leg: Leg) -> Leg {
    if leg == Leg::Prefill { Leg::Decode } else { Leg::Prefill }
}

/// The workers that are up for the other leg of a pair, by what decides whether two workers can pair: a
/// candidate is asked in constant time, where there are too many groups of candidates to ask each.
#[derive(Debug)]
pub(super) struct PartnerIndex<'a> {
    /// Domains within which some prefill worker has to transfer; `None`: any worker will do.
    domains: BTreeSet<Option<&'a str>>,
    /// Hashes of the properties that must be equal at a partner.
    keys: HashSet<u64>,
    hasher: RandomState,
}

/// Returns whether the compatibility of a key matches a worker, or is the one for any worker.
#[derive(Clone, Copy, Hash)]
enum Compatible<'a> {
    Any,
    With(Option<&'a str>),
}

impl<'a> PartnerIndex<'a> {
    /// Returns the index for a leg; `None` if it needs no partner.
    pub(super) fn of(query: &Query<'a>, pool: &'a Pool) -> Option<Self> {
        if !needs_partner(query) {
            return None;
        }
        let others = query.snapshot.pool(query.model, other(query.leg));
        let specs = || pool.groups().chain(others.groups());
        let domains = specs().map(required_domain).chain([None]).collect();
        let mut index = Self { domains, keys: HashSet::new(), hasher: RandomState::new() };
        let up = partners(query, others).filter(|candidate| is_up(query, candidate));
        let mut keys = HashSet::new();
        for spec in up.map(|candidate| candidate.worker.spec()) {
            for compatible in [Compatible::Any, Compatible::With(spec.kv_compatibility.as_deref())] {
                // A prefill worker has the domain of its rule; a decode worker may be meant by any.
                if query.leg == Leg::Decode {
                    keys.insert(index.key(spec, compatible, required_domain(spec)));
                } else {
                    keys.extend(index.domains.iter().map(|domain| index.key(spec, compatible, *domain)));
                }
            }
        }
        index.keys = keys;
        Some(index)
    }

    /// Returns whether some worker is up that can run the other leg with this one.
    pub(super) fn has_partner(&self, query: &Query<'_>, spec: &WorkerSpec) -> bool {
        let has = |compatible, domain| self.keys.contains(&self.key(spec, compatible, domain));
        let has_within = |domain| match spec.kv_compatibility.as_deref() {
            None => has(Compatible::Any, domain),
            own => has(Compatible::With(own), domain) || has(Compatible::With(None), domain),
        };
        if query.leg == Leg::Prefill {
            has_within(required_domain(spec))
        } else {
            self.domains.iter().any(|domain| has_within(*domain))
        }
    }

    fn key(&self, spec: &WorkerSpec, compatible: Compatible<'_>, domain: Option<&str>) -> u64 {
        let value = domain.map(|domain| (domain, spec.topology.get(domain)));
        self.hasher.hash_one((spec.handoff_protocol(), compatible, value))
    }
}

/// The domain within which a prefill worker has to transfer.
fn required_domain(spec: &WorkerSpec) -> Option<&str> {
    let rule = spec.kv_transfer.as_ref().filter(|rule| rule.weight.is_none())?;
    Some(&rule.domain)
}
