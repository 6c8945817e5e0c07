//! Session affinity (spec F8): which candidate a session's leg is bound to, for a while.
//!
//! A session is bound at its first successful dispatch, per leg. A binding whose worker is not eligible any more gives way:
//! the request is routed anew, and that dispatch binds it again.

use std::collections::HashMap;

use parking_lot::Mutex;
use pointsman_routing::CandidateId;
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

/// Bindings at most; when there are more, those that ended are swept out, and with them a quarter: the ones that end soonest.
const MOST: usize = 100_000;

/// The bindings.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    bound: Mutex<HashMap<(u64, Leg), Binding>>,
}

#[derive(Clone, Copy, Debug)]
struct Binding {
    candidate: CandidateId,
    until: Instant,
}

impl Sessions {
    /// Where a session's leg is bound now.
    #[must_use]
    pub(crate) fn get(&self, session: u64, leg: Leg) -> Option<CandidateId> {
        let bound = self.bound.lock();
        bound
            .get(&(session, leg))
            .filter(|binding| binding.until > Instant::now())
            .map(|binding| binding.candidate)
    }

    /// Binds a session's leg, or keeps it bound for another `ttl`.
    pub(crate) fn bind(&self, session: u64, leg: Leg, candidate: CandidateId, ttl: Duration) {
        let now = Instant::now();
        let mut bound = self.bound.lock();
        bound.insert((session, leg), Binding { candidate, until: now + ttl });
        if bound.len() > MOST {
            // So much at once that the next bindings find room: a sweep looks at all of them.
            let mut ends: Vec<Instant> = bound.values().map(|binding| binding.until).collect();
            let (_, quarter, _) = ends.select_nth_unstable(MOST / 4);
            let from = (*quarter).max(now);
            bound.retain(|_, binding| binding.until > from);
        }
    }

    /// Ends a session's bindings.
    pub(crate) fn close(&self, session: u64) {
        let mut bound = self.bound.lock();
        for leg in [Leg::Aggregated, Leg::Prefill, Leg::Decode] {
            bound.remove(&(session, leg));
        }
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
        assert_eq!((sessions.get(7, Leg::Prefill), sessions.get(7, Leg::Decode)), (Some(here), None));
        tokio::time::advance(ttl / 2).await;
        sessions.bind(7, Leg::Prefill, here, ttl);
        tokio::time::advance(ttl / 2).await;
        assert_eq!(sessions.get(7, Leg::Prefill), Some(here));
        tokio::time::advance(ttl).await;
        assert_eq!(sessions.get(7, Leg::Prefill), None);
    }

    #[tokio::test(start_paused = true)]
    async fn f8_bindings_are_bounded_and_those_that_end_soonest_give_way() {
        let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
        for session in 0..=MOST as u64 {
            sessions.bind(session, Leg::Decode, here, Duration::from_millis(1_000 + session));
        }
        let left = sessions.bound.lock().len();
        assert!((MOST / 2..=MOST).contains(&left), "{left}");
        assert_eq!(
            (sessions.get(0, Leg::Decode), sessions.get(MOST as u64, Leg::Decode)),
            (None, Some(here))
        );
    }

    #[tokio::test]
    async fn f8_a_closed_session_is_bound_nowhere() {
        let sessions = Sessions::default();
        sessions.bind(7, Leg::Decode, (WorkerId(1), DpRank(0)), Duration::from_secs(300));
        sessions.close(7);
        assert_eq!(sessions.get(7, Leg::Decode), None);
    }
}
