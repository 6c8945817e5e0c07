//! The workers that are up for the other leg of a pair, by what decides whether two workers can pair: a candidate
//! is asked in constant time, where there are too many groups of candidates to ask each.

use std::{
    collections::{BTreeSet, HashSet},
    hash::{BuildHasher as _, RandomState},
};

use pointsman_workers::{Leg, Pool, WorkerSpec};

use super::described::{is_up, needs_partner, other, partners};
use crate::query::Query;

#[derive(Debug)]
pub(super) struct PartnerIndex<'a> {
    /// Domains within which some prefill worker has to transfer; `None`: any worker will do.
    domains: BTreeSet<Option<&'a str>>,
    /// Hashes of what a partner has to be equal in.
    keys: HashSet<u64>,
    hasher: RandomState,
}

/// Whether the compatibility of a key is that of a worker, or that of any.
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

    /// Whether some worker is up that can run the other leg with this one.
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
