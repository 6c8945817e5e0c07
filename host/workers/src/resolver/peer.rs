//! Open connections follow the names that they were opened for.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use super::{FORGOTTEN, Name, Resolver};

/// How often a name is looked up while connections to its addresses are used.
pub(super) const FOLLOW_INTERVAL: Duration = Duration::from_secs(10);

/// The name that a connection was opened for, and the address of its peer.
#[derive(Debug)]
pub struct Peer {
    resolver: Resolver,
    name: Arc<str>,
    address: IpAddr,
    generation: Arc<AtomicU64>,
    /// Generation in which the peer was last found current; [`FORGOTTEN`] before.
    checked: AtomicU64,
}

impl Resolver {
    /// Returns what a connection to `peer` that was opened for `authority` needs to follow the name; `None`
    /// if the authority has an IP address.
    #[must_use]
    pub fn peer(&self, authority: &str, peer: SocketAddr) -> Option<Peer> {
        let (host, _) = authority.rsplit_once(':')?;
        let names = self.0.names.lock();
        let (name, known) = names.known.get_key_value(host)?;
        Some(Peer {
            resolver: self.clone(),
            name: name.clone(),
            address: peer.ip(),
            generation: known.generation.clone(),
            checked: AtomicU64::new(FORGOTTEN),
        })
    }

    /// Returns whether look-ups of `name` had the address a short time ago, or the name is not known.
    pub(crate) fn has(&self, name: &str, address: IpAddr) -> bool {
        let names = self.0.names.lock();
        let has = |known: &Name| {
            known.missing.contains_key(&address) || known.addresses.iter().any(|one| one.ip() == address)
        };
        names.known.get(name).is_none_or(|known| known.addresses.is_empty() || has(known))
    }

    /// Starts a look-up of a name that connections were opened for, if the last one is not recent.
    pub(crate) fn follow(&self, name: &str) {
        let looked_up = self.0.names.lock().known.get(name).and_then(|known| known.looked_up);
        if looked_up.is_some_and(|at| at.elapsed() >= FOLLOW_INTERVAL) {
            self.last_addresses(name);
        }
    }
}

impl Peer {
    /// Returns whether the connection may be used further: its name still has the address of its peer. Takes
    /// a lock only when the name lost addresses or was forgotten.
    #[must_use]
    pub fn is_current(&self) -> bool {
        let generation = self.generation.load(Ordering::Acquire);
        if generation != FORGOTTEN && self.checked.load(Ordering::Relaxed) == generation {
            return true;
        }
        let is_current = self.resolver.has(&self.name, self.address);
        if is_current {
            self.checked.store(generation, Ordering::Relaxed);
        }
        is_current
    }

    /// Starts a look-up of the name, if the last one is not recent.
    pub(crate) fn follow(&self) {
        self.resolver.follow(&self.name);
    }
}
