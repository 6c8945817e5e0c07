//! Merges the workers of all sources: each id, each URL and each pod has one owner.

use std::{
    cmp::Reverse,
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
};

use pointsman_workers::WorkerId;

use crate::found::{Found, Refusal};

/// Precedence of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// The configuration.
    Configured,
    /// Operators, through the admin listener.
    Operator,
    /// Any other source.
    Discovered,
}

/// A source's wish that a worker is in the fleet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim<'a> {
    /// Number of the source.
    pub(crate) source: usize,
    pub(crate) rank: Rank,
    /// Whether the source owns this id now.
    pub(crate) owns: bool,
    pub(crate) found: &'a Found,
}

/// Result of the merge; each worker has the number of its source.
#[derive(Debug, Default)]
pub(crate) struct Merged<'a> {
    pub(crate) accepted: Vec<(usize, &'a Found)>,
    pub(crate) refused: Vec<(usize, Refusal)>,
}

/// Gives each id and URL to one source: by rank, then to the present owner, then to the source that was
/// configured first. Accepts at most `max_workers`, apart from those of the configuration and of operators.
pub(crate) fn merge<'a>(mut claims: Vec<Claim<'a>>, names: &[Arc<str>], max_workers: usize) -> Merged<'a> {
    claims.sort_by_key(|claim| (claim.rank, Reverse(claim.owns), claim.source));
    let mut merged = Merged::default();
    let mut owners = Owners::default();
    let mut discovered = 0;
    for claim in claims {
        let Claim { source, rank, found, .. } = claim;
        match owners.refusal(&claim, names) {
            Some(problem) => merged.refused.push((source, Refusal::new(&found.spec.url, &problem))),
            None if rank == Rank::Discovered && discovered >= max_workers => {
                let problem = format!(
                    "the fleet has {max_workers} discovered workers: raise discovery.max_workers to accept more"
                );
                merged.refused.push((source, Refusal::new(&found.spec.url, &problem)));
            }
            None => {
                discovered += usize::from(rank == Rank::Discovered);
                merged.accepted.push((source, found));
            }
        }
    }
    merged
}

/// The claims that own an id, a URL or an identity.
#[derive(Default)]
struct Owners<'a> {
    ids: HashMap<WorkerId, Claim<'a>>,
    urls: HashMap<&'a str, Claim<'a>>,
    /// Owners by the worker's identity, for example a pod.
    identities: HashMap<&'a str, Claim<'a>>,
}

