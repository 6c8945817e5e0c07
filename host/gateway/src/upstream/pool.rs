//! Idle connections to engines, kept for the next request.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::Connection;

/// An idle connection is not used again after this; engines close theirs after some time, too.
const IDLE: Duration = Duration::from_secs(30);

/// Idle connections by `host:port`.
#[derive(Debug, Default)]
pub(super) struct Pool {
    idle: Mutex<Places>,
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

impl Pool {
    /// An idle connection that is still open.
    pub(super) fn take(&self, authority: &str) -> Option<Box<Connection>> {
        loop {
            let Idle { mut connection, since } =
                self.idle.lock().by_authority.get_mut(authority)?.pop_back()?;
            if since.elapsed() < IDLE && connection.is_open() {
                return Some(connection);
            }
        }
    }

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
    /// Closes what was idle for too long, everywhere: nobody comes back for the connections of a worker that left.
    fn sweep(&mut self, now: Instant) {
        if self.swept.is_some_and(|swept| now.saturating_duration_since(swept) < IDLE) {
            return;
        }
        self.swept = Some(now);
        self.by_authority.retain(|_, place| {
            place.retain(|idle| now.saturating_duration_since(idle.since) < IDLE);
            !place.is_empty()
        });
    }
}
