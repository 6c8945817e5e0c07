//! Starts the sources that workers are discovered from.

use std::sync::Arc;

use pointsman_discovery::{FileSource, FileSourceConfig, Fleet, LeaseRules, Leases, start};
use pointsman_workers::Registry;
use tokio_util::sync::CancellationToken;

use crate::{config::Discovery, state::State};

/// Creates the fleet, and the leases as its first source.
pub(super) fn fleet(registry: &Arc<Registry>, settings: &Discovery) -> (Arc<Fleet>, Arc<Leases>) {
    let fleet = Fleet::new(registry.clone(), settings.rules());
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
            defaults: file.defaults.clone(),
        };
        let reporter = fleet.add_source(&format!("file:{}", file.name));
        start(FileSource::new(config), reporter, tracker, stop.clone());
    }
}
