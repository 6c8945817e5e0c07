//! Idle connections to servers, kept for the next request.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
    time::Duration,
};

use foldhash::fast::RandomState;
use http::HeaderName;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::connection::{Connection, Observer, Transport};

/// Longest time between two sweeps.
const MAX_SWEEP_INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two sweeps.
const MIN_SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// Idle connections of one runtime, by their origin.
///
/// A socket is registered with the runtime that opened it. If another runtime polled it, each event would
/// first wake the thread that owns the registration. Therefore each runtime has a pool of its own.
pub struct Pool<S, O = ()> {
    shared: Arc<Shared<S, O>>,
    limits: PoolLimits,
}

struct Shared<S, O> {
    idle: Mutex<IdleByOrigin<S, O>>,
    /// Headers of answers that are kept, beside those of the framing.
    kept: &'static [HeaderName],
}

type IdleByOrigin<S, O> = HashMap<Box<str>, VecDeque<Idle<S, O>>, RandomState>;

/// Contents of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolLimits {
    /// How long an idle connection is kept.
    pub idle_timeout: Duration,
    /// Number of idle connections of an origin.
    pub idle_connections: usize,
}

#[derive(Debug)]
struct Idle<S, O> {
    connection: Box<Connection<S, O>>,
    since: Instant,
}

impl<S: Transport, O: Observer> Pool<S, O> {
    /// Returns an empty pool. Of the headers of answers, those in `kept` are kept.
    #[must_use]
    pub fn new(limits: PoolLimits, kept: &'static [HeaderName]) -> Self {
        Self { shared: Arc::new(Shared { idle: Mutex::default(), kept }), limits }
    }

    /// Returns a handle to the same connections that keeps them within other limits.
    #[must_use]
    pub fn limited(&self, limits: PoolLimits) -> Self {
        Self { limits, ..self.clone() }
    }

    /// Headers of answers that are kept.
    pub(crate) fn kept(&self) -> &'static [HeaderName] {
        self.shared.kept
    }

    /// Takes an idle connection that is still open and current, with how long it was idle. Others that are
    /// met are closed, but not those that were idle for `max_idle` or longer.
    pub(crate) fn take_idle(
        &self,
        origin: &str,
        max_idle: Duration,
        is_current: impl Fn(&S) -> bool,
    ) -> Option<(Box<Connection<S, O>>, Duration)> {
        let now = Instant::now();
        loop {
            let newest = {
                let mut idle = self.shared.idle.lock();
                let place = idle.get_mut(origin)?;
                place.pop_back_if(|newest| now.saturating_duration_since(newest.since) < max_idle)?
            };
            let Idle { mut connection, since } = newest;
            let idle = now.saturating_duration_since(since);
            let is_late = idle >= self.limits.idle_timeout;
            if !is_late && is_current(connection.stream()) && connection.is_open() {
                return Some((connection, idle));
            }
        }
    }

    /// Keeps a connection for the next call. If enough of its origin are kept, the oldest is closed.
    pub(crate) fn put_idle(&self, connection: Box<Connection<S, O>>) {
        let mut idle = self.shared.idle.lock();
        let place = match idle.get_mut(&connection.origin) {
            Some(place) => place,
            None => idle.entry(connection.origin.clone()).or_default(),
        };
        place.push_back(Idle { connection, since: Instant::now() });
        let oldest = if place.len() > self.limits.idle_connections { place.pop_front() } else { None };
        // Closed without the lock.
        drop(idle);
        drop(oldest);
    }

    /// Closes the connections that were idle for too long or that their server closed, of all origins: no
    /// later call closes those of an origin that is not called any more. Returns their number, and when to
    /// sweep again.
    #[must_use]
    pub fn sweep(&self) -> (usize, Instant) {
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
        (closed.len(), now + (idle_timeout / 4).clamp(MIN_SWEEP_INTERVAL, MAX_SWEEP_INTERVAL))
    }
}

impl<S, O> Clone for Pool<S, O> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), limits: self.limits }
    }
}

impl<S, O> fmt::Debug for Pool<S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("limits", &self.limits).finish_non_exhaustive()
    }
}
