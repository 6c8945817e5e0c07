//! Session affinity [F8], stored responses and media [I12]: the worker that each leg of a session is bound
//! to, the worker that stored a response, and the one that got a medium, for a limited time.
//!
//! The first successful dispatch of a leg binds it. When the bound worker is no longer eligible, the request
//! is routed again, and the new dispatch replaces the binding. A request holds the legs that it routes: while
//! it runs, they stay bound, and what it dispatches counts only if they did not change since it was routed.
//!
//! Gateways of a fleet may send each other their bindings. The last writer wins: a binding has a [`Stamp`],
//! and a change with an older one does not replace it. Each gateway promises the others until when it needs
//! a binding, and only a dispatch makes a new stamp: the end of a request changes no more than its gateway's
//! promise. Where media are is not sent: a client may name many.

use std::{collections::HashMap, hash::Hash};

use eviction::limit;
use parking_lot::Mutex;
use pointsman_routing::CandidateId;
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

mod eviction;
mod promises;
mod shared;
#[cfg(test)]
mod tests;

pub use promises::{Promise, Promises, Stamp};
use shared::Sharing;
pub use shared::{CLOSED_FOR, SessionChange};

/// Maximum number of bindings of sessions, of those of responses, and of those of media. Above it, a
/// quarter is evicted, from the tenants with most of them: those that no request holds before the others,
/// and of each those that expire first.
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

#[derive(Clone, Debug)]
struct Binding {
    /// `None` if the session was closed, or the response deleted. Such an entry keeps an older binding of
    /// another gateway away. Also `None` while the first request of a session waits for its worker.
    candidate: Option<CandidateId>,
    /// Tenant that has it; 0: none, or it is not known.
    owner: u64,
    /// Until when requests of this gateway keep it.
    until: Instant,
    /// Until when requests of other gateways keep it.
    others: Promises,
    /// What the other gateways were told about [`Self::until`].
    told: Option<Promise>,
    stamp: Stamp,
    /// Number of requests that hold it.
    holders: u32,
    /// Grows when the session is bound to another worker, and when it is closed.
    version: u32,
    /// How often the session was closed.
    closes: u32,
}

impl Binding {
    fn new(candidate: Option<CandidateId>, until: Instant) -> Self {
        let (others, told, stamp) = (Promises::default(), None, Stamp::default());
        Self { candidate, owner: 0, until, others, told, stamp, holders: 0, version: 0, closes: 0 }
    }

    /// Returns when it expires.
    fn end(&self) -> Instant {
        self.others.end().map_or(self.until, |end| end.max(self.until))
    }

    /// Binds it again, or closes it. Promises about another worker end.
    fn change(&mut self, candidate: Option<CandidateId>, until: Instant, stamp: Stamp) {
        if candidate.is_none() || candidate != self.candidate {
            (self.others, self.told) = (Promises::default(), None);
            self.version = self.version.wrapping_add(1);
        }
        self.closes = self.closes.wrapping_add(candidate.is_none().into());
        (self.candidate, self.until, self.stamp) = (candidate, until, stamp);
    }
}

/// The legs of its session that a request holds.
#[derive(Debug, Default)]
pub struct SessionHolds {
    /// Tenant of the request, 0 for none.
    pub owner: u64,
    aggregated: Option<Held>,
    prefill: Option<Held>,
    decode: Option<Held>,
}

/// A leg that a request holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    /// The version that it had when the request routed it last.
    version: u32,
    /// How often the session was closed when the request routed it first.
    closes: u32,
}

impl SessionHolds {
    fn of(&mut self, leg: Leg) -> &mut Option<Held> {
        match leg {
            Leg::Aggregated => &mut self.aggregated,
            Leg::Prefill => &mut self.prefill,
            Leg::Decode => &mut self.decode,
        }
    }
}

impl Sessions {
    /// Returns the worker that a session's leg is bound to.
    #[must_use]
    pub fn get(&self, session: u64, leg: Leg) -> Option<CandidateId> {
        self.find(BindingKey::Session(session, leg))
    }

    /// Holds a session's leg for a request that is about to route it, also again. It does not expire until
    /// [`Self::release`], or until `end`.
    pub fn hold(&self, session: u64, leg: Leg, holds: &mut SessionHolds, end: Instant) {
        let (now, key) = (Instant::now(), BindingKey::Session(session, leg));
        let mut bound = self.sessions.lock();
        let binding = bound.entry(key).or_insert_with(|| Binding::new(None, end));
        if binding.end() <= now {
            (binding.candidate, binding.version) = (None, binding.version.wrapping_add(1));
        }
        binding.until = binding.until.max(end);
        binding.owner = holds.owner;
        let held = holds.of(leg);
        binding.holders += u32::from(held.is_none());
        let closes = held.map_or(binding.closes, |held| held.closes);
        *held = Some(Held { version: binding.version, closes });
        limit(&mut bound, now);
    }

