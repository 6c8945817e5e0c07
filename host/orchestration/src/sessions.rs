//! Session affinity [F8], stored responses and media [I12]: the worker that each leg of a session is bound
//! to, the worker that stored a response, and the one that got a medium, for a limited time.
//!
//! The first successful dispatch of a leg binds it. When the bound worker is no longer eligible, the request
//! is routed again, and the new dispatch replaces the binding.
//!
//! Gateways of a fleet may send each other their bindings. The last writer wins: a binding has a [`Stamp`],
//! and a change with an older one is ignored. They do not send where media are: a client may name many.

use std::{collections::HashMap, hash::Hash};

use parking_lot::Mutex;
use pointsman_routing::CandidateId;
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

mod shared;

use shared::Sharing;
pub use shared::{CLOSED_FOR, SessionChange, Stamp};

/// Maximum number of bindings of sessions, of those of responses, and of those of media. Above it, the
/// quarter that expires first is evicted.
pub const MAX_BINDINGS: usize = 100_000;
/// How long the worker of a stored response is known.
const RESPONSE_TTL: Duration = Duration::from_secs(24 * 3_600);
/// How long the worker that got a medium is known.
const MEDIA_TTL: Duration = Duration::from_secs(3_600);
/// The legs of a session.
const LEGS: [Leg; 3] = [Leg::Aggregated, Leg::Prefill, Leg::Decode];

/// Key that is bound to a worker. Both kinds are named by hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BindingKey {
    /// A leg of a session.
    Session(u64, Leg),
    /// A stored response.
    Response(u64),
}

/// The bindings.
#[derive(Debug, Default)]
pub struct Sessions {
    sessions: Mutex<Bindings>,
    responses: Mutex<Bindings>,
    /// Media by the leg whose worker got them. One request names many, so they evict only each other.
    media: Mutex<Bindings<(u64, Leg)>>,
    /// `None` if no other gateway gets them.
    sharing: Option<Sharing>,
}

type Bindings<K = BindingKey> = HashMap<K, Binding>;

#[derive(Clone, Copy, Debug)]
struct Binding {
    /// `None` if the session was closed, or the response deleted. Such an entry keeps an older binding of
    /// another gateway away.
    candidate: Option<CandidateId>,
    until: Instant,
    stamp: Stamp,
}

impl Sessions {
    /// Returns the worker that a session's leg is bound to.
    #[must_use]
    pub fn get(&self, session: u64, leg: Leg) -> Option<CandidateId> {
        self.find(BindingKey::Session(session, leg))
    }

    /// Binds a session's leg, or extends its binding, for `ttl` from now.
    pub fn bind(&self, session: u64, leg: Leg, candidate: CandidateId, ttl: Duration) {
        self.put(BindingKey::Session(session, leg), Some(candidate), ttl);
    }

    /// Ends a session's bindings.
    pub fn close(&self, session: u64) {
        LEGS.into_iter().for_each(|leg| self.end(BindingKey::Session(session, leg)));
    }

    /// Returns the worker that stored a response.
    #[must_use]
    pub fn storing(&self, response: u64) -> Option<CandidateId> {
        self.find(BindingKey::Response(response))
    }

    /// Notes that a worker stored a response.
    pub fn stored(&self, response: u64, candidate: CandidateId) {
        self.put(BindingKey::Response(response), Some(candidate), RESPONSE_TTL);
    }

    /// Notes that a response is not stored any more.
    pub fn deleted(&self, response: u64) {
        self.end(BindingKey::Response(response));
    }

    /// Returns the worker that got a medium for a leg.
    #[must_use]
    pub fn holding(&self, medium: u64, leg: Leg) -> Option<CandidateId> {
        find(&self.media, (medium, leg))
    }

    /// Notes that a worker got media for a leg.
    pub fn holds(&self, media: &[u64], leg: Leg, candidate: CandidateId) {
        let now = Instant::now();
        let binding = Binding { candidate: Some(candidate), until: now + MEDIA_TTL, stamp: Stamp::default() };
        let mut bound = self.media.lock();
        bound.extend(media.iter().map(|medium| ((*medium, leg), binding)));
        limit(&mut bound, now);
    }

    /// Number of bindings of sessions. An expired one counts until it is evicted or replaced.
    #[must_use]
    pub fn bindings(&self) -> usize {
        self.sessions.lock().len()
    }

    fn table(&self, key: BindingKey) -> &Mutex<Bindings> {
        match key {
            BindingKey::Session(..) => &self.sessions,
            BindingKey::Response(_) => &self.responses,
        }
    }

    fn find(&self, key: BindingKey) -> Option<CandidateId> {
        find(self.table(key), key)
    }

