//! The load of other gateways: starts the exchange and says how it goes.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed, mpsc::Receiver},
};

use parking_lot::Mutex;
use pointsman_orchestration::{SessionChange, Sessions};
use pointsman_policy_runtime::PolicyManager;
use pointsman_replicas::{Credentials, Exchange, ReplicasConfig, SharedStates, Status, TlsFiles, slot_name};
use pointsman_routing::SharedState;
use pointsman_workers::{Journal, JournalEntry, Registry, unix_us};
use prefix_index::PrefixIndex;
use serde_json::{Value, json};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{config, instance_name::instance_name, telemetry::exposition::ReplicaFigures};

/// Maximum number of changed bookings that wait for the next batch.
const JOURNAL_LENGTH: usize = 65_536;
/// Maximum number of session changes that wait for the next batch.
const SESSION_QUEUE: usize = 16_384;

/// Difference of two gateways' clocks above which the reasons of `GET /status` name it, in milliseconds.
const MAX_CLOCK_DIFFERENCE_MS: u64 = 5_000;

/// Changed bookings and sessions.
type Queues = (Receiver<Arc<JournalEntry>>, Receiver<SessionChange>);

/// The exchange with other gateways, if it is configured.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replicas(Option<Arc<Parts>>);

#[derive(Debug)]
struct Parts {
    status: Arc<Status>,
    journal: Arc<Journal>,
    sessions: Arc<Sessions>,
    /// Set when the exchange starts.
    states: OnceLock<SharedStates>,
    /// Taken when the exchange starts.
    changed: Mutex<Option<Queues>>,
}

impl Replicas {
    /// Creates what the exchange needs of the registry. Nothing connects before [`Replicas::start`].
    pub(crate) fn new(settings: &config::Replicas) -> Self {
        if settings.servers.is_empty() {
            return Self(None);
        }
        let (journal, changed) = Journal::new(JOURNAL_LENGTH);
        let (sessions, bound) = Sessions::shared(SESSION_QUEUE);
        Self(Some(Arc::new(Parts {
            status: Arc::default(),
            journal,
            sessions: Arc::new(sessions),
            states: OnceLock::new(),
            changed: Mutex::new(Some((changed, bound))),
        })))
    }

    /// Returns where bookings are noted for the others.
    pub(crate) fn journal(&self) -> Option<Arc<Journal>> {
        Some(self.0.as_ref()?.journal.clone())
    }

    /// Returns the session bindings, which are sent to other gateways.
    pub(crate) fn sessions(&self) -> Arc<Sessions> {
        self.0.as_ref().map(|parts| parts.sessions.clone()).unwrap_or_default()
    }

