//! Whether and when a client should send a request again, as the answer with an error says it.

use super::ApiError;

/// Seconds after which a client may try again.
pub(super) const RETRY_AFTER: u64 = 1;
/// The same while too many requests wait for a worker, which takes minutes to load its model.
const RETRY_AFTER_WAITS: u64 = 10;

impl ApiError {
    /// Returns whether the client should send the request again, where the status alone may mislead it.
    pub(super) fn should_retry(&self) -> Option<bool> {
        match self {
            Self::Engine { retry, .. } => retry.should,
            Self::LastingFailure(_) | Self::Poison { .. } | Self::LoopDetected | Self::Deadline => {
                Some(false)
            }
            Self::Pinned(cause, ..) | Self::NotContinued { cause, .. } => cause.should_retry(),
            _ => None,
        }
    }

    /// Returns after how many seconds the client should try again.
    pub(super) fn retry_after(&self) -> Option<u64> {
        let measured = match self {
            Self::Pinned(cause, ..) | Self::NotContinued { cause, .. } => return cause.retry_after(),
            Self::TooManyWait(_) => return Some(RETRY_AFTER_WAITS),
            Self::Overloaded { retry_after, .. } => Some(retry_after),
            Self::TenantLimit(exceeded) => Some(&exceeded.retry_after),
            _ => None,
        };
        if let Some(time) = measured {
            // A client that comes back a fraction early would be refused again.
            return Some(time.as_secs() + u64::from(time.subsec_nanos() > 0));
        }
        let retry = matches!(
            self,
            Self::Shed(_)
                | Self::RateLimited(_)
                | Self::TooManyWrongKeys
                | Self::KeysBusy
                | Self::NoKeySet
                | Self::BodyBytesInFlight(_)
                | Self::TooManyConnections(_)
                | Self::TooManyStreams(_)
                | Self::NoWorker(_)
                | Self::PrefillUnavailable
                | Self::HandoffLost(_)
                | Self::Draining
        );
        retry.then_some(RETRY_AFTER)
    }
}
