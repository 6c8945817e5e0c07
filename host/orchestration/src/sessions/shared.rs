//! Bindings that gateways of a fleet tell each other.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
    mpsc::{Receiver, SyncSender, sync_channel},
};

use pointsman_routing::CandidateId;
use pointsman_workers::unix_us;
use tokio::time::{Duration, Instant};

use super::{Binding, BindingKey, Sessions, limit};

/// How long the end of a session keeps older bindings away.
pub const CLOSED_FOR: Duration = Duration::from_secs(60);
/// How far the clock of another gateway may be ahead: a later stamp would win for ever.
const MAX_AHEAD: Duration = Duration::from_secs(10);
/// Longest time that another gateway may bind a session for.
const MAX_TTL: Duration = Duration::from_secs(24 * 3_600);

/// When and by whom a binding was made. The larger one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stamp {
    /// Microseconds since 1970, on the writer's clock.
    pub at_us: u64,
    /// The gateway, as a hash of its name.
    pub writer: u64,
}

/// A binding that was made, or its end: of a session or a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionChange {
    /// The session or response.
    pub key: BindingKey,
    /// The worker; `None` if the session was closed, or the response deleted.
    pub candidate: Option<CandidateId>,
    /// How long the binding holds.
    pub ttl: Duration,
    /// When and by whom it was made.
    pub stamp: Stamp,
}

impl SessionChange {
    /// Limits how far the clock of another gateway may be ahead, and how long its binding holds.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        let ahead = u64::try_from(MAX_AHEAD.as_micros()).unwrap_or(u64::MAX);
        self.stamp.at_us = self.stamp.at_us.min(unix_us().saturating_add(ahead));
        self.ttl = self.ttl.min(MAX_TTL);
        self
    }
}

/// Queue of changes for other gateways.
#[derive(Debug)]
pub(super) struct Sharing {
    queue: SyncSender<SessionChange>,
    writer: Arc<AtomicU64>,
    lost: AtomicU64,
}

impl Sharing {
    /// Returns a stamp for a change now. It wins over all known stamps.
    pub(super) fn stamp(&self, known: Option<Stamp>) -> Stamp {
        let after = known.map_or(0, |known| known.at_us.saturating_add(1));
        Stamp { at_us: unix_us().max(after), writer: self.writer.load(Relaxed) }
    }

    /// Hands a change over. When the queue is full, the others do not learn of it before the next one.
    pub(super) fn queue_change(&self, change: SessionChange) {
        if self.queue.try_send(change).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }
}

impl Sessions {
    /// Creates bindings whose changes are put into a queue of this length.
    #[must_use]
    pub fn shared(length: usize) -> (Self, Receiver<SessionChange>) {
        let (queue, changes) = sync_channel(length);
        let sharing = Sharing { queue, writer: Arc::default(), lost: AtomicU64::new(0) };
        (Self { sharing: Some(sharing), ..Self::default() }, changes)
    }

    /// Sets the author of this gateway's changes, a hash of its name.
    pub fn set_writer(&self, writer: u64) {
        if let Some(sharing) = &self.sharing {
            sharing.writer.store(writer, Relaxed);
        }
    }

    /// Returns the number of changes that were not sent to the others, because the queue was full.
    #[must_use]
    pub fn untold(&self) -> u64 {
        self.sharing.as_ref().map_or(0, |sharing| sharing.lost.load(Relaxed))
    }

