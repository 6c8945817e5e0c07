//! What request handlers share: data and handles, no behaviour. `daemon` builds it; nothing here starts or stops anything.

use std::sync::Arc;

use parking_lot::Mutex;
use pointsman_policy_runtime::PolicyManager;
use pointsman_routing::{Learning, Router};
use pointsman_workers::{Registry, events::Feeds};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::reload::ConfigReloader, limit::Limiter, telemetry::metrics::Metrics, tokenization::Tokens,
    upstream::Upstream,
};

pub(crate) mod admission_queue;
pub(crate) mod sessions;
pub(crate) mod settings;

use admission_queue::AdmissionQueue;
use sessions::Sessions;
pub use settings::Settings;

/// Everything that lives as long as the daemon.
#[derive(Debug)]
pub struct State {
    /// Values derived from the configuration.
    pub settings: Settings,
    /// Workers that serve models.
    pub registry: Arc<Registry>,
    /// Routing decisions.
    pub router: Router,
    /// Reports outcomes of requests to the policies that learn from them.
    pub learning: Arc<Learning>,
    /// Rate limit of each API key; `None` when there is no limit.
    pub limiter: Option<Limiter>,
    /// Token ids of prompts.
    pub tokens: Tokens,
    /// Engines' events about their caches.
    pub feeds: Arc<Feeds>,
    /// Requests that wait because every eligible worker is busy.
    pub queue: Arc<AdmissionQueue>,
    /// Workers that sessions are bound to.
    pub sessions: Sessions,
    /// Client for calls to workers.
    pub upstream: Upstream,
    /// Counters and histograms.
    pub metrics: Arc<Metrics>,
    /// Registry that `/metrics` is encoded from.
    pub exposition: Mutex<prometheus_client::registry::Registry>,
    /// Policy manager.
    pub policies: PolicyManager,
    /// Reloads the configuration.
    pub config: ConfigReloader,
    /// Tasks that may outlive the request that started them.
    pub tracker: TaskTracker,
    /// Cancelled when the daemon begins to drain.
    pub draining: CancellationToken,
}