impl<'a> Owners<'a> {
    /// Returns why a claim is refused; otherwise it owns the ids and URLs in it.
    fn refusal(&mut self, claim: &Claim<'a>, names: &[Arc<str>]) -> Option<String> {
        let id = claim.found.spec.id;
        if let Some(owner) = self.ids.get(&id) {
            let (own, owner) = (claim.place(names), owner.place(names));
            return Some(format!("id {id} of {own} belongs to {owner}: remove one of them"));
        }
        let identity = claim.found.identity.as_deref();
        if let Some(owner) = identity.and_then(|identity| self.identities.get(identity)) {
            let (other, own, owner) = (owner.found.spec.id, claim.place(names), owner.place(names));
            return Some(format!(
                "the pod of worker {id} of {own} is worker {other} of {owner}: remove one of them"
            ));
        }
        match self.urls.entry(&claim.found.spec.url) {
            // An operator may describe an engine twice on purpose, a source does so by mistake.
            Entry::Occupied(owner)
                if owner.get().source != claim.source || claim.rank == Rank::Discovered =>
            {
                let (own, other, owner) =
                    (claim.place(names), owner.get().found.spec.id, owner.get().place(names));
                return Some(format!(
                    "the URL of worker {id} of {own} is that of worker {other} of {owner}: remove one of them"
                ));
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(vacant) => drop(vacant.insert(*claim)),
        }
        self.ids.insert(id, *claim);
        if let Some(identity) = identity {
            self.identities.insert(identity, *claim);
        }
        None
    }
}

impl Claim<'_> {
    /// Returns where the worker is described.
    fn place(&self, names: &[Arc<str>]) -> String {
        let source = names.get(self.source).map_or("", |name| &**name);
        match &self.found.entry {
            Some(entry) => format!("entry `{entry}` of source `{source}`"),
            None => format!("source `{source}`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::WorkerSpec;

    use super::*;

    fn found(flag: &str) -> Found {
        Found::staying(WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,{flag}")).unwrap())
    }

    fn names() -> Vec<Arc<str>> {
        ["static", "admin", "etcd:a", "file:b"].map(Arc::from).to_vec()
    }

    #[test]
    fn the_same_id_or_url_from_two_sources_is_refused_with_both_named() {
        let (one, same_id) = (found("id=1,url=http://a:1"), found("id=1,url=http://b:1"));
        let (same_url, other) = (found("id=2,url=http://a:1"), found("id=3,url=http://c:1"));
        let claim = |source, found, owns| Claim { source, rank: Rank::Discovered, owns, found };
        let claims = vec![
            claim(3, &same_id, false),
            claim(3, &same_url, false),
            claim(3, &other, false),
            claim(2, &one, false),
        ];
        let merged = merge(claims, &names(), 10);
        let accepted: Vec<_> =
            merged.accepted.iter().map(|(source, found)| (*source, found.spec.id.0)).collect();
        assert_eq!(accepted, [(2, 1), (3, 3)]);
        let problems: Vec<_> = merged.refused.iter().map(|(_, refusal)| refusal.problem.as_str()).collect();
        // P2.1, P2.2
        assert_eq!(
            problems,
            [
                "id 1 of source `file:b` belongs to source `etcd:a`: remove one of them",
                "the URL of worker 2 of source `file:b` is that of worker 1 of source `etcd:a`: remove one of them",
            ]
        );
    }

    #[test]
    fn two_entries_of_one_source_are_named() {
        let entry = |key: &str, flag: &str| Found { entry: Some(Arc::from(key)), ..found(flag) };
        let (one, same) = (entry("/w/a", "url=http://a:1"), entry("/w/b", "url=http://a:1"));
        let (first, second) = (entry("/w/c", "id=3,url=http://c:1"), entry("/w/d", "id=4,url=http://c:1"));
        let claim = |found| Claim { source: 2, rank: Rank::Discovered, owns: false, found };
        let merged = merge([&one, &same, &first, &second].map(claim).to_vec(), &names(), 10);
        let problems: Vec<_> = merged.refused.iter().map(|(_, refusal)| refusal.problem.as_str()).collect();
        let id = one.spec.id;
        // P2.1, P2.2
        assert_eq!(
            problems,
            [
                &*format!(
                    "id {id} of entry `/w/b` of source `etcd:a` belongs to entry `/w/a` of source `etcd:a`: remove \
                     one of them"
                ),
                "the URL of worker 4 of entry `/w/d` of source `etcd:a` is that of worker 3 of entry `/w/c` of source \
                 `etcd:a`: remove one of them",
            ]
        );
    }

    #[test]
    fn a_pod_that_two_sources_list_at_two_addresses_is_one_worker() {
        let at = |url: &str, identity: &str| Found {
            identity: Some(Arc::from(identity)),
            ..found(&format!("url={url}"))
        };
        let (pod, slice) = (at("http://10.0.0.1:8000", "uid-1/0"), at("http://[fd00::1]:8000", "uid-1/0"));
        let second = at("http://[fd00::1]:8001", "uid-1/1");
        let claim = |source, found| Claim { source, rank: Rank::Discovered, owns: false, found };
        let merged = merge(vec![claim(3, &slice), claim(3, &second), claim(2, &pod)], &names(), 10);
        let accepted: Vec<_> =
            merged.accepted.iter().map(|(source, found)| (*source, &*found.spec.url)).collect();
        // P9.8: across sources
        assert_eq!(accepted, [(2, "http://10.0.0.1:8000"), (3, "http://[fd00::1]:8001")]);
        let problem = &merged.refused[0].1.problem;
        assert!(
            problem.starts_with("the pod of worker ") && problem.contains("source `etcd:a`"),
            "{problem}"
        );
    }

    #[test]
    fn the_configuration_comes_first_and_then_the_present_owner() {
        let (one, two) = (found("id=1,url=http://a:1"), found("id=1,url=http://b:1"));
        let owner = |claims: Vec<Claim<'_>>| merge(claims, &names(), 10).accepted[0].0;
        let claim = |source, rank, owns, found| Claim { source, rank, owns, found };
        let later = claim(3, Rank::Discovered, true, &two);
        // P2.3: the present owner, then the configuration
        assert_eq!(owner(vec![claim(2, Rank::Discovered, false, &one), later]), 3);
        assert_eq!(owner(vec![claim(0, Rank::Configured, false, &one), later]), 0);
    }

    #[test]
    fn the_number_of_discovered_workers_is_bounded() {
        let all: Vec<Found> = (1..=4).map(|id| found(&format!("id={id},url=http://a:{id}"))).collect();
        let claims = |rank| all.iter().map(|found| Claim { source: 2, rank, owns: false, found }).collect();
        let merged = merge(claims(Rank::Discovered), &names(), 3);
        // P2.4: the number of workers
        assert_eq!((merged.accepted.len(), merged.refused.len()), (3, 1));
        assert!(merged.refused[0].1.problem.contains("discovery.max_workers"));
        let (one, two) = (found("id=11,url=http://b:1"), found("id=12,url=http://b:2"));
        let others = [(0, Rank::Configured, &one), (1, Rank::Operator, &two)];
        let others = others.map(|(source, rank, found)| Claim { source, rank, owns: false, found });
        let of_all: Vec<Claim<'_>> = others.into_iter().chain(claims(Rank::Discovered)).collect();
        // P2.4: besides those of the configuration and of operators
        assert_eq!(merge(of_all, &names(), 3).accepted.len(), 5);
        assert_eq!(merge(claims(Rank::Configured), &names(), 3).accepted.len(), 4);
    }
}
