//! How full the queue is, for the clients that it refuses.

use std::fmt;

use pointsman_workers::ModelName;
use tokio::time::{Duration, Instant};

use super::{AdmissionQueue, AdmissionRequest, Inner, worker_waits::Held};

/// Requests that wait and are in flight, and the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pressure {
    /// Requests in the queue.
    pub waiting: usize,
    /// Tokens of their prompts.
    pub tokens: u64,
    /// Requests that may wait; 0: none.
    pub limit: usize,
    /// Requests of the model in the queue, and its limit if it has one.
    pub waiting_of_model: Option<(usize, usize)>,
    /// Requests in flight, and their limit if there is one.
    pub inflight: Option<(usize, usize)>,
    /// Requests of the model in flight, and its limit if it has one.
    pub inflight_of_model: Option<(usize, usize)>,
    /// When a client should try again.
    pub retry_after: Duration,
}

impl AdmissionQueue {
    /// Returns when a client that is refused now should try again: the length of the queue divided by the
    /// rate at which requests leave it.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        let mut inner = self.inner.lock();
        let waiting = inner.order.len();
        inner.drain.retry_after(waiting, Instant::now())
    }

    /// Returns the numbers for a client that is refused now: requests that wait and are in flight, and the
    /// limits.
    #[must_use]
    pub fn pressure(&self, model: &ModelName) -> Pressure {
        let retry_after = self.retry_after();
        let inner = self.inner.lock();
        let (rules, bounds) = (&inner.rules, inner.rules.model(model));
        let limited = |value: usize, limit: usize| (limit > 0).then_some((value, limit));
        let inflight_of = inner.inflight_of.get(model).copied().unwrap_or(0);
        Pressure {
            waiting: inner.counted(None),
            tokens: inner.tokens,
            limit: rules.limit,
            waiting_of_model: limited(inner.counted(Some(model)), bounds.limit),
            inflight: limited(inner.inflight, rules.max_inflight),
            inflight_of_model: limited(inflight_of, bounds.max_inflight),
            retry_after,
        }
    }
}

impl Inner {
    /// Returns whether another request may wait, without some of those of its model that wait for a worker.
    pub(super) fn has_room(&self, admission_request: &AdmissionRequest<'_>, without: Held) -> bool {
        self.room_for(admission_request)(without)
    }

    /// Returns whether another request may wait, for any of those of its model that would not.
    pub(super) fn room_for(&self, asks: &AdmissionRequest<'_>) -> impl Fn(Held) -> bool + use<> {
        let (limit, limit_of_model) = (self.rules.limit, self.rules.model(asks.model).limit);
        let (bytes, most_bytes, more) = (self.bytes, self.rules.bytes, asks.bytes);
        let (all, of_model) = (self.counted(None), self.counted(Some(asks.model)));
        move |without| {
            let counted = |requests: usize| requests.saturating_sub(without.requests);
            counted(all) < limit
                && (limit_of_model == 0 || counted(of_model) < limit_of_model)
                && (bytes - without.bytes).checked_add(more).is_some_and(|sum| sum <= most_bytes)
        }
    }

    /// Returns whether another request of a model may be in flight.
    pub(super) fn may_run(&self, model: &ModelName) -> bool {
        let most_of = self.rules.model(model).max_inflight;
        let of_model = || self.inflight_of.get(model).copied().unwrap_or(0);
        let fits = self.rules.max_inflight == 0 || self.inflight < self.rules.max_inflight;
        fits && (most_of == 0 || of_model() < most_of)
    }
}

impl fmt::Display for Pressure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { waiting, tokens, limit, .. } = self;
        match limit {
            0 => write!(f, "no request may wait (queue.limit is 0)")?,
            _ => write!(f, "{waiting} requests with {tokens} prompt tokens wait (queue.limit is {limit})")?,
        }
        if let Some((waiting, limit)) = self.waiting_of_model {
            write!(f, ", {waiting} of them for this model (queue.models.NAME.limit is {limit})")?;
        }
        if let Some((inflight, limit)) = self.inflight {
            write!(f, ", {inflight} are in flight (queue.max_inflight is {limit})")?;
        }
        if let Some((inflight, limit)) = self.inflight_of_model {
            write!(
                f,
                ", {inflight} of this model are in flight (queue.models.NAME.max_inflight is {limit})"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f7_a_refusal_tells_numbers_and_limits() {
        let off = Pressure {
            waiting: 0,
            tokens: 0,
            limit: 0,
            waiting_of_model: None,
            inflight: None,
            inflight_of_model: None,
            retry_after: Duration::from_secs(1),
        };
        // F7.6
        assert_eq!(off.to_string(), "no request may wait (queue.limit is 0)");
        let full = Pressure {
            waiting: 8,
            tokens: 4_096,
            limit: 8,
            waiting_of_model: Some((2, 2)),
            inflight: Some((64, 64)),
            inflight_of_model: Some((9, 10)),
            ..off
        };
        // F7.6
        assert_eq!(
            full.to_string(),
            "8 requests with 4096 prompt tokens wait (queue.limit is 8), 2 of them for this model \
             (queue.models.NAME.limit is 2), 64 are in flight (queue.max_inflight is 64), 9 of this model are in flight \
             (queue.models.NAME.max_inflight is 10)"
        );
    }
}
