//! Values derived from the configuration that requests read.

use std::time::Duration;

use crate::{
    openai::hints::{HintTrust, Hints},
    orchestrate::legs::RetryPolicy,
    tokenization::routing_request::Measure,
};

/// Values that requests need again and again.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Refuse instead of prefilling locally.
    pub enforce_disagg: bool,
    /// A request's deadline.
    pub request_timeout: Duration,
    /// What a request is allowed.
    pub terms: RetryPolicy,
    /// How long a session stays bound when its request does not say; `None`: only requests with a session control bind.
    pub session_affinity: Option<Duration>,
    /// A booking without life is freed after this.
    pub booking_ttl: Duration,
    /// How long a request may wait for a worker that is not busy.
    pub queue_timeout: Duration,
    /// Status when every worker is busy.
    pub busy_status: u16,
    /// Whether hints are taken.
    pub trust: HintTrust,
    /// Whether clients that ask are told why a worker was chosen.
    pub tell_decisions: bool,
    /// Largest body.
    pub max_body_bytes: usize,
    /// Keys of clients; none: everybody may.
    pub api_keys: Vec<String>,
    /// What operators must give to change anything; none: everybody may.
    pub admin_token: Option<String>,
    /// Whether operators must give it to read, too.
    pub admin_token_reads: bool,
    /// How prompts are measured.
    pub measure: Measure,
}

impl Settings {
    /// How long this request's session is bound where it runs; `None`: not at all.
    #[must_use]
    pub fn affinity(&self, hints: &Hints) -> Option<Duration> {
        hints.session.as_ref()?;
        hints.session_control.map(|control| control.timeout).or(self.session_affinity)
    }
}
