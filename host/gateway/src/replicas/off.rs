//! Stand-ins for a build without the exchange. The configuration refuses servers.

use std::{net::SocketAddr, sync::Arc};

use pointsman_orchestration::Sessions;
use pointsman_policy_runtime::PolicyManager;
use pointsman_workers::{Journal, Registry};
use prefix_index::PrefixIndex;
use serde_json::{Value, json};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{config, telemetry::exposition::ReplicaFigures};

/// No exchange.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replicas;

impl Replicas {
    pub(crate) fn new(_settings: &config::Replicas) -> Self {
        Self
    }

    pub(crate) fn journal(&self) -> Option<Arc<Journal>> {
        None
    }

    pub(crate) fn sessions(&self) -> Arc<Sessions> {
        Arc::default()
    }

    pub(crate) fn start(
        &self,
        _settings: (&config::Replicas, u32),
        _address: SocketAddr,
        _tables: (Arc<Registry>, Arc<PrefixIndex>),
        _policies: &PolicyManager,
        _stop: CancellationToken,
        _alive: &TaskTracker,
    ) -> std::io::Result<()> {
        Ok(())
    }

    pub(crate) fn describe(&self) -> Value {
        json!({ "enabled": false })
    }

    pub(crate) fn problems(&self) -> Vec<String> {
        Vec::new()
    }

    pub(crate) fn readiness(&self) -> Option<Value> {
        None
    }

    pub(crate) fn figures(&self) -> ReplicaFigures {
        ReplicaFigures::default()
    }
}
