//! Session affinity [F8]: the worker that each leg of a session is bound to, for a limited time.
//!
//! The first successful dispatch of a leg binds it. When the bound worker is no longer eligible, the request
//! is routed again, and the new dispatch replaces the binding.
//!
//! Gateways of a fleet may tell each other their bindings. The last writer wins: a binding has a [`Stamp`],
//! and a change with an older one is ignored.

use std::collections::HashMap;

use parking_lot::Mutex;
use pointsman_routing::CandidateId;
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

mod shared;

use shared::Sharing;
pub use shared::{CLOSED_FOR, SessionChange, Stamp};

/// Limit of bindings. Above it, the quarter that expires first is evicted.
const MAX_SESSIONS: usize = 100_000;
/// The legs of a session.
const LEGS: [Leg; 3] = [Leg::Aggregated, Leg::Prefill, Leg::Decode];

/// The bindings.
#[derive(Debug, Default)]
pub struct Sessions {
    bound: Mutex<HashMap<(u64, Leg), Binding>>,
    /// `None`: no other gateway is told.
    sharing: Option<Sharing>,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    /// `None`: the session was closed. Such an entry keeps an older binding of another gateway away.
    candidate: Option<CandidateId>,
    until: Instant,
    stamp: Stamp,
}

impl Sessions {
    /// Returns the worker that a session's leg is bound to.
    #[must_use]
    pub fn get(&self, session: u64, leg: Leg) -> Option<CandidateId> {
        let bound = self.bound.lock();
        bound.get(&(session, leg)).filter(|binding| binding.until > Instant::now())?.candidate
    }

    /// Binds a session's leg, or extends its binding, for `ttl` from now.
    pub fn bind(&self, session: u64, leg: Leg, candidate: CandidateId, ttl: Duration) {
        let now = Instant::now();
        let mut bound = self.bound.lock();
        let known = bound.get(&(session, leg)).map(|binding| binding.stamp);
        let stamp = self.sharing.as_ref().map(|sharing| sharing.stamp(known)).unwrap_or_default();
        bound.insert((session, leg), Binding { candidate: Some(candidate), until: now + ttl, stamp });
        limit(&mut bound, now);
        drop(bound);
        if let Some(sharing) = &self.sharing {
            sharing.tell(SessionChange { session, leg, candidate: Some(candidate), ttl, stamp });
        }
    }

    /// Number of bindings. An expired one counts until it is evicted or replaced.
    #[must_use]
    pub fn bindings(&self) -> usize {
        self.bound.lock().len()
    }

    /// Ends a session's bindings.
    pub fn close(&self, session: u64) {
        let mut bound = self.bound.lock();
        let Some(sharing) = &self.sharing else {
            for leg in LEGS {
                bound.remove(&(session, leg));
            }
            return;
        };
        let now = Instant::now();
        for leg in LEGS {
            let known = bound.get(&(session, leg)).map(|binding| binding.stamp);
            let (stamp, ttl) = (sharing.stamp(known), shared::CLOSED_FOR);
            bound.insert((session, leg), Binding { candidate: None, until: now + ttl, stamp });
            sharing.tell(SessionChange { session, leg, candidate: None, ttl, stamp });
        }
        limit(&mut bound, now);
    }
}

/// Evicts the quarter of the bindings that expire first, when there are too many: a sweep reads all of them,
/// so it must be rare.
fn limit(bound: &mut HashMap<(u64, Leg), Binding>, now: Instant) {
    if bound.len() > MAX_SESSIONS {
        let mut ends: Vec<Instant> = bound.values().map(|binding| binding.until).collect();
        let (_, quarter, _) = ends.select_nth_unstable(MAX_SESSIONS / 4);
        let from = (*quarter).max(now);
        bound.retain(|_, binding| binding.until > from);
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{DpRank, WorkerId};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn f8_a_binding_is_per_leg_and_ends() {
        let (sessions, ttl) = (Sessions::default(), Duration::from_secs(300));
        let here = (WorkerId(1), DpRank(0));
        sessions.bind(7, Leg::Prefill, here, ttl);
        // F8.2
        assert_eq!((sessions.get(7, Leg::Prefill), sessions.get(7, Leg::Decode)), (Some(here), None));
        tokio::time::advance(ttl / 2).await;
        sessions.bind(7, Leg::Prefill, here, ttl);
        tokio::time::advance(ttl / 2).await;
        assert_eq!(sessions.get(7, Leg::Prefill), Some(here));
        tokio::time::advance(ttl).await;
        // F8.4
        assert_eq!(sessions.get(7, Leg::Prefill), None);
    }

    #[tokio::test(start_paused = true)]
    async fn f8_bindings_are_bounded_and_those_that_expire_first_are_evicted() {
        let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
        for session in 0..=MAX_SESSIONS as u64 {
            sessions.bind(session, Leg::Decode, here, Duration::from_millis(1_000 + session));
        }
        let left = sessions.bound.lock().len();
        assert!((MAX_SESSIONS / 2..=MAX_SESSIONS).contains(&left), "{left}");
        assert_eq!(
            (sessions.get(0, Leg::Decode), sessions.get(MAX_SESSIONS as u64, Leg::Decode)),
            (None, Some(here))
        );
    }

    #[tokio::test]
    async fn f8_a_closed_session_has_no_binding() {
        let sessions = Sessions::default();
        sessions.bind(7, Leg::Decode, (WorkerId(1), DpRank(0)), Duration::from_secs(300));
        sessions.close(7);
        assert_eq!(sessions.get(7, Leg::Decode), None);
    }
}