    /// Replaces a binding, and sends it to the other gateways.
    fn put(&self, key: BindingKey, candidate: Option<CandidateId>, ttl: Duration) {
        let now = Instant::now();
        let mut bound = self.table(key).lock();
        let known = bound.get(&key).map(|binding| binding.stamp);
        let stamp = self.sharing.as_ref().map(|sharing| sharing.stamp(known)).unwrap_or_default();
        bound.insert(key, Binding { candidate, until: now + ttl, stamp });
        limit(&mut bound, now);
        drop(bound);
        if let Some(sharing) = &self.sharing {
            sharing.queue_change(SessionChange { key, candidate, ttl, stamp });
        }
    }

    fn end(&self, key: BindingKey) {
        if self.sharing.is_some() {
            self.put(key, None, shared::CLOSED_FOR);
        } else {
            self.table(key).lock().remove(&key);
        }
    }
}

fn find<K: Eq + Hash>(table: &Mutex<Bindings<K>>, key: K) -> Option<CandidateId> {
    table.lock().get(&key).filter(|binding| binding.until > Instant::now())?.candidate
}

/// Evicts the quarter of the bindings that expire first, when there are too many: a sweep reads all of them,
/// so it must be rare.
fn limit<K>(bound: &mut Bindings<K>, now: Instant) {
    if bound.len() > MAX_BINDINGS {
        let mut ends: Vec<Instant> = bound.values().map(|binding| binding.until).collect();
        let (_, quarter, _) = ends.select_nth_unstable(MAX_BINDINGS / 4);
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
        sessions.stored(7, here);
        for session in 0..=MAX_BINDINGS as u64 {
            sessions.bind(session, Leg::Decode, here, Duration::from_millis(1_000 + session));
        }
        let left = sessions.bindings();
        assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
        assert_eq!(
            (sessions.get(0, Leg::Decode), sessions.get(MAX_BINDINGS as u64, Leg::Decode)),
            (None, Some(here))
        );
        // I12.4: responses have a limit of their own.
        assert_eq!(sessions.storing(7), Some(here));
        for response in 0..=MAX_BINDINGS as u64 {
            if response % 1_000 == 0 {
                tokio::time::advance(Duration::from_millis(1)).await;
            }
            sessions.stored(response, here);
        }
        let left = sessions.responses.lock().len();
        // I12.4
        assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
    }

    #[tokio::test(start_paused = true)]
    async fn i12_the_worker_of_a_response_is_known_for_a_day_or_until_it_is_deleted() {
        let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
        sessions.stored(7, here);
        sessions.stored(8, here);
        sessions.deleted(8);
        assert_eq!((sessions.storing(7), sessions.storing(8)), (Some(here), None));
        // A session of the same hash is another matter.
        assert_eq!(sessions.get(7, Leg::Aggregated), None);
        tokio::time::advance(RESPONSE_TTL).await;
        // I12.4
        assert_eq!(sessions.storing(7), None);
    }

    #[tokio::test(start_paused = true)]
    async fn i12_many_media_make_no_gateway_forget_a_response() {
        let ((sessions, told), here) = (Sessions::shared(10), (WorkerId(1), DpRank(0)));
        sessions.stored(7, here);
        for request in 0..=MAX_BINDINGS as u64 / 64 {
            tokio::time::advance(Duration::from_millis(1)).await;
            let media: Vec<u64> = (0..64).map(|place| request * 64 + place).collect();
            sessions.holds(&media, Leg::Decode, here);
        }
        let left = sessions.media.lock().len();
        // I12.11
        assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
        let last = MAX_BINDINGS as u64;
        assert_eq!(
            [(0, Leg::Decode), (last, Leg::Prefill), (last, Leg::Decode)]
                .map(|(medium, leg)| sessions.holding(medium, leg)),
            [None, None, Some(here)]
        );
        // I12.4: responses have a limit of their own. Q6.5: others are told of the response only.
        assert_eq!((sessions.storing(7), told.try_iter().count(), sessions.untold()), (Some(here), 1, 0));
        tokio::time::advance(MEDIA_TTL).await;
        // I12.11
        assert_eq!((sessions.holding(last, Leg::Decode), sessions.storing(7)), (None, Some(here)));
    }

    #[tokio::test]
    async fn f8_a_closed_session_has_no_binding() {
        let sessions = Sessions::default();
        sessions.bind(7, Leg::Decode, (WorkerId(1), DpRank(0)), Duration::from_secs(300));
        sessions.close(7);
        assert_eq!(sessions.get(7, Leg::Decode), None);
    }
}
