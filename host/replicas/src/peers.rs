//! The other gateways of the fleet and their bookings: a state machine that messages and the time drive.
//!
//! Everything here is bounded, because another gateway may be wrong or hostile: the number of gateways, the
//! bookings of each, and the block hashes of all. Dropping a gateway releases all of its load.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use pointsman_workers::{DpRank, Snapshot, WorkerId, WorkerKey, name_hash};
use prefix_index::Prefix;
use tokio::time::Instant;

use crate::{
    bindings::NamedSession,
    names::is_name,
    status::{Counters, PeerStatus},
    wire::{Kind, Message, WireError},
};

mod peer;
mod placement;

use peer::Peer;
use placement::Placement;

/// Pause before a gateway is asked for a snapshot again.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of gateways that send the bindings of all: those that run longest.
const BINDING_SENDERS: usize = 2;
/// Shortest and longest lease that another gateway can ask for.
const LEASES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(300));

/// Bounds of the data that is kept about other gateways.
#[derive(Clone, Copy, Debug)]
pub struct PeerLimits {
    /// Maximum number of other gateways.
    pub peers: usize,
    /// Maximum number of bookings of one gateway.
    pub bookings: usize,
    /// Maximum number of block hashes of all gateways together.
    pub hashes: usize,
}

/// The other gateways.
#[derive(Debug)]
pub struct Peers {
    own_name: Arc<str>,
    own_incarnation: u64,
    block_size: u32,
    limits: PeerLimits,
    peers: HashMap<Arc<str>, Peer>,
    workers: Placement,
    /// Block hashes of all bookings.
    hashes: usize,
    counters: Arc<Counters>,
}

/// Effects of a message, or of the time that passed.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Another gateway asks for a snapshot.
    Asked {
        /// Whether it asks all gateways, since it is new. If not, messages of this one were lost.
        all: bool,
    },
    /// A gateway appeared.
    Joined(Arc<str>),
    /// A gateway was restarted: its bookings are gone.
    Restarted(Arc<str>),
    /// A gateway said that it stops.
    Left(Arc<str>),
    /// A gateway was silent for its lease.
    Silent(Arc<str>),
    /// A worker was sent a prompt with these blocks.
    Sent {
        /// Worker.
        worker: WorkerId,
        /// Rank.
        rank: DpRank,
        /// Blocks of the prompt.
        prefix: Prefix,
    },
    /// A session was bound or closed. The change has no candidate: the worker may be unknown here.
    Session(NamedSession),
}

/// Why a message is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The bytes are not a message.
    #[error(transparent)]
    Garbage(#[from] WireError),
    /// The subject does not end with the name of a gateway.
    #[error("subject ends with no name of a gateway")]
    Name,
    /// Another process uses the name of this gateway.
    #[error("another gateway uses the name of this one: give each its own `replicas.name`")]
    OwnName,
    /// Its sender was replaced by a newer process with the same name.
    #[error("message of a process that a newer one with the same name replaced")]
    OldProcess,
    /// Its sender and a newer process use one name.
    #[error("two gateways use this name: give each its own `replicas.name`")]
    NameOfTwo,
    /// The message was received before.
    #[error("message was received before")]
    Repeated,
    /// There are too many gateways.
    #[error("too many gateways")]
    TooMany,
}

