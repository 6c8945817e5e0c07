//! The bindings of the fleet that this gateway knows, with the names of their workers.
//!
//! The table of the request path ([`pointsman_orchestration::Sessions`]) has the workers that are registered
//! here, by their ids. This one also has bindings on workers that join later, and those of other gateways: a
//! gateway that joins gets them although the gateway that made them restarted, or is gone.

use std::collections::HashMap;

use pointsman_orchestration::{BindingKey, MAX_BINDINGS, Promise, Promises, SessionChange, Stamp};
use pointsman_workers::{DpRank, WorkerId, WorkerKey};
use tokio::time::Instant;

/// A change of a session or a response with the names of its worker, unless it was closed.
pub type NamedSession = (SessionChange, Option<(WorkerKey, DpRank)>);

/// The bindings with the names of their workers.
#[derive(Debug)]
pub struct Bindings {
    /// This gateway as the writer of bindings.
    own: u64,
    sessions: Table,
    responses: Table,
}

type Table = HashMap<BindingKey, Binding>;

#[derive(Clone, Debug)]
struct Binding {
    /// `None` if the session was closed, or the response deleted.
    worker: Option<(WorkerKey, DpRank)>,
    /// Until when each gateway needs it, or that the session stays closed.
    promises: Promises,
    stamp: Stamp,
    /// Whether the request path has it. It has none of a worker that is not registered here.
    is_placed: bool,
}

impl Bindings {
    /// Creates an empty table of the gateway that is `own` as the writer of bindings.
    #[must_use]
    pub fn new(own: u64) -> Self {
        Self { own, sessions: Table::new(), responses: Table::new() }
    }

    /// Notes a change, unless a newer one is known. Of an older one that binds to the same worker, only the
    /// promise is noted. Returns whether it is the newest. `is_placed`: whether the request path has it, or
    /// gets it now.
    pub fn note(&mut self, (change, worker): NamedSession, is_placed: bool, now: Instant) -> bool {
        let change = change.bounded();
        let promise = Promise { stamp: change.stamp, until: now + change.ttl };
        let table = match change.key {
            BindingKey::Session(..) => &mut self.sessions,
            BindingKey::Response(_) => &mut self.responses,
        };
        let mut promises = Promises::default();
        if let Some(known) = table.get_mut(&change.key) {
            let stays = worker.is_some() && known.worker == worker;
            if known.until().is_some_and(|until| until > now) && known.stamp >= change.stamp {
                if stays {
                    known.promises.note(promise, now);
                }
                return false;
            }
            if stays {
                promises = std::mem::take(&mut known.promises);
            }
        }
        promises.note(promise, now);
        table.insert(change.key, Binding { worker, promises, stamp: change.stamp, is_placed });
        limit(table, self.own, now);
        true
    }

    /// Returns whether a session or response is bound to a worker.
    #[must_use]
    pub fn is_on(&self, key: BindingKey, worker: (WorkerKey, DpRank)) -> bool {
        let known = self.sessions.get(&key).or_else(|| self.responses.get(&key));
        known.is_some_and(|known| known.worker == Some(worker))
    }

    /// Returns the bindings whose workers were unknown and are registered now.
    pub fn place(
        &mut self,
        find: impl Fn(WorkerKey) -> Option<WorkerId>,
        now: Instant,
    ) -> Vec<SessionChange> {
        let mut placed = Vec::new();
        let waiting = self.sessions.iter_mut().chain(&mut self.responses);
        for (key, binding) in waiting.filter(|(_, binding)| !binding.is_placed) {
            let candidate = binding.worker.and_then(|(worker, rank)| Some((find(worker)?, rank)));
            if candidate.is_some() {
                binding.is_placed = true;
                placed.extend(binding.changes(*key, now).map(|change| SessionChange { candidate, ..change }));
            }
        }
        placed
    }

    /// Returns the bindings that hold: those of one writer, or all.
    #[must_use]
    pub fn held(&self, writer: Option<u64>, now: Instant) -> Vec<NamedSession> {
        let all = self.sessions.iter().chain(&self.responses);
        all.flat_map(|(key, binding)| binding.changes(*key, now).map(|change| (change, binding.worker)))
            .filter(|(change, _)| writer.is_none_or(|writer| writer == change.stamp.writer))
            .collect()
    }
}

impl Binding {
    fn until(&self) -> Option<Instant> {
        self.promises.end()
    }

    /// Returns the last change of each gateway that needs it, with the time that is left.
    fn changes(&self, key: BindingKey, now: Instant) -> impl Iterator<Item = SessionChange> {
        let holding = self.promises.iter().filter(move |promise| promise.until > now);
        holding.map(move |Promise { stamp, until }| {
            let ttl = until.saturating_duration_since(now);
            SessionChange { key, candidate: None, ttl, stamp: *stamp }
        })
    }
}

