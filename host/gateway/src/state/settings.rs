//! Values of the configuration in the form that request handlers need.

use std::time::Duration;

use crate::{
    config::LegOrder,
    config::settings::{Reloadable, RoutingSettings, ServerSettings},
    openai::hints::{HintTrust, Hints},
    tokenization::routing_request::Measure,
};

/// Values of one configuration that requests read.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Refuse a request without a prefill worker instead of prefilling locally.
    pub enforce_disagg: bool,
    /// Limit of a whole request, from its first byte.
    pub request_timeout: Duration,
    /// Limit of connecting to a worker.
    pub connect_timeout: Duration,
    /// How long a client may pause while it uploads a body.
    pub body_idle_timeout: Duration,
    /// Order of the legs, retries and fallback.
    pub retry_policy: RetryPolicy,
    /// How long a session stays bound when its request does not say; `None`: only requests with a session
    /// control bind.
    pub session_affinity: Option<Duration>,
    /// Time without a token after which a booking is released.
    pub booking_ttl: Duration,
    /// How long a request may wait for a worker that is not busy.
    pub queue_timeout: Duration,
    /// How long requests in flight may run after the drain began.
    pub drain_timeout: Duration,
    /// HTTP status when every eligible worker is busy.
    pub busy_status: u16,
    /// Whether routing hints of clients are used.
    pub trust: HintTrust,
    /// Whether a client may see why a worker was chosen.
    pub tell_decisions: bool,
    /// Limit of a request body in bytes.
    pub max_body_bytes: usize,
    /// Bearer tokens of clients; empty: no token is needed.
    pub api_keys: Vec<String>,
    /// Bearer token of operators; `None`: no token is needed.
    pub admin_token: Option<String>,
    /// Whether operators need the token to read, too.
    pub admin_token_reads: bool,
    /// How prompts are measured.
    pub measure: Measure,
}

/// Order of the legs, retries and fallback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RetryPolicy {
    /// Leg that is routed first.
    pub order: LegOrder,
    /// Number of further attempts, all legs together.
    pub retries: u32,
    /// Whether a request whose prefill failed for good may run on a worker that prefills locally (B6).
    pub local_fallback: bool,
}

impl Settings {
    /// Derives the values from a validated configuration.
    #[must_use]
    pub(crate) fn new(block_size: u32, reloadable: &Reloadable) -> Self {
        let (timeouts, queue) = (&reloadable.timeouts, &reloadable.queue);
        let ServerSettings {
            max_body_bytes,
            trust_hints,
            tell_decisions,
            requests_per_second: _,
            api_keys,
            admin_token,
            admin_token_reads,
        } = reloadable.server.clone();
        let RoutingSettings {
            enforce_disagg,
            bytes_per_token,
            order,
            retries,
            local_fallback,
            session_affinity,
            busy_status,
            hash_salt,
            cost: _,
        } = reloadable.routing;
        Self {
            enforce_disagg,
            request_timeout: timeouts.request,
            connect_timeout: timeouts.connect,
            body_idle_timeout: timeouts.body_idle,
            retry_policy: RetryPolicy { order, retries, local_fallback: local_fallback && !enforce_disagg },
            session_affinity: Some(session_affinity).filter(|ttl| !ttl.is_zero()),
            booking_ttl: timeouts.booking,
            queue_timeout: queue.timeout,
            drain_timeout: timeouts.drain,
            busy_status,
            trust: if trust_hints { HintTrust::Trusted } else { HintTrust::Ignored },
            tell_decisions,
            max_body_bytes,
            api_keys,
            admin_token,
            admin_token_reads,
            measure: Measure { block_size, bytes_per_token, salt: hash_salt },
        }
    }

    /// Returns how long this request's session is bound to its workers; `None`: it is not bound.
    #[must_use]
    pub(crate) fn affinity(&self, hints: &Hints) -> Option<Duration> {
        hints.session.as_ref()?;
        hints.session_control.map(|control| control.timeout).or(self.session_affinity)
    }
}
