//! Idle connections to engines, kept for the next request.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::Connection;

/// How long an idle connection is kept. Engines close theirs after a while, too.
const MAX_IDLE: Duration = Duration::from_secs(30);

/// Idle connections of one runtime, by `host:port`.
///
/// A socket is registered with the runtime that opened it. If another runtime polled it, each event would
/// first wake the thread that owns the registration. Therefore each data thread has a pool of its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct ConnectionPool {
    idle: Arc<Mutex<Places>>,
}

#[derive(Debug, Default)]
struct Places {
    by_authority: HashMap<Box<str>, VecDeque<Idle>>,
    swept: Option<Instant>,
}

#[derive(Debug)]
struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

impl ConnectionPool {
    /// Takes an idle connection that is still open.
    pub(super) fn take(&self, authority: &str) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } =
                self.idle.lock().by_authority.get_mut(authority)?.pop_back()?;
            if since.elapsed() < MAX_IDLE && connection.is_open() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next call.
    pub(super) fn put(&self, connection: Box<Connection>) {
        let since = Instant::now();
        let mut places = self.idle.lock();
        places.sweep(since);
        let place = match places.by_authority.get_mut(&connection.authority) {
            Some(place) => place,
            None => places.by_authority.entry(connection.authority.clone()).or_default(),
        };
        place.push_back(Idle { connection, since });
    }
}

impl Places {
    /// Closes connections that were idle for too long, of all workers: no later call closes those of a worker
    /// that left.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.saturating_duration_since(swept) < MAX_IDLE) {
            return;
        }
        self.swept = Some(now);
        self.by_authority.retain(|_, place| {
            place.retain(|idle| now.saturating_duration_since(idle.since) < MAX_IDLE);
            !place.is_empty()
        });
    }
}
