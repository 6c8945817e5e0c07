//! Open connections of clients by address, so that one client cannot take all of them.

use std::{collections::HashMap, net::IpAddr, sync::Arc};

use parking_lot::Mutex;

use super::bad_keys::network;

/// Number of open connections of each address. An address without one takes no memory, so the number of open
/// connections bounds the table.
#[derive(Debug, Default)]
pub(crate) struct AddressBudget(Mutex<HashMap<IpAddr, usize>>);

/// One connection of an address. Dropping it ends the count.
#[derive(Debug)]
pub(crate) struct AddressShare {
    budget: Arc<AddressBudget>,
    network: IpAddr,
}

impl AddressBudget {
    /// Counts a connection of an address (IPv6: of a /64 network); `None` when it has `limit` already.
    #[must_use]
    pub(crate) fn reserve(self: &Arc<Self>, address: IpAddr, limit: usize) -> Option<AddressShare> {
        let network = network(address);
        let mut open = self.0.lock();
        let count = open.entry(network).or_insert(0);
        if *count >= limit {
            if *count == 0 {
                open.remove(&network);
            }
            return None;
        }
        *count += 1;
        Some(AddressShare { budget: self.clone(), network })
    }
}

impl Drop for AddressShare {
    fn drop(&mut self) {
        let mut open = self.budget.0.lock();
        if let Some(count) = open.get_mut(&self.network) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l4_an_address_has_so_many_connections_and_leaves_nothing() {
        let budget = Arc::new(AddressBudget::default());
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|text| text.parse::<IpAddr>().unwrap());
        let held: Vec<_> = (0..9).filter_map(|_| budget.reserve(one, 3)).collect();
        // L4.1
        assert!(held.len() == 3 && budget.reserve(other, 3).is_some());
        let [near, far] = ["2001:db8::1", "2001:db8::2"].map(|text| text.parse::<IpAddr>().unwrap());
        let _six = budget.reserve(near, 1).unwrap();
        assert!(budget.reserve(far, 1).is_none(), "a host has a whole /64 network");
        drop(held);
        assert_eq!(budget.0.lock().len(), 1);
        assert!(budget.reserve(one, 0).is_none() && budget.0.lock().len() == 1);
    }
}
