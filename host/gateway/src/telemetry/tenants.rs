//! Number of current requests of each tenant, for the fact `tenant-active-requests`.

use std::sync::Arc;

use crate::count_by_key::{CountByKey, Counted};

/// Number of parts that have separate locks.
const SHARDS: usize = 16;

/// Number of requests by the hash of their tenant.
#[derive(Debug, Default)]
pub(crate) struct Tenants([Arc<CountByKey<u64>>; SHARDS]);

/// One request of a tenant. Dropping it ends its count.
pub(crate) type TenantRequest = Counted<u64>;

impl Tenants {
    /// Counts a request of the tenant until the returned value is dropped.
    pub(crate) fn enter(&self, tenant: u64) -> TenantRequest {
        self.shard(tenant).enter(tenant)
    }

    /// Returns the number of current requests of a tenant.
    #[must_use]
    pub(crate) fn active(&self, tenant: u64) -> u32 {
        self.shard(tenant).count(tenant)
    }

    #[expect(clippy::indexing_slicing, reason = "the remainder is smaller than the number of shards")]
    fn shard(&self, tenant: u64) -> &Arc<CountByKey<u64>> {
        &self.0[(tenant % SHARDS as u64) as usize]
    }
}
