//! Idle connections to engines, kept for the next request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_workers::EngineTls;
use tokio::time::Instant;

use super::{connection::Connection, destination::Destination};
use crate::config::Upstream;

/// Longest time between two sweeps.
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two sweeps.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// Idle connections of one runtime, by their origin.
///
/// A socket is registered with the runtime that opened it. If another runtime polled it, each event would
/// first wake the thread that owns the registration. Therefore each data thread has a pool of its own.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPool {
    shared: Arc<Shared>,
    limits: PoolLimits,
}

#[derive(Debug)]
struct Shared {
    idle: Mutex<HashMap<Box<str>, VecDeque<Idle>>>,
    tls: Arc<EngineTls>,
}

/// Contents of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolLimits {
    /// How long an idle connection is kept.
    idle_timeout: Duration,
    /// Number of idle connections of a worker.
    idle_connections: usize,
}

impl From<&Upstream> for PoolLimits {
    fn from(settings: &Upstream) -> Self {
        Self { idle_timeout: settings.idle_timeout, idle_connections: settings.idle_connections }
    }
}

#[derive(Debug)]
struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

impl ConnectionPool {
    /// Returns an empty pool, whose connections use `tls` where a worker has it.
    #[must_use]
    pub(crate) fn new(limits: PoolLimits, tls: Arc<EngineTls>) -> Self {
        Self { shared: Arc::new(Shared { idle: Mutex::default(), tls }), limits }
    }

    /// Returns a handle to the same connections that keeps them within other limits.
    #[must_use]
    pub(crate) fn limited(&self, limits: PoolLimits) -> Self {
        Self { shared: self.shared.clone(), limits }
    }

    /// TLS of new connections.
    pub(super) fn tls(&self) -> &EngineTls {
        &self.shared.tls
    }

    /// Takes an idle connection that is still open. A connection that was verified with other files or
    /// another name than those in force is closed.
    pub(super) fn take_idle(&self, to: &Destination, origin: &str) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } = self.shared.idle.lock().get_mut(origin)?.pop_back()?;
            let is_late = since.elapsed() >= self.limits.idle_timeout;
            if !is_late && connection.is_current(to, self.tls()) && connection.is_open() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next call, unless enough of its worker are kept.
    pub(super) fn put_idle(&self, connection: Box<Connection>) {
        let mut idle = self.shared.idle.lock();
        let place = match idle.get_mut(&connection.origin) {
            Some(place) => place,
            None => idle.entry(connection.origin.clone()).or_default(),
        };
        if place.len() < self.limits.idle_connections {
            place.push_back(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes the connections that were idle for too long or that their engine closed, for all workers: no
    /// later call closes those of a worker that left. Returns their number, and when to sweep again.
    pub(crate) fn sweep(&self) -> (usize, Instant) {
        let PoolLimits { idle_timeout, .. } = self.limits;
        let now = Instant::now();
        let mut closed = Vec::new();
        self.shared.idle.lock().retain(|_, place| {
            for mut idle in std::mem::take(place) {
                let is_late = now.saturating_duration_since(idle.since) >= idle_timeout;
                let kept = !is_late && idle.connection.is_open();
                if kept { place.push_back(idle) } else { closed.push(idle) }
            }
            !place.is_empty()
        });
        if !closed.is_empty() {
            tracing::debug!(connections = closed.len(), "idle connections to workers closed");
        }
        (closed.len(), now + (idle_timeout / 4).clamp(MIN_SWEEP_INTERVAL, MAX_SWEEP_INTERVAL))
    }
}

#[cfg(test)]
impl From<Arc<EngineTls>> for ConnectionPool {
    fn from(tls: Arc<EngineTls>) -> Self {
        Self::new(PoolLimits { idle_timeout: Duration::from_secs(30), idle_connections: 8 }, tls)
    }
}
