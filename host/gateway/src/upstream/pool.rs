//! Idle connections to engines, kept for the next request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::Connection;
use crate::config::settings::UpstreamSettings;

/// Longest time between two sweeps.
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two sweeps.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// Idle connections of one runtime, by `host:port`.
///
/// A socket is registered with the runtime that opened it. If another runtime polled it, each event would
/// first wake the thread that owns the registration. Therefore each data thread has a pool of its own.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPool {
    idle: Arc<Mutex<HashMap<Box<str>, VecDeque<Idle>>>>,
    limits: UpstreamSettings,
}

#[derive(Debug)]
struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

impl ConnectionPool {
    /// Returns an empty pool.
    #[must_use]
    pub(crate) fn new(limits: UpstreamSettings) -> Self {
        Self { idle: Arc::default(), limits }
    }

    /// Returns a handle to the same connections that keeps them within other limits.
    #[must_use]
    pub(crate) fn limited(&self, limits: UpstreamSettings) -> Self {
        Self { idle: self.idle.clone(), limits }
    }

    /// Takes an idle connection that is still open.
    pub(super) fn take(&self, authority: &str) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } = self.idle.lock().get_mut(authority)?.pop_back()?;
            if since.elapsed() < self.limits.idle_timeout && connection.is_open() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next call, unless enough of its worker are kept.
    pub(super) fn put(&self, connection: Box<Connection>) {
        let mut idle = self.idle.lock();
        let place = match idle.get_mut(&connection.authority) {
            Some(place) => place,
            None => idle.entry(connection.authority.clone()).or_default(),
        };
        if place.len() < self.limits.idle_connections {
            place.push_back(Idle { connection, since: Instant::now() });
        }
    }

    /// Closes the connections that were idle for too long or that their engine closed, for all workers: no
    /// later call closes those of a worker that left. Returns their number, and when to sweep again.
    pub(crate) fn sweep(&self) -> (usize, Instant) {
        let UpstreamSettings { idle_timeout, .. } = self.limits;
        let now = Instant::now();
        let mut closed = Vec::new();
        self.idle.lock().retain(|_, place| {
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
impl Default for ConnectionPool {
    fn default() -> Self {
        Self::new(UpstreamSettings {
            idle_timeout: Duration::from_secs(30),
            idle_connections: 8,
            forward_authorization: false,
        })
    }
}
