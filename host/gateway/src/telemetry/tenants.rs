//! Number of current requests of each tenant, for the fact `tenant-active-requests`.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// Number of parts that have separate locks.
const SHARDS: usize = 16;

/// Number of requests by the hash of their tenant. A tenant without a request has no entry, so the number of
/// requests in flight limits the table.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    shards: [Mutex<HashMap<u64, u32>>; SHARDS],
}

/// One request of a tenant. Dropping it ends its count.
#[derive(Debug)]
pub(crate) struct TenantRequest {
    tenants: Arc<Tenants>,
    tenant: u64,
}

impl Tenants {
    /// Counts a request of the tenant until the returned value is dropped.
    pub(crate) fn enter(self: &Arc<Self>, tenant: u64) -> TenantRequest {
        *self.shard(tenant).lock().entry(tenant).or_default() += 1;
        TenantRequest { tenants: self.clone(), tenant }
    }

    /// Returns the number of current requests of a tenant.
    #[must_use]
    pub(crate) fn active(&self, tenant: u64) -> u32 {
        self.shard(tenant).lock().get(&tenant).copied().unwrap_or(0)
    }

    #[expect(clippy::indexing_slicing, reason = "the remainder is smaller than the number of shards")]
    fn shard(&self, tenant: u64) -> &Mutex<HashMap<u64, u32>> {
        &self.shards[(tenant % SHARDS as u64) as usize]
    }
}

impl Drop for TenantRequest {
    fn drop(&mut self) {
        let mut requests = self.tenants.shard(self.tenant).lock();
        if let Some(count) = requests.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                requests.remove(&self.tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_until_it_ends_and_leaves_nothing() {
        let tenants = Arc::new(Tenants::default());
        let (first, second) = (tenants.enter(7), tenants.enter(7));
        let other = tenants.enter(7 + SHARDS as u64);
        assert_eq!((tenants.active(7), tenants.active(7 + SHARDS as u64), tenants.active(8)), (2, 1, 0));
        drop(first);
        assert_eq!(tenants.active(7), 1);
        drop((second, other));
        assert!(tenants.shards.iter().all(|shard| shard.lock().is_empty()));
    }
}
