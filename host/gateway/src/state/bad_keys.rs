//! Wrong keys by address. After a few wrong keys from an address, the answer to each further one is delayed.
//! A right key is never delayed, so clients behind one address cannot lock each other out.

use std::{collections::HashMap, net::IpAddr, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::network::network;

/// Wrong keys of an address that are answered at once, within [`WINDOW`].
const FREE_TRIES: u32 = 10;
/// How long a wrong key counts.
const WINDOW: Duration = Duration::from_secs(60);
/// How long the answer to a further wrong key is delayed.
pub(crate) const DELAY: Duration = Duration::from_secs(1);
/// Maximum number of remembered addresses. A new one evicts the address whose window ends first.
const MAX_ADDRESSES: usize = 4_096;

/// The addresses that sent wrong keys.
#[derive(Debug, Default)]
pub(crate) struct BadKeys(Mutex<HashMap<IpAddr, Tries>>);

#[derive(Clone, Copy, Debug)]
struct Tries {
    count: u32,
    since: Instant,
}

impl BadKeys {
    /// Counts a wrong key. Returns whether its answer has to be delayed.
    pub(crate) fn note(&self, address: IpAddr) -> bool {
        let (address, now) = (network(address), Instant::now());
        let mut tries = self.0.lock();
        if tries.len() >= MAX_ADDRESSES && !tries.contains_key(&address) {
            let oldest = tries.iter().min_by_key(|(_, tries)| tries.since).map(|(address, _)| *address);
            oldest.map(|address| tries.remove(&address));
        }
        let entry = tries.entry(address).or_insert(Tries { count: 0, since: now });
        if now.duration_since(entry.since) >= WINDOW {
            *entry = Tries { count: 0, since: now };
        }
        entry.count = entry.count.saturating_add(1);
        entry.count > FREE_TRIES
    }

    /// Returns whether the answer to a wrong key of this address would be delayed.
    #[must_use]
    pub(crate) fn is_slowed(&self, address: IpAddr) -> bool {
        let tries = self.0.lock();
        let tries = tries.get(&network(address));
        tries.is_some_and(|tries| tries.count > FREE_TRIES && tries.since.elapsed() < WINDOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_address_is_slowed_down_alone_and_for_a_minute() {
        let keys = BadKeys::default();
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        assert_eq!((0..12).filter(|_| keys.note(one)).count(), 2);
        assert!(!keys.note(other) && keys.note(one));
        tokio::time::advance(WINDOW).await;
        assert!(!keys.note(one));
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_of_one_ipv6_network_count_together_and_the_table_is_bounded() {
        let keys = BadKeys::default();
        let v6 = |host: u16| IpAddr::from([0x2001, 0xdb8, 0, 1, 0, 0, 0, host]);
        assert_eq!((0..12).filter(|host| keys.note(v6(*host))).count(), 2);
        for number in 0..6_000_u32 {
            keys.note(IpAddr::from(number.to_be_bytes()));
        }
        assert_eq!(keys.0.lock().len(), MAX_ADDRESSES);
    }
}
