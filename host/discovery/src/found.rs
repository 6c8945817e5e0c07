//! Reports of sources: descriptions of workers, within bounds.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use pointsman_workers::WorkerSpec;
use serde::Serialize;

/// Longest URL in bytes.
const MAX_URL: usize = 2_048;
/// Longest name or value of a label, model, taint or address in bytes.
const MAX_TEXT: usize = 512;
/// Maximum number of entries in one list or map of a description.
const MAX_ENTRIES: usize = 64;
/// Longest text of a refusal in characters.
const MAX_REFUSAL: usize = 300;
/// Maximum number of refusals that are kept for each source. All are counted.
pub(crate) const MAX_REFUSALS: usize = 100;

/// A worker as a source describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Its description.
    pub spec: WorkerSpec,
    /// Whether the source says that the worker ends: it gets no new request.
    pub leaving: bool,
    /// Whether the source says that the worker is not ready. A worker that was ready stays.
    pub unready: bool,
    /// Identity of the worker, independent of its address: a pod, and the place of the port among those of
    /// its workers.
    pub identity: Option<Arc<str>>,
    /// Name of its entry in the source, if refusals have to name it.
    pub entry: Option<Arc<str>>,
    /// Order in which a source's entries were created, where the one that was created last counts.
    pub created: u64,
    /// Addresses of its host, if the source knows them. Otherwise the system does.
    pub addresses: Vec<IpAddr>,
}

/// An entry of a source that is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// Key, name or URL of the entry.
    pub entry: String,
    /// Why it is not used.
    pub problem: String,
}

/// How a source made a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The source read everything for this snapshot.
    Whole,
    /// The same, but what it read may be new data in the place of data that was lost.
    Replaced,
    /// The source applied changes to what it read before.
    Changes,
}

/// Everything that a source knows at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSnapshot {
    /// Workers.
    pub workers: Vec<Found>,
    /// Entries that are not used.
    pub refused: Vec<Refusal>,
    /// How the source made it.
    pub read: Read,
}

impl Found {
    /// A worker that stays.
    #[must_use]
    pub fn staying(spec: WorkerSpec) -> Self {
        Self {
            spec,
            leaving: false,
            unready: false,
            identity: None,
            entry: None,
            created: 0,
            addresses: Vec::new(),
        }
    }

    /// Returns whether this describes the same worker in the same way: another pod at the same address is
    /// another worker.
    pub(crate) fn is_same(&self, spec: &WorkerSpec, identity: Option<&str>) -> bool {
        self.spec == *spec && !self.is_another(identity)
    }

    /// Returns the hosts that the gateway connects to for it, with the addresses that the source knows.
    fn hosts(&self) -> impl Iterator<Item = (&str, &[IpAddr])> {
        let WorkerSpec { bootstrap, kv_events, kv_replay, .. } = &self.spec;
        let feeds = [kv_events, kv_replay].into_iter().flatten();
        let others = feeds.filter_map(|url| host_of_feed(url)).chain(bootstrap.host.as_deref());
        let others = others.filter(|host| *host != self.spec.host()).map(|host| (host, [].as_slice()));
        std::iter::once((self.spec.host(), self.addresses.as_slice())).chain(others)
    }

    /// Returns whether it and the worker of an identity are known to be of different pods.
    pub(crate) fn is_another(&self, identity: Option<&str>) -> bool {
        let pod = |identity: &str| identity.rsplit_once('/').map(|(pod, _rank)| pod.to_owned());
        self.identity.as_deref().zip(identity).is_some_and(|(own, other)| pod(own) != pod(other))
    }

    /// Returns the uid of its pod.
    #[cfg(any(feature = "etcd", feature = "kubernetes"))]
    pub(crate) fn pod(&self) -> Option<&str> {
        let (pod, _rank) = self.identity.as_deref()?.rsplit_once('/')?;
        Some(pod)
    }

    /// Returns the same worker, which ends.
    #[must_use]
    pub fn ending(self) -> Self {
        Self { leaving: true, ..self }
    }
}

/// Returns the host of `tcp://host:port`.
fn host_of_feed(url: &str) -> Option<&str> {
    let (_, authority) = url.split_once("://")?;
    Some(authority.rsplit_once(':')?.0)
}