    /// Applies a change of another gateway, unless a newer one is known.
    pub fn apply(&self, change: SessionChange) {
        let SessionChange { key, candidate, ttl, stamp } = change.bounded();
        let now = Instant::now();
        let mut bound = self.table(key).lock();
        let known = bound.get(&key).copied();
        if known.is_some_and(|known| known.until > now && known.stamp >= stamp) {
            return;
        }
        // Requests here hold it for longer.
        let held = known.filter(|known| known.holders > 0).map(|known| known.until);
        let until = held.map_or(now + ttl, |held| held.max(now + ttl));
        bound.insert(key, Binding::after(known, candidate, until, stamp));
        limit(&mut bound, now);
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{DpRank, Leg, WorkerId};
    use proptest::prelude::*;

    use super::{
        super::{SessionHolds, tests::turn},
        *,
    };

    const TTL: Duration = Duration::from_secs(300);

    fn changes(queue: &Receiver<SessionChange>) -> Vec<SessionChange> {
        queue.try_iter().collect()
    }

    fn gateway(writer: u64) -> (Sessions, Receiver<SessionChange>) {
        let (sessions, queue) = Sessions::shared(1_000);
        sessions.set_writer(writer);
        (sessions, queue)
    }

    #[test]
    fn q6_a_binding_of_another_gateway_holds_here_and_its_end_too() {
        let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
        turn(&one, 7, Leg::Decode, (WorkerId(3), DpRank(1)), TTL);
        changes(&queue).into_iter().for_each(|change| two.apply(change));
        // Q6.1
        assert_eq!(two.get(7, Leg::Decode), Some((WorkerId(3), DpRank(1))));
        let late = SessionChange {
            key: BindingKey::Session(7, Leg::Decode),
            candidate: Some((WorkerId(9), DpRank(0))),
            ttl: TTL,
            stamp: Stamp { at_us: 1, writer: 3 },
        };
        one.close(7);
        changes(&queue).into_iter().for_each(|change| two.apply(change));
        two.apply(late);
        // Q6.2
        assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, None));
    }

    #[test]
    fn q6_the_worker_of_a_response_is_known_to_other_gateways_until_it_is_deleted() {
        let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
        one.stored(7, (WorkerId(3), DpRank(0)));
        changes(&queue).into_iter().for_each(|change| two.apply(change));
        // Q6.5
        assert_eq!((two.storing(7), two.get(7, Leg::Aggregated)), (Some((WorkerId(3), DpRank(0))), None));
        one.deleted(7);
        changes(&queue).into_iter().for_each(|change| two.apply(change));
        // Q6.5
        assert_eq!(two.storing(7), None);
    }

    #[tokio::test(start_paused = true)]
    async fn q6_a_session_stays_bound_elsewhere_while_a_request_of_it_runs() {
        let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
        let tell = || changes(&queue).into_iter().for_each(|change| two.apply(change));
        let (mut holds, here) = (SessionHolds::default(), (WorkerId(3), DpRank(1)));
        let end = Instant::now() + 9 * TTL;
        one.hold(7, Leg::Decode, &mut holds, end);
        one.bind(7, Leg::Decode, &mut holds, here, end);
        tell();
        tokio::time::advance(2 * TTL).await;
        // Q6.9
        assert_eq!(two.get(7, Leg::Decode), Some(here));
        one.release(7, &mut holds, TTL);
        tell();
        tokio::time::advance(TTL / 2).await;
        assert_eq!(two.get(7, Leg::Decode), Some(here));
        tokio::time::advance(TTL / 2).await;
        // Q6.9
        assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, None));
        // What runs here keeps it against an end elsewhere.
        two.hold(7, Leg::Decode, &mut holds, Instant::now() + 9 * TTL);
        turn(&one, 7, Leg::Decode, here, TTL);
        tell();
        tokio::time::advance(2 * TTL).await;
        assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, Some(here)));
    }

    #[test]
    fn q6_a_clock_that_is_ahead_wins_for_seconds_only() {
        let (one, _queue) = gateway(1);
        let ahead = Stamp { at_us: u64::MAX, writer: 3 };
        let (key, candidate) = (BindingKey::Session(7, Leg::Decode), Some((WorkerId(9), DpRank(0))));
        one.apply(SessionChange { key, candidate, ttl: TTL * 1_000, stamp: ahead });
        let binding = *one.sessions.lock().get(&key).unwrap();
        // Q6.3
        assert!(binding.stamp.at_us <= unix_us() + 10_000_000);
        assert!(binding.until <= Instant::now() + MAX_TTL);
        // The binding here is newer than the known one.
        turn(&one, 7, Leg::Decode, (WorkerId(2), DpRank(0)), TTL);
        assert_eq!(one.get(7, Leg::Decode), Some((WorkerId(2), DpRank(0))));
    }

    #[test]
    fn q6_a_full_queue_delays_no_request() {
        let (one, _queue) = Sessions::shared(2);
        for session in 0..5 {
            let (mut holds, end) = (SessionHolds::default(), Instant::now() + TTL);
            one.hold(session, Leg::Decode, &mut holds, end);
            one.bind(session, Leg::Decode, &mut holds, (WorkerId(2), DpRank(0)), end);
        }
        // Q6.4
        assert_eq!((one.untold(), one.bindings()), (3, 5));
    }

    proptest! {
        #[test]
        fn q6_gateways_agree_whatever_the_order_of_changes(
            steps in proptest::collection::vec((0_usize..2, 0_u64..3, 0_u64..4), 1..30),
            order in proptest::collection::vec(any::<prop::sample::Index>(), 100),
        ) {
            let gateways = [gateway(1), gateway(2)];
            for (which, session, worker) in steps {
                match worker {
                    0 => gateways[which].0.close(session),
                    worker => {
                        let candidate = (WorkerId(worker), DpRank(0));
                        turn(&gateways[which].0, session, Leg::Prefill, candidate, TTL);
                    }
                }
            }
            let told = [changes(&gateways[0].1), changes(&gateways[1].1)];
            for (which, mut told) in [(0, told[1].clone()), (1, told[0].clone())] {
                for place in &order {
                    if told.is_empty() {
                        break;
                    }
                    gateways[which].0.apply(told.swap_remove(place.index(told.len())));
                }
                told.into_iter().for_each(|change| gateways[which].0.apply(change));
            }
            for session in 0..3 {
                let bound = |which: usize| gateways[which].0.get(session, Leg::Prefill);
                // Q6.2
                prop_assert_eq!(bound(0), bound(1));
            }
        }
    }
}
