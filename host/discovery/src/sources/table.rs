//! The entries of a source by key, of which each describes workers or is refused.

use std::collections::BTreeMap;
#[cfg(feature = "etcd")]
use std::{collections::HashMap, sync::Arc};

use crate::found::{Found, Read, Refusal, SourceSnapshot};

/// Maximum number of entries of a source. Further ones are refused.
const MAX_KEYS: usize = 20_000;

/// Entries by key.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: BTreeMap<String, Entry>,
    /// Entries beyond the limit.
    dropped: usize,
}

/// Why an entry describes no workers.
#[derive(Debug, Default)]
pub(super) struct Invalid {
    pub(super) problem: String,
    /// Uids of the pods of the entry, and whether each ends; `None` if that is unknown.
    pub(super) pods: Option<BTreeMap<String, bool>>,
    /// Whether the entry says that it has no workers any more.
    pub(super) has_none: bool,
}

impl From<String> for Invalid {
    fn from(problem: String) -> Self {
        Self { problem, ..Self::default() }
    }
}

#[derive(Debug, Default)]
struct Entry {
    /// Workers of the last valid description.
    workers: Vec<Found>,
    /// Current problem of the description.
    problem: Option<String>,
}

impl Table {
    /// Sets an entry. An entry that becomes invalid keeps its last workers, because its key still exists,
    /// except those whose pods end or are gone, and unless it says that it has none.
    pub(super) fn set(&mut self, key: &str, described: Result<Vec<Found>, Invalid>) {
        if self.entries.len() >= MAX_KEYS && !self.entries.contains_key(key) {
            self.dropped += 1;
            return;
        }
        let entry = self.entries.entry(key.to_owned()).or_default();
        match described {
            Ok(workers) => *entry = Entry { workers, problem: None },
            Err(Invalid { problem, pods, has_none }) => {
                entry.problem = Some(problem);
                entry.workers.retain(|_| !has_none);
                pods.iter().for_each(|pods| entry.follow(pods));
            }
        }
    }

    #[cfg(feature = "etcd")]
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Removes an entry.
    pub(super) fn remove(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// Replaces all entries by those of a whole reading.
    pub(super) fn replace(&mut self, all: Vec<(String, Result<Vec<Found>, Invalid>)>) {
        let mut before = std::mem::take(&mut self.entries);
        self.dropped = 0;
        for (key, described) in all {
            if let Some(entry) = before.remove(&key) {
                self.entries.insert(key.clone(), entry);
            }
            self.set(&key, described);
        }
    }

    /// Returns all workers.
    pub(super) fn snapshot(&self, read: Read) -> SourceSnapshot {
        let problems = self.entries.iter().filter_map(|(key, entry)| Some((key, entry.problem.as_ref()?)));
        let mut refused: Vec<Refusal> = problems.map(|(key, problem)| Refusal::new(key, problem)).collect();
        if self.dropped > 0 {
            let problem = format!("{} entries more than the limit of {MAX_KEYS} are not read", self.dropped);
            refused.push(Refusal::new("*", &problem));
        }
        let workers = self.entries.values().flat_map(|entry| &entry.workers).cloned().collect();
        SourceSnapshot { workers, refused, read }
    }

    /// Returns the workers, of several with one URL the one whose entry was created last: an engine that
    /// registers anew under another key is not what its old key describes. The others are refused. Which one
    /// it is does not change while both entries are written again and again.
    #[cfg(feature = "etcd")]
    pub(super) fn snapshot_newest(&self, read: Read) -> SourceSnapshot {
        let mut snapshot = self.snapshot(read);
        let mut newest: HashMap<Arc<str>, (u64, Option<Arc<str>>)> = HashMap::new();
        for Found { spec, entry, created, .. } in &snapshot.workers {
            let known = newest.entry(spec.url.clone()).or_insert_with(|| (*created, entry.clone()));
            if known.0 < *created {
                *known = (*created, entry.clone());
            }
        }
        let refused = &mut snapshot.refused;
        snapshot.workers.retain(|found| {
            let Some((_, Some(later))) =
                newest.get(&found.spec.url).filter(|(created, _)| found.created < *created)
            else {
                return true;
            };
            let problem = format!("entry `{later}` has the same URL and was created later: that one is used");
            refused.push(Refusal::new(found.entry.as_deref().unwrap_or_default(), &problem));
            false
        });
        snapshot
    }

    /// Returns all workers, each once. A pod is found several times at addresses of both families, by several
    /// services, or while its endpoint moves from one EndpointSlice to another.
    #[cfg(feature = "kubernetes")]
    pub(super) fn snapshot_once(&self, read: Read) -> SourceSnapshot {
        let snapshot = self.snapshot(read);
        let identity = |found: &Found| found.identity.clone();
        let workers = one_per_key(snapshot.workers, identity);
        let workers = one_per_key(workers, |found| Some(found.spec.url.clone()));
        SourceSnapshot { workers, ..snapshot }
    }
}

impl Entry {
    /// Keeps the workers of these pods; those of pods that end leave.
    fn follow(&mut self, pods: &BTreeMap<String, bool>) {
        self.workers.retain_mut(|found| {
            let Some(pod) = found.pod() else { return true };
            let ends = pods.get(pod).copied();
            found.leaving = ends.unwrap_or(found.leaving);
            found.unready &= !found.leaving;
            ends.is_some()
        });
    }
}

/// Among several workers with one key, takes one that stays, preferring an IPv4 address, and then one that is
/// ready: the addresses of a pod become ready one after the other.
#[cfg(feature = "kubernetes")]
fn one_per_key(workers: Vec<Found>, key: impl Fn(&Found) -> Option<std::sync::Arc<str>>) -> Vec<Found> {
    let order = |found: &Found| {
        let url = &found.spec.url;
        (found.leaving, url.contains("://["), found.unready, url.clone())
    };
    let mut by_key: BTreeMap<std::sync::Arc<str>, Found> = BTreeMap::new();
    let mut others = Vec::new();
    for found in workers {
        let Some(key) = key(&found) else {
            others.push(found);
            continue;
        };
        if by_key.get(&key).is_none_or(|present| order(&found) < order(present)) {
            by_key.insert(key, found);
        }
    }
    others.extend(by_key.into_values());
    others
}

#[cfg(test)]
mod tests {
    use pointsman_workers::WorkerSpec;