    /// Starts the exchange on a thread of its own, until `stop`. `address`: address of the clients' listener.
    pub(crate) fn start(
        &self,
        (settings, block_size): (&config::Replicas, u32),
        address: SocketAddr,
        tables: (Arc<Registry>, Arc<PrefixIndex>),
        policies: &PolicyManager,
        stop: CancellationToken,
        alive: &TaskTracker,
    ) -> std::io::Result<()> {
        let Some(parts) = &self.0 else { return Ok(()) };
        let Some((changed, bound)) = parts.changed.lock().take() else { return Ok(()) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let incarnation = unix_us();
        let (journal, status) = ((parts.journal.clone(), changed), parts.status.clone());
        let sessions = (parts.sessions.clone(), bound);
        let config = exchange_config(settings, block_size, address);
        let states = policies.slots().iter().zip(policies.states()).map(|(slot, state)| {
            let name = slot_name(&slot.kind().to_string(), slot.model().map(|model| model.as_str()));
            (name, state.clone() as Arc<dyn SharedState>)
        });
        let states = SharedStates::new(states);
        let _ = parts.states.set(states.clone());
        let alive = alive.token();
        std::thread::Builder::new().name("pointsman-replicas".to_owned()).spawn(move || {
            runtime.block_on(async {
                Exchange::new(config, journal, sessions, states, incarnation, tables, status).run(stop).await;
            });
            drop(alive);
        })?;
        Ok(())
    }

    /// Describes the exchange for `GET /replicas`.
    pub(crate) fn describe(&self) -> Value {
        let Some(parts) = &self.0 else { return json!({ "enabled": false }) };
        let mut view = serde_json::to_value(&*parts.status.view()).unwrap_or_default();
        if let Some(view) = view.as_object_mut() {
            view.insert("enabled".to_owned(), true.into());
            if parts.shares_state() {
                view.insert("state".to_owned(), json!(*parts.status.state()));
            }
        }
        view
    }

    /// Says for `GET /readyz` whether the load of others is known; `None` without an exchange.
    pub(crate) fn readiness(&self) -> Option<Value> {
        let parts = self.0.as_ref()?;
        let view = parts.status.view();
        let state_shared = parts.shares_state().then(|| parts.status.state().shared);
        let (connected, peers) = (view.connected, view.peers.len());
        let name_conflict = view.name_conflict;
        let mut readiness = json!({
            "connected": connected, "peers": peers, "alone": peers == 0, "name_conflict": name_conflict,
        });
        if let (Some(shared), Some(readiness)) = (state_shared, readiness.as_object_mut()) {
            readiness.insert("state_shared".to_owned(), shared.into());
        }
        Some(readiness)
    }

    /// Says why the load, the bindings or the state of the fleet is not known, for operators.
    pub(crate) fn problems(&self) -> Vec<String> {
        let Some(parts) = &self.0 else { return Vec::new() };
        let (view, mut problems) = (parts.status.view(), Vec::new());
        match &view.problem {
            Some(problem) if view.connected => {
                problems.push(format!("exchange with other gateways: {problem}"))
            }
            Some(problem) => problems.push(format!(
                "not connected to NATS, so that the load of other gateways is not known: {problem}"
            )),
            None => {}
        }
        let state = parts.status.state();
        if parts.shares_state() && !state.shared {
            let why = state.problem.as_ref().map(|problem| format!(": {problem}")).unwrap_or_default();
            problems.push(format!("the state of policies is not shared with other gateways{why}"));
        }
        problems.extend(view.peers.iter().filter_map(|peer| {
            let (name, ahead) = (&peer.name, peer.clock_ahead_ms?);
            let direction = if ahead < 0 { "behind" } else { "ahead of" };
            (ahead.unsigned_abs() > MAX_CLOCK_DIFFERENCE_MS).then(|| {
                let seconds = ahead.unsigned_abs() / 1_000;
                format!(
                    "the clock of gateway {name} is {seconds} s {direction} the clock here, so limits in shared state do \
                     not hold for both gateways together: synchronize the clocks of both machines"
                )
            })
        }));
        problems
    }

    /// Returns the figures of `GET /metrics`.
    pub(crate) fn figures(&self) -> ReplicaFigures {
        let Some(parts) = &self.0 else { return ReplicaFigures::default() };
        let (view, counters) = (parts.status.view(), &parts.status.counters);
        ReplicaFigures {
            connected: view.connected,
            name_conflict: view.name_conflict,
            clock_difference_ms: view
                .peers
                .iter()
                .filter_map(|peer| peer.clock_ahead_ms)
                .map(i64::unsigned_abs)
                .max()
                .unwrap_or_default(),
            state_slots: parts.states.get().map_or(0, SharedStates::count),
            peers: view.peers.len() as u64,
            bookings: view.peers.iter().map(|peer| peer.bookings as u64).sum(),
            unknown_worker: view.peers.iter().map(|peer| peer.unknown_worker as u64).sum(),
            messages: [counters.sent.load(Relaxed), counters.received.load(Relaxed)],
            bytes: [counters.sent_bytes.load(Relaxed), counters.received_bytes.load(Relaxed)],
            snapshots: counters.snapshots.load(Relaxed),
            lost: counters.lost.load(Relaxed),
            refused: counters.refused.load(Relaxed),
            over_limit: counters.over_limit.load(Relaxed),
            unsent: counters.unsent.load(Relaxed),
            journal_full: parts.journal.lost(),
            sessions_full: parts.sessions.untold(),
            expired: counters.expired.load(Relaxed),
            disconnects: counters.disconnects.load(Relaxed),
            state_shared: parts.status.state().shared,
            state_changes: [counters.state_sent.load(Relaxed), counters.state_received.load(Relaxed)],
            state_refused: counters.state_refused.load(Relaxed),
            state_unsent: counters.state_unsent.load(Relaxed),
        }
    }
}

impl Parts {
    /// Returns whether any slot shares the state of its policies.
    fn shares_state(&self) -> bool {
        self.states.get().is_some_and(SharedStates::any)
    }
}

fn exchange_config(settings: &config::Replicas, block_size: u32, address: SocketAddr) -> ReplicasConfig {
    let config::Replicas { servers, fleet, name, interval, snapshot_interval, lease, .. } = settings;
    let config::Replicas { username, password_file, token_file, nkey_file, credentials_file, tls, .. } =
        settings;
    let user = username.clone().zip(password_file.clone());
    let credentials = user
        .map(|(user, file)| Credentials::User(user, file))
        .or(token_file.clone().map(Credentials::Token))
        .or(nkey_file.clone().map(Credentials::NKey))
        .or(credentials_file.clone().map(Credentials::Jwt))
        .unwrap_or_default();
    let tls = tls.as_ref().map(|tls| TlsFiles {
        ca: tls.ca_file.clone(),
        client: tls.cert_file.clone().zip(tls.key_file.clone()),
    });
    ReplicasConfig {
        servers: servers.clone(),
        fleet: fleet.clone(),
        name: if name.is_empty() { instance_name(address) } else { name.clone() },
        block_size,
        interval: *interval,
        snapshot_interval: *snapshot_interval,
        lease: *lease,
        credentials,
        tls,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q1_without_servers_nothing_is_noted_or_sent() {
        let replicas = Replicas::new(&config::Replicas::default());
        // Q1.5
        assert!(replicas.journal().is_none() && replicas.readiness().is_none());
        assert_eq!(replicas.describe(), json!({ "enabled": false }));
    }

    #[test]
    fn a_name_of_its_own_fits_into_a_subject() {
        let name = instance_name("127.0.0.1:8080".parse().unwrap());
        assert!(pointsman_replicas::is_name(&name) && name.ends_with("-8080"), "{name}");
    }
}
