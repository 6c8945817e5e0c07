//! The bindings of the fleet that this gateway knows, with the names of their workers.
//!
//! The table of the request path ([`pointsman_orchestration::Sessions`]) has the workers that are registered
//! here, by their ids. This one also has bindings on workers that join later, and those of other gateways: a
//! gateway that joins gets them although the gateway that made them restarted, or is gone.

use std::collections::HashMap;

use pointsman_orchestration::{BindingKey, MAX_BINDINGS, SessionChange, Stamp};
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

#[derive(Clone, Copy, Debug)]
struct Binding {
    /// `None` if the session was closed, or the response deleted.
    worker: Option<(WorkerKey, DpRank)>,
    until: Instant,
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

    /// Notes a change, unless a newer one is known. Returns whether it was noted. `is_placed`: whether the
    /// request path has it, or gets it now.
    pub fn note(&mut self, (change, worker): NamedSession, is_placed: bool, now: Instant) -> bool {
        let change = change.bounded();
        let table = match change.key {
            BindingKey::Session(..) => &mut self.sessions,
            BindingKey::Response(_) => &mut self.responses,
        };
        if table.get(&change.key).is_some_and(|known| known.until > now && known.stamp >= change.stamp) {
            return false;
        }
        let binding = Binding { worker, until: now + change.ttl, stamp: change.stamp, is_placed };
        table.insert(change.key, binding);
        limit(table, self.own, now);
        true
    }

    /// Returns the bindings whose workers were unknown and are registered now.
    pub fn place(
        &mut self,
        find: impl Fn(WorkerKey) -> Option<WorkerId>,
        now: Instant,
    ) -> Vec<SessionChange> {
        let mut placed = Vec::new();
        let waiting = self.sessions.iter_mut().chain(&mut self.responses);
        for (key, binding) in waiting.filter(|(_, binding)| !binding.is_placed && binding.until > now) {
            let candidate = binding.worker.and_then(|(worker, rank)| Some((find(worker)?, rank)));
            if candidate.is_some() {
                binding.is_placed = true;
                placed.push(SessionChange { candidate, ..binding.change(*key, now) });
            }
        }
        placed
    }

    /// Returns the bindings that hold: those of one writer, or all.
    #[must_use]
    pub fn held(&self, writer: Option<u64>, now: Instant) -> Vec<NamedSession> {
        let all = self.sessions.iter().chain(&self.responses);
        all.filter(|(_, binding)| binding.until > now)
            .filter(|(_, binding)| writer.is_none_or(|writer| writer == binding.stamp.writer))
            .map(|(key, binding)| (binding.change(*key, now), binding.worker))
            .collect()
    }
}

impl Binding {
    /// Returns the change that made it, with the time that it still holds.
    fn change(&self, key: BindingKey, now: Instant) -> SessionChange {
        let ttl = self.until.saturating_duration_since(now);
        SessionChange { key, candidate: None, ttl, stamp: self.stamp }
    }
}

/// When there are too many, evicts a quarter: those of other gateways, which keep them too, before own ones,
/// and of each those that expire first.
fn limit(table: &mut Table, own: u64, now: Instant) {
    if table.len() > MAX_BINDINGS {
        let worth = |binding: &Binding| (binding.until > now && binding.stamp.writer == own, binding.until);
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