    /// Binds a session's leg that a request holds to the worker of its dispatch, until `end`. A leg that
    /// another request bound since this one was routed stays bound, and a session that was closed stays so.
    pub fn bind(
        &self,
        session: u64,
        leg: Leg,
        holds: &mut SessionHolds,
        candidate: CandidateId,
        end: Instant,
    ) {
        let key = BindingKey::Session(session, leg);
        let mut bound = self.sessions.lock();
        let mut has = |leg: Leg, changed: fn(&Binding, Held) -> bool| {
            let known = || bound.get(&BindingKey::Session(session, leg));
            holds.of(leg).is_some_and(|held| known().is_some_and(|known| changed(known, held)))
        };
        let was_closed = LEGS.into_iter().any(|leg| has(leg, |known, held| known.closes != held.closes));
        let is_bound_since = has(leg, |known, held| known.version != held.version);
        let stays = bound.get(&key).is_some_and(|known| known.candidate == Some(candidate));
        if was_closed || is_bound_since && !stays {
            return;
        }
        // Another request may need it for longer.
        let until = bound.get(&key).map_or(end, |known| known.until.max(end));
        let change = self.set(&mut bound, (key, holds.owner), Some(candidate), until);
        drop(bound);
        self.tell(change);
    }

    /// Releases the legs that a request holds. Those that no other one holds expire after `ttl`.
    pub fn release(&self, session: u64, holds: &mut SessionHolds, ttl: Duration) {
        let held = LEGS.map(|leg| holds.of(leg).take().map(|_| BindingKey::Session(session, leg)));
        if held.iter().all(Option::is_none) {
            return;
        }
        let mut bound = self.sessions.lock();
        let changes = held.map(|key| release_leg(&mut bound, key?, ttl));
        drop(bound);
        changes.into_iter().flatten().for_each(|change| self.tell(change));
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

    /// Notes that a worker stored a response of a tenant, 0 for none.
    pub fn stored(&self, response: u64, owner: u64, candidate: CandidateId) {
        self.put(BindingKey::Response(response), owner, Some(candidate), RESPONSE_TTL);
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

    /// Notes that a worker got media of a tenant, 0 for none, for a leg.
    pub fn holds(&self, media: &[u64], owner: u64, leg: Leg, candidate: CandidateId) {
        let now = Instant::now();
        let binding = || Binding { owner, ..Binding::new(Some(candidate), now + MEDIA_TTL) };
        let mut bound = self.media.lock();
        bound.extend(media.iter().map(|medium| ((*medium, leg), binding())));
        limit(&mut bound, now);
    }

    /// Number of bindings of sessions. An expired one counts until it is evicted or replaced, and so does one
    /// that is only held.
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
    fn put(&self, key: BindingKey, owner: u64, candidate: Option<CandidateId>, ttl: Duration) {
        let change = self.set(&mut self.table(key).lock(), (key, owner), candidate, Instant::now() + ttl);
        self.tell(change);
    }

    fn set(
        &self,
        bound: &mut Bindings,
        (key, owner): (BindingKey, u64),
        candidate: Option<CandidateId>,
        until: Instant,
    ) -> SessionChange {
        let now = Instant::now();
        let binding = bound.entry(key).or_insert_with(|| Binding::new(None, until));
        let stamp = self.sharing.as_ref().map(|sharing| sharing.stamp(binding.stamp)).unwrap_or_default();
        binding.change(candidate, until, stamp);
        if owner != 0 {
            binding.owner = owner;
        }
        // A promise of this gateway is here only if it was made before a restart.
        binding.others.forget(stamp.writer);
        binding.told = candidate.map(|_| Promise { stamp, until });
        limit(bound, now);
        SessionChange { key, candidate, ttl: until.saturating_duration_since(now), stamp }
    }

    fn tell(&self, change: SessionChange) {
        if let Some(sharing) = &self.sharing {
            sharing.queue_change(change);
        }
    }

    fn end(&self, key: BindingKey) {
        if self.sharing.is_some() {
            return self.put(key, 0, None, shared::CLOSED_FOR);
        }
        let mut bound = self.table(key).lock();
        match bound.get_mut(&key) {
            // Those that hold it must see that it was closed.
            Some(known) if known.holders > 0 => {
                known.change(None, known.until, known.stamp);
            }
            _ => {
                bound.remove(&key);
            }
        }
    }
}

/// Releases a leg for one request. Returns what the other gateways must learn: they keep the time that they
/// were told unless it changed by more than a quarter of `ttl`, so that refused requests send nothing.
fn release_leg(bound: &mut Bindings, key: BindingKey, ttl: Duration) -> Option<SessionChange> {
    let (now, binding) = (Instant::now(), bound.get_mut(&key)?);
    binding.holders = binding.holders.saturating_sub(1);
    if binding.holders > 0 {
        return None;
    }
    if binding.candidate.is_none() {
        // Only the end of a session has a stamp.
        if binding.stamp == Stamp::default() {
            bound.remove(&key);
        } else {
            binding.until = now + shared::CLOSED_FOR;
        }
        return None;
    }
    let until = now + ttl;
    binding.until = until;
    let told = binding.told.as_mut()?;
    let (longer, shorter) =
        (until.checked_duration_since(told.until), told.until.checked_duration_since(until));
    if longer.or(shorter).is_none_or(|moved| moved <= ttl / 4) {
        return None;
    }
    told.until = until;
    Some(SessionChange { key, candidate: binding.candidate, ttl, stamp: told.stamp })
}

fn find<K: Eq + Hash>(table: &Mutex<Bindings<K>>, key: K) -> Option<CandidateId> {
    table.lock().get(&key).filter(|binding| binding.end() > Instant::now())?.candidate
}