/// Returns the addresses of each host that the sources of all its workers know: those of one source are not
/// used for a worker of another source.
pub(crate) fn addresses_of_hosts<'a>(
    workers: impl Iterator<Item = &'a Found> + Clone,
) -> HashMap<String, Vec<IpAddr>> {
    if workers.clone().all(|found| found.addresses.is_empty()) {
        return HashMap::new();
    }
    let mut hosts: HashMap<&str, Vec<IpAddr>> = HashMap::new();
    for (host, addresses) in workers.flat_map(Found::hosts) {
        hosts
            .entry(host)
            .and_modify(|known| known.retain(|address| addresses.contains(address)))
            .or_insert_with(|| addresses.to_vec());
    }
    hosts.retain(|_, addresses| !addresses.is_empty());
    hosts.into_iter().map(|(host, addresses)| (host.to_owned(), addresses)).collect()
}

impl Refusal {
    /// Creates a refusal. Long texts are cut.
    #[must_use]
    pub fn new(entry: &str, problem: &str) -> Self {
        Self { entry: cut(entry), problem: cut(problem) }
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_REFUSAL) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Checks that a description is within the bounds for descriptions of a source.
///
/// # Errors
/// The bound that it exceeds.
pub(crate) fn within_bounds(spec: &WorkerSpec) -> Result<(), String> {
    let too_long = |what: &str, bytes: usize, most: usize| {
        if bytes > most {
            Err(format!("{what} has {bytes} bytes: at most {most} are allowed"))
        } else {
            Ok(())
        }
    };
    let map = |what: &str, map: &BTreeMap<String, String>| {
        let entries = map.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        list(what, map.len(), entries)
    };
    too_long("the URL", spec.url.len(), MAX_URL)?;
    map("labels", &spec.labels)?;
    map("topology", &spec.topology)?;
    list("taints", spec.taints.len(), spec.taints.iter().map(String::as_str))?;
    list("loras", spec.loras.len(), spec.loras.iter().map(String::as_str))?;
    list("models", spec.models.len(), spec.models.iter().map(pointsman_workers::ModelName::as_str))?;
    let addresses = [
        ("bootstrap_host", &spec.bootstrap.host),
        ("kv_addr", &spec.kv_addr),
        ("kv_events", &spec.kv_events),
        ("kv_replay", &spec.kv_replay),
        ("api_key", &spec.api_key),
    ];
    for (what, text) in addresses {
        too_long(what, text.as_ref().map_or(0, String::len), MAX_TEXT)?;
    }
    Ok(())
}

fn list<'a>(what: &str, len: usize, mut texts: impl Iterator<Item = &'a str>) -> Result<(), String> {
    if len > MAX_ENTRIES {
        return Err(format!("{what} has {len} entries: at most {MAX_ENTRIES} are allowed"));
    }
    match texts.find(|text| text.len() > MAX_TEXT) {
        Some(long) => {
            Err(format!("{what} has an entry of {} bytes: at most {MAX_TEXT} are allowed", long.len()))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_has_bounds() {
        let spec = |more: &str| {
            WorkerSpec::parse_flag(&format!("role=decode,engine=vllm,url=http://a:1{more}")).unwrap()
        };
        assert_eq!(within_bounds(&spec(",label.zone=a,model=m")), Ok(()));
        let long = "x".repeat(MAX_TEXT + 1);
        let cases = [
            (format!(",label.zone={long}"), "labels has an entry of 513 bytes"),
            (format!(",model={long}"), "models has an entry of 513 bytes"),
            ((0..65).map(|n| format!(",taint=t{n}")).collect(), "taints has 65 entries: at most 64"),
            (format!("/{}", "p".repeat(MAX_URL)), "the URL has 2059 bytes: at most 2048"),
        ];
        for (more, expected) in cases {
            // P2.4
            let problem = within_bounds(&spec(&more)).unwrap_err();
            assert!(problem.starts_with(expected), "{problem}");
        }
        assert!(Refusal::new(&"x".repeat(1_000), "p").entry.len() < 400);
    }
}
