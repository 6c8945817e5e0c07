//! Starts the sources that workers are discovered from.

#[cfg(feature = "kubernetes")]
use std::path::PathBuf;
use std::sync::Arc;

#[cfg(any(feature = "etcd", feature = "kubernetes"))]
use pointsman_discovery::TlsFiles;
use pointsman_discovery::{
    DnsSource, DnsSourceConfig, FileSource, FileSourceConfig, Fleet, LeaseRules, Leases, start,
};
#[cfg(feature = "etcd")]
use pointsman_discovery::{EtcdSource, EtcdSourceConfig};
#[cfg(feature = "kubernetes")]
use pointsman_discovery::{KubernetesSource, KubernetesSourceConfig, PortOfWorker, Resource};
use pointsman_workers::{Registry, Resolver};
use tokio_util::sync::CancellationToken;

#[cfg(feature = "etcd")]
use crate::config::DiscoveryEtcd;
#[cfg(feature = "kubernetes")]
use crate::config::{DiscoveryKubernetes, DiscoveryResource};
use crate::{config::Discovery, state::State};

/// Creates the fleet, and the leases as its first source.
pub(super) fn fleet(
    registry: &Arc<Registry>,
    resolver: &Resolver,
    settings: &Discovery,
) -> (Arc<Fleet>, Arc<Leases>) {
    let fleet = Fleet::new(registry.clone(), resolver.clone(), settings.fleet_rules());
    let rules = LeaseRules { max_leases: settings.max_workers, max_ttl: settings.max_lease };
    let leases = Leases::new(fleet.add_source("leases"), rules);
    (fleet, leases)
}

/// Starts all sources, until `stop`.
pub(super) fn start_sources(state: &State, settings: &Discovery, stop: &CancellationToken) {
    let State { fleet, leases, tracker, .. } = state;
    tracker.spawn(fleet.clone().run(stop.clone()));
    start(leases.clone(), leases.reporter().clone(), tracker, stop.clone());
    for file in &settings.files {
        let config = FileSourceConfig {
            path: file.path.clone(),
            format: file.format.into(),
            interval: file.interval,
            scheme: file.scheme.into(),
            defaults: file.defaults.clone(),
        };
        let reporter = fleet.add_source(&format!("file:{}", file.name));
        start(FileSource::new(config), reporter, tracker, stop.clone());
    }
    for dns in &settings.dns {
        let config = DnsSourceConfig {
            record: dns.record.clone(),
            servers: dns.servers.clone(),
            interval: dns.interval,
            timeout: dns.timeout,
            scheme: dns.scheme.into(),
            defaults: dns.defaults.clone(),
        };
        let reporter = fleet.add_source(&format!("dns:{}", dns.name));
        start(DnsSource::new(config), reporter, tracker, stop.clone());
    }
    #[cfg(feature = "etcd")]
    for etcd in &settings.etcd {
        let reporter = fleet.add_source(&format!("etcd:{}", etcd.name));
        start(etcd_source(etcd), reporter, tracker, stop.clone());
    }
    #[cfg(feature = "kubernetes")]
    for kubernetes in &settings.kubernetes {
        let reporter = fleet.add_source(&format!("kubernetes:{}", kubernetes.name));
        start(kubernetes_source(kubernetes), reporter, tracker, stop.clone());
    }
}

#[cfg(feature = "etcd")]
fn etcd_source(etcd: &DiscoveryEtcd) -> EtcdSource {
    EtcdSource::new(EtcdSourceConfig {
        endpoints: etcd.endpoints.clone(),
        prefix: etcd.prefix.clone(),
        timeout: etcd.timeout,
        resync: etcd.resync,
        tls: TlsFiles { ca: etcd.ca_file.clone(), client: etcd.cert_file.clone().zip(etcd.key_file.clone()) },
        user: etcd.username.clone().zip(etcd.password_file.clone()),
    })
}

#[cfg(feature = "kubernetes")]
fn kubernetes_source(kubernetes: &DiscoveryKubernetes) -> KubernetesSource {
    let given = |path: &PathBuf| Some(path.clone()).filter(|path| !path.as_os_str().is_empty());
    // Plain HTTP has no authority that could be checked.
    let ca = given(&kubernetes.ca_file).filter(|_| kubernetes.api.starts_with("https://"));
    KubernetesSource::new(KubernetesSourceConfig {
        api: kubernetes.api.clone(),
        namespace: kubernetes.namespace.clone(),
        resource: match kubernetes.resource {
            DiscoveryResource::Pods => Resource::Pods,
            DiscoveryResource::EndpointSlices => Resource::EndpointSlices,
        },
        selector: kubernetes.selector.clone(),
        // The configuration was checked.
        ports: PortOfWorker::parse_list(&kubernetes.port).unwrap_or_default(),
        scheme: kubernetes.scheme.into(),
        defaults: kubernetes.defaults.clone(),
        token_file: given(&kubernetes.token_file),
        tls: TlsFiles { ca, client: None },
        timeout: kubernetes.timeout,
        watch: kubernetes.watch,
    })
}