impl Peers {
    /// Creates an empty table of the gateway with a name that began at an incarnation. `block_size`: tokens
    /// in one of its blocks.
    #[must_use]
    pub fn new(
        (own_name, own_incarnation): (Arc<str>, u64),
        block_size: u32,
        limits: PeerLimits,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            own_name,
            own_incarnation,
            block_size: block_size.max(1),
            limits,
            peers: HashMap::new(),
            workers: Placement::default(),
            hashes: 0,
            counters,
        }
    }

    /// Applies a message that `from` published.
    ///
    /// # Errors
    /// [`Refused`]; then nothing changed.
    pub fn receive(&mut self, from: &str, bytes: &[u8], now: Instant) -> Result<Vec<Effect>, Refused> {
        if !is_name(from) {
            return Err(Refused::Name);
        }
        let message = Message::decode(bytes)?;
        if from == &*self.own_name {
            // An own message of the connection before arrives as an echo.
            let is_echo = message.incarnation == self.own_incarnation;
            return Err(if is_echo { Refused::Repeated } else { Refused::OwnName });
        }
        let mut effects = Vec::new();
        let name = self.admit(from, &message, now, &mut effects)?;
        if message.kind == Kind::Bye {
            self.forget(&name);
            effects.push(Effect::Left(name));
            return Ok(effects);
        }
        if let Kind::Ask(target) = &message.kind
            && (target.is_empty() || **target == *self.own_name)
        {
            effects.push(Effect::Asked { all: target.is_empty() });
        }
        if let Some(peer) = self.peers.get_mut(&name) {
            let mut table = peer::Table {
                workers: &self.workers,
                hashes: &mut self.hashes,
                limits: self.limits,
                block_size: self.block_size,
                counters: &self.counters,
                writer: writer_of(&name),
                effects: &mut effects,
            };
            peer.apply(message, &mut table);
        }
        Ok(effects)
    }

    /// Finds or creates the sender, and checks the number of the message.
    fn admit(
        &mut self,
        from: &str,
        message: &Message,
        now: Instant,
        effects: &mut Vec<Effect>,
    ) -> Result<Arc<str>, Refused> {
        let lease = Duration::from_millis(message.lease_ms).clamp(LEASES.0, LEASES.1);
        if let Some((name, peer)) = self.peers.get_key_value(from) {
            let name = name.clone();
            if message.incarnation < peer.incarnation {
                // Late messages of a process that was restarted end soon.
                let is_late = now.saturating_duration_since(peer.since) < peer.lease;
                return Err(if is_late { Refused::OldProcess } else { Refused::NameOfTwo });
            }
            if message.incarnation > peer.incarnation {
                self.forget(&name);
                self.peers.insert(name.clone(), Peer::new(message.incarnation, now));
                effects.push(Effect::Restarted(name));
            }
        } else {
            if self.peers.len() >= self.limits.peers {
                return Err(Refused::TooMany);
            }
            let name: Arc<str> = from.into();
            self.peers.insert(name.clone(), Peer::new(message.incarnation, now));
            effects.push(Effect::Joined(name));
        }
        let (name, peer) = self.peers.get_key_value(from).ok_or(Refused::TooMany)?;
        let name = name.clone();
        if peer.is_repeated(message.sequence) {
            return Err(Refused::Repeated);
        }
        if let Some(peer) = self.peers.get_mut(from) {
            let lost = peer.advance(message.sequence);
            self.counters.lost.fetch_add(lost, Relaxed);
            (peer.heard, peer.lease) = (now, lease);
        }
        Ok(name)
    }

    /// Forgets the gateways that were silent for their lease.
    pub fn expire(&mut self, now: Instant) -> Vec<Effect> {
        let silent = |peer: &Peer| now.saturating_duration_since(peer.heard) >= peer.lease;
        let names = self.peers.iter().filter(|(_, peer)| silent(peer)).map(|(name, _)| name.clone());
        let names: Vec<Arc<str>> = names.collect();
        for name in &names {
            self.forget(name);
            self.counters.expired.fetch_add(1, Relaxed);
        }
        names.into_iter().map(Effect::Silent).collect()
    }

    /// Returns the gateways to ask for a snapshot now: they are new, or messages of them were lost.
    pub fn to_ask(&mut self, now: Instant) -> Vec<Arc<str>> {
        let due = |peer: &Peer| {
            let asked = peer.asked.is_some_and(|asked| now.saturating_duration_since(asked) < ASK_INTERVAL);
            !peer.in_sync && !asked
        };
        let due = self.peers.iter_mut().filter(|(_, peer)| due(peer));
        due.map(|(name, peer)| {
            peer.asked = Some(now);
            name.clone()
        })
        .collect()
    }

    /// Moves bookings to the workers that are registered now.
    pub fn set_workers(&mut self, snapshot: &Snapshot) {
        self.workers = Placement::of(snapshot);
        for peer in self.peers.values_mut() {
            peer.place(&self.workers);
        }
    }

    /// Returns the id here of a worker that another gateway names.
    #[must_use]
    pub fn worker_id(&self, worker: WorkerKey) -> Option<WorkerId> {
        self.workers.find(worker).map(|worker| worker.id())
    }

    /// Returns whether this gateway sends the bindings of all gateways to one that asks. Gateways of the
    /// version that sends its own ones only do not tell their clocks.
    #[must_use]
    pub(crate) fn sends_all_bindings(&self) -> bool {
        let own = (self.own_incarnation, &*self.own_name);
        let is_before = |name: &str, peer: &Peer| (peer.incarnation, name) < own;
        let senders = self.peers.iter().filter(|(_, peer)| peer.clock_ahead_ms.is_some());
        senders.filter(|(name, peer)| is_before(name, peer)).count() < BINDING_SENDERS
    }

    /// Describes the gateways, sorted by name.
    #[must_use]
    pub fn status(&self, now: Instant) -> Vec<PeerStatus> {
        let mut peers: Vec<PeerStatus> =
            self.peers.iter().map(|(name, peer)| peer.status(name.clone(), now, self.block_size)).collect();
        peers.sort_by(|one, other| one.name.cmp(&other.name));
        peers
    }

    /// Forgets a gateway with its load.
    fn forget(&mut self, name: &str) {
        if let Some(peer) = self.peers.remove(name) {
            self.hashes = self.hashes.saturating_sub(peer.hashes());
        }
    }
}

/// Returns a gateway as the writer of bindings.
pub(crate) fn writer_of(name: &str) -> u64 {
    name_hash(name.as_bytes(), 0)
}

#[cfg(test)]
mod tests;
