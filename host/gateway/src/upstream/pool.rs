//! Idle connections to engines, kept for the next request.

use std::sync::Arc;

use http::{HeaderName, header};
use http1_client::{Pool, PoolLimits};
use tokio::time::Instant;

use super::{
    body::ObservedCall,
    call_context::CallContext,
    retry_advice::{RETRY_AFTER_MS, SHOULD_RETRY},
    stream::EngineStream,
};
use crate::config::Upstream;

/// Where each vector of a binary answer of vLLM begins, as JSON.
pub(crate) const METADATA: HeaderName = HeaderName::from_static("metadata");

/// The headers of an answer that anything reads.
static KEPT: [HeaderName; 6] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::RETRY_AFTER,
    RETRY_AFTER_MS,
    SHOULD_RETRY,
    METADATA,
];

/// Idle connections of one runtime, by their origin, and what all calls use.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionPool {
    pub(super) idle: Pool<EngineStream, ObservedCall>,
    pub(super) context: Arc<CallContext>,
}

impl From<&Upstream> for PoolLimits {
    fn from(settings: &Upstream) -> Self {
        Self { idle_timeout: settings.idle_timeout, idle_connections: settings.idle_connections }
    }
}

impl ConnectionPool {
    /// Returns an empty pool.
    #[must_use]
    pub(crate) fn new(limits: PoolLimits, context: CallContext) -> Self {
        Self { idle: Pool::new(limits, &KEPT), context: Arc::new(context) }
    }

    /// Returns a handle to the same connections that keeps them within other limits.
    #[must_use]
    pub(crate) fn limited(&self, limits: PoolLimits) -> Self {
        Self { idle: self.idle.limited(limits), context: self.context.clone() }
    }

    /// Closes the connections that were idle for too long or that their engine closed, for all workers: no
    /// later call closes those of a worker that left. Returns their number, and when to sweep again.
    pub(crate) fn sweep(&self) -> (usize, Instant) {
        let (closed, next) = self.idle.sweep();
        if closed > 0 {
            tracing::debug!(connections = closed, "idle connections to workers closed");
        }
        (closed, next)
    }
}

#[cfg(test)]
impl From<Arc<pointsman_workers::EngineTls>> for ConnectionPool {
    fn from(tls: Arc<pointsman_workers::EngineTls>) -> Self {
        Self::from((tls, pointsman_workers::Resolver::default()))
    }
}

#[cfg(test)]
impl From<(Arc<pointsman_workers::EngineTls>, pointsman_workers::Resolver)> for ConnectionPool {
    fn from((tls, resolver): (Arc<pointsman_workers::EngineTls>, pointsman_workers::Resolver)) -> Self {
        let limits = PoolLimits { idle_timeout: std::time::Duration::from_secs(30), idle_connections: 8 };
        Self::new(limits, CallContext { tls, resolver, via: super::via::own_via() })
    }
}
