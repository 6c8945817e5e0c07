//! Workers as proxies know them: by address and port.

use std::net::{IpAddr, SocketAddr};

use pointsman_workers::{Snapshot, WorkerId, WorkerSpec};

/// Returns the address and port of a worker's URL; `None`: the URL has a name.
pub(super) fn address_of(spec: &WorkerSpec) -> Option<SocketAddr> {
    let rest = spec.url.split_once("://").map_or(&*spec.url, |(_, rest)| rest);
    rest.split('/').next()?.parse().ok()
}

/// Returns the workers that a proxy's list of endpoints names. An endpoint without a port stands for every
/// port of its address.
pub(super) fn workers_of(endpoints: &[String], snapshot: &Snapshot) -> Vec<WorkerId> {
    let (mut sockets, mut hosts) = (Vec::new(), Vec::new());
    for endpoint in endpoints {
        if let Ok(socket) = endpoint.parse::<SocketAddr>() {
            sockets.push(socket);
        } else if let Ok(host) = endpoint.parse::<IpAddr>() {
            hosts.push(host);
        }
    }
    sockets.sort_unstable();
    hosts.sort_unstable();
    let is_named = |spec: &WorkerSpec| {
        let address = address_of(spec);
        address
            .is_some_and(|own| sockets.binary_search(&own).is_ok() || hosts.binary_search(&own.ip()).is_ok())
    };
    let workers = snapshot.workers().iter().filter(|worker| is_named(worker.spec()));
    workers.map(|worker| worker.id()).collect()
}

#[cfg(test)]
mod tests {
    use pointsman_workers::Registry;

    use super::*;

    fn spec(id: u64, url: &str) -> WorkerSpec {
        WorkerSpec::parse_flag(&format!("id={id},role=aggregated,engine=vllm,url={url}")).unwrap()
    }

    #[test]
    fn an_endpoint_is_the_address_of_a_url() {
        let of = |url: &str| address_of(&spec(1, url)).map(|address| address.to_string());
        assert_eq!(of("http://10.0.0.1:8000").as_deref(), Some("10.0.0.1:8000"));
        assert_eq!(of("http://10.0.0.1/base").as_deref(), Some("10.0.0.1:80"));
        assert_eq!(of("https://[fd00::1]:8000").as_deref(), Some("[fd00::1]:8000"));
        assert_eq!(of("http://engine.example:8000"), None);
    }

    #[test]
    fn a_list_of_endpoints_names_workers() {
        let registry = Registry::default();
        for (id, url) in
            (1..).zip(["http://10.0.0.1:1", "http://10.0.0.1:2", "http://10.0.0.2:1", "http://a:1"])
        {
            registry.upsert(spec(id, url));
        }
        let of = |endpoints: &[&str]| {
            let endpoints: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
            workers_of(&endpoints, &registry.snapshot()).iter().map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!(of(&["10.0.0.2:1", "10.0.0.1:2", "10.0.0.9:1"]), [2, 3]);
        assert_eq!(of(&["10.0.0.1"]), [1, 2]);
        assert!(of(&[]).is_empty() && of(&["a:1"]).is_empty());
    }
}