    use super::*;

    fn found(url: &str, leaving: bool) -> Found {
        let spec = WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url={url}")).unwrap();
        Found { leaving, ..Found::staying(spec) }
    }

    #[test]
    fn an_entry_that_becomes_invalid_keeps_its_worker_and_is_listed() {
        let mut table = Table::default();
        table.set("a", Ok(vec![found("http://a:1", false)]));
        let invalid = |problem: &str| Err(Invalid::from(problem.to_owned()));
        table.set("a", invalid("garbage"));
        table.replace(vec![("a".to_owned(), invalid("garbage")), ("b".to_owned(), invalid("x"))]);
        let snapshot = table.snapshot(Read::Whole);
        // P2.5
        assert_eq!(snapshot.workers.len(), 1);
        assert_eq!(snapshot.refused.len(), 2);
        table.remove("a");
        assert!(table.snapshot(Read::Changes).workers.is_empty());
    }

    #[cfg(feature = "etcd")]
    #[test]
    fn p8_of_several_entries_with_one_url_the_one_created_last_counts() {
        let entry = |key: &str, created: u64, flag: &str| {
            let spec = WorkerSpec::parse_flag(&format!("engine=vllm,url=http://a:1,{flag}")).unwrap();
            (key.to_owned(), Ok(vec![Found { entry: Some(key.into()), created, ..Found::staying(spec) }]))
        };
        let mut table = Table::default();
        let old = entry("w-1", 5, "role=prefill");
        let other = entry("w-9", 1, "role=decode,id=9,url=http://b:1");
        table.replace(vec![old, entry("w-2", 7, "role=aggregated"), entry("w-3", 6, "role=decode"), other]);
        let SourceSnapshot { workers, refused, .. } = table.snapshot_newest(Read::Whole);
        let keys = |workers: &[Found]| -> Vec<String> {
            workers.iter().map(|found| found.entry.as_deref().unwrap().to_owned()).collect()
        };
        // P8.10
        assert_eq!(keys(&workers), ["w-2", "w-9"]);
        assert_eq!(refused.iter().map(|refusal| &*refusal.entry).collect::<Vec<_>>(), ["w-1", "w-3"]);
        let problem = "entry `w-2` has the same URL and was created later: that one is used";
        assert_eq!(refused[0].problem, problem);
        table.remove("w-2");
        // P8.10
        assert_eq!(keys(&table.snapshot_newest(Read::Changes).workers), ["w-3", "w-9"]);
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn of_two_entries_with_one_url_the_one_that_stays_is_taken() {
        let mut table = Table::default();
        table.set("a", Ok(vec![found("http://a:1", true)]));
        table.set("b", Ok(vec![found("http://a:1", false)]));
        let workers = table.snapshot_once(Read::Whole).workers;
        assert!(workers.len() == 1 && !workers[0].leaving);
    }

    #[test]
    fn p9_an_invalid_entry_follows_its_pods() {
        let of =
            |pod: &str| Found { identity: Some(format!("{pod}/0").into()), ..found("http://a:1", false) };
        let mut table = Table::default();
        let pods = |pods: &[(&str, bool)]| {
            let pods = pods.iter().map(|(pod, ends)| ((*pod).to_owned(), *ends)).collect();
            Err(Invalid { problem: "garbage".to_owned(), pods: Some(pods), has_none: false })
        };
        let seen = |table: &Table| {
            let workers = table.snapshot(Read::Changes).workers;
            workers.iter().map(|found| (found.pod().unwrap().to_owned(), found.leaving)).collect::<Vec<_>>()
        };
        let told = |seen: &[(&str, bool)]| -> Vec<(String, bool)> {
            seen.iter().map(|(pod, leaving)| ((*pod).to_owned(), *leaving)).collect()
        };
        table.set("a", Ok(vec![of("one"), of("two"), of("three")]));
        table.set("a", pods(&[("one", false), ("two", true)]));
        // P9.14
        assert_eq!(seen(&table), told(&[("one", false), ("two", true)]));
        table.set("a", pods(&[("new", false)]));
        assert_eq!(seen(&table), told(&[]));
    }
}