/// When there are too many, evicts a quarter: those of other gateways, which keep them too, before own ones,
/// and of each those that expire first.
fn limit(table: &mut Table, own: u64, now: Instant) {
    if table.len() > MAX_BINDINGS {
        let worth = |binding: &Binding| {
            let until = binding.until().unwrap_or(now);
            (until > now && binding.stamp.writer == own, until)
        };
        let mut order: Vec<(bool, Instant)> = table.values().map(worth).collect();
        let (_, quarter, _) = order.select_nth_unstable(MAX_BINDINGS / 4);
        let from = (*quarter).max((false, now));
        table.retain(|_, binding| worth(binding) > from);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pointsman_workers::Leg;

    use super::*;

    const TTL: Duration = Duration::from_secs(60);

    fn on(worker: u64) -> Option<(WorkerKey, DpRank)> {
        Some((WorkerKey { id: WorkerId(worker), url: worker }, DpRank(1)))
    }

    fn change(key: BindingKey, at_us: u64, writer: u64) -> SessionChange {
        SessionChange { key, candidate: None, ttl: TTL, stamp: Stamp { at_us, writer } }
    }

    fn session(name: u64) -> BindingKey {
        BindingKey::Session(name, Leg::Decode)
    }

    #[test]
    fn q6_bindings_of_a_worker_that_joins_later_are_placed_then_and_once() {
        let (mut bindings, now) = (Bindings::new(9), Instant::now());
        assert!(bindings.note((change(session(1), 12, 9), on(1)), false, now));
        assert!(bindings.note((change(BindingKey::Response(2), 12, 9), on(1)), false, now));
        assert!(bindings.note((change(session(3), 12, 9), on(3)), false, now));
        assert!(bindings.note((change(session(4), 12, 9), on(1)), true, now));
        let later = now + TTL / 2;
        // The worker has another id here.
        let find = |key: WorkerKey| (key.url == 1).then_some(WorkerId(77));
        let candidate = Some((WorkerId(77), DpRank(1)));
        let placed = |key| SessionChange { candidate, ttl: TTL / 2, ..change(key, 12, 9) };
        // Q6.7
        assert_eq!(bindings.place(find, later), [placed(session(1)), placed(BindingKey::Response(2))]);
        assert_eq!(bindings.place(find, later), []);
        // Q6.7: one whose time is over is not placed
        assert_eq!(bindings.place(|key| Some(key.id), now + TTL), []);
    }

    #[test]
    fn q6_the_newest_binding_of_a_key_is_kept_whoever_made_it() {
        let (mut bindings, now) = (Bindings::new(9), Instant::now());
        assert!(bindings.note((change(session(1), 12, 9), on(1)), true, now));
        assert!(!bindings.note((change(session(1), 11, 10), on(2)), true, now));
        assert!(!bindings.note((change(session(1), 12, 9), on(2)), true, now));
        assert!(bindings.note((change(session(2), 5, 10), None), true, now));
        let of = |writer| {
            let mut held = bindings.held(writer, now);
            held.sort_by_key(|(change, _)| change.stamp);
            held
        };
        // Q6.6
        assert_eq!(of(None), [(change(session(2), 5, 10), None), (change(session(1), 12, 9), on(1))]);
        assert_eq!(of(Some(9)), [(change(session(1), 12, 9), on(1))]);
        assert_eq!(bindings.held(None, now + TTL), []);
    }

    #[test]
    fn q6_the_promise_of_each_gateway_is_sent_on() {
        let (mut bindings, now) = (Bindings::new(9), Instant::now());
        let long = SessionChange { ttl: 9 * TTL, ..change(session(1), 11, 10) };
        assert!(bindings.note((long, on(1)), true, now));
        assert!(bindings.note((change(session(1), 12, 9), on(1)), true, now));
        let of = |bindings: &Bindings, writer| bindings.held(writer, now);
        // Q6.9
        assert_eq!(of(&bindings, None), [(long, on(1)), (change(session(1), 12, 9), on(1))]);
        assert_eq!(of(&bindings, Some(9)), [(change(session(1), 12, 9), on(1))]);
        // The long request ends.
        assert!(!bindings.note((change(session(1), 11, 10), on(1)), true, now));
        assert!(bindings.is_on(session(1), on(1).unwrap()));
        // Q6.9
        assert_eq!(of(&bindings, Some(10)), [(change(session(1), 11, 10), on(1))]);
        assert_eq!(bindings.held(None, now + TTL), []);
        // Q6.2: the end of a request at a worker that the session left
        assert!(bindings.note((change(session(1), 13, 9), on(2)), true, now));
        assert!(!bindings.note((change(session(1), 11, 10), on(1)), true, now));
        assert_eq!(of(&bindings, None), [(change(session(1), 13, 9), on(2))]);
    }

    #[test]
    fn q6_bindings_of_others_are_bounded_and_so_are_their_times() {
        let (mut bindings, now) = (Bindings::new(8), Instant::now());
        let endless = SessionChange { ttl: Duration::MAX, ..change(BindingKey::Response(7), u64::MAX, 9) };
        assert!(bindings.note((endless, on(1)), false, now));
        for name in 0..=MAX_BINDINGS as u64 {
            let ttl = Duration::from_millis(1_000 + name);
            bindings.note((SessionChange { ttl, ..change(session(name), 1, 9) }, on(1)), false, now);
        }
        let held = bindings.held(None, now);
        // Q6.7
        assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&held.len()), "{}", held.len());
        let (response, _) = held.iter().find(|(change, _)| change.key == BindingKey::Response(7)).unwrap();
        // Q6.3
        assert!(response.ttl <= Duration::from_secs(24 * 3_600) && response.stamp.at_us < u64::MAX);
    }

    #[test]
    fn q6_own_bindings_are_evicted_after_those_of_others() {
        let (mut bindings, now) = (Bindings::new(9), Instant::now());
        let own = |name| SessionChange { ttl: TTL / 2, ..change(session(name), 1, 9) };
        for name in 0..100 {
            assert!(bindings.note((own(name), on(1)), true, now));
        }
        for name in 100..=MAX_BINDINGS as u64 {
            let ttl = TTL + Duration::from_millis(name);
            let later = SessionChange { ttl, ..change(session(name), 1, 10) };
            assert!(bindings.note((later, on(1)), true, now));
        }
        // Q6.8
        assert_eq!(bindings.held(Some(9), now).len(), 100);
        assert_eq!(bindings.held(None, now).len(), MAX_BINDINGS / 4 * 3);
    }
}
