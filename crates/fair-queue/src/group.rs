//! Counters of the tenants of a group, while requests of it wait.

use std::collections::HashMap;

/// Weight of the last admission in the average cost.
const AVERAGE_WEIGHT: f64 = 1.0 / 16.0;
/// Largest number of tenants of a group that are counted separately. Further ones share one counter.
const MAX_TENANTS: usize = 1_024;
/// The tenant that those share.
const OTHER_TENANTS: u64 = u64::MAX;

#[derive(Debug, Default)]
pub(crate) struct Group {
    /// Tells this time of waiting from earlier ones.
    pub(crate) period: u64,
    pub(crate) waiting: usize,
    virtual_time: f64,
    /// Moving average of the costs of admissions; 0 before the first.
    average_cost: f64,
    tenants: HashMap<u64, Tenant>,
}

#[derive(Clone, Copy, Debug)]
struct Tenant {
    counter: f64,
    weight: f64,
    waiting: usize,
}

impl Group {
    pub(crate) fn new(period: u64) -> Self {
        Self { period, ..Self::default() }
    }

    /// Returns the tenant under which one is counted.
    pub(crate) fn known(&mut self, tenant: u64) -> u64 {
        if self.tenants.contains_key(&tenant) || self.tenants.len() < MAX_TENANTS {
            return tenant;
        }
        // A tenant whose counter the virtual time has passed would begin again at that time anyway.
        let now = self.virtual_time;
        self.tenants.retain(|_, tenant| tenant.waiting > 0 || tenant.counter > now);
        if self.tenants.len() < MAX_TENANTS { tenant } else { OTHER_TENANTS }
    }

    /// Counts a request that begins to wait.
    pub(crate) fn enter(&mut self, tenant: u64, weight: f64, credit: f64) {
        self.waiting += 1;
        if let Some(known) = self.tenants.get_mut(&tenant).filter(|known| known.waiting > 0) {
            known.waiting += 1;
            // The owner may have changed it.
            known.weight = weight;
            return;
        }
        let begin = self.begin();
        let credit = credit * self.average_cost / weight;
        let entry = self.tenants.entry(tenant).or_insert(Tenant { counter: begin, weight, waiting: 0 });
        entry.counter = entry.counter.max(begin - credit);
        entry.weight = weight;
        entry.waiting = 1;
    }

    /// Counter with which a new tenant begins.
    fn begin(&self) -> f64 {
        let waiting = || self.tenants.values().filter(|tenant| tenant.waiting > 0);
        let least = waiting().map(|tenant| tenant.counter).fold(f64::INFINITY, f64::min);
        let most = waiting().map(|tenant| tenant.counter).fold(f64::NEG_INFINITY, f64::max);
        if least <= most { self.virtual_time.clamp(least, most) } else { self.virtual_time }
    }

    /// Counts a request that no longer waits.
    pub(crate) fn leave(&mut self, tenant: u64, check: fn(bool)) {
        check(self.waiting > 0);
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            check(entry.waiting > 0);
            entry.waiting = entry.waiting.saturating_sub(1);
        }
    }

    /// Changes a tenant's weight.
    pub(crate) fn reweigh(&mut self, tenant: u64, weight: f64) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.weight = weight;
        }
    }

    /// Charges a tenant for an admission.
    pub(crate) fn admit(&mut self, tenant: u64, cost: f64) {
        let weight = if self.average_cost > 0.0 { AVERAGE_WEIGHT } else { 1.0 };
        self.average_cost += (cost - self.average_cost) * weight;
        self.charge(tenant, cost);
    }

    pub(crate) fn charge(&mut self, tenant: u64, cost: f64) {
        let of_all: f64 = self.tenants.values().filter(|one| one.waiting > 0).map(|one| one.weight).sum();
        let Some(entry) = self.tenants.get_mut(&tenant) else { return };
        entry.counter += cost / entry.weight;
        self.virtual_time += cost / if of_all > 0.0 { of_all } else { entry.weight };
    }

    /// How far a tenant's counter is ahead of the virtual time.
    pub(crate) fn ahead(&self, tenant: u64) -> f64 {
        self.tenants.get(&tenant).map_or(0.0, |tenant| tenant.counter - self.virtual_time)
    }

    /// Counter of a tenant when requests of this cost, which it has waiting, were served.
    pub(crate) fn start(&self, tenant: u64, queued: f64) -> f64 {
        match self.tenants.get(&tenant) {
            Some(known) if known.waiting > 0 => known.counter + queued / known.weight,
            Some(known) => known.counter.max(self.begin()),
            None => self.begin(),
        }
    }

    /// Weight of a tenant that is counted.
    pub(crate) fn weight(&self, tenant: u64) -> f64 {
        self.tenants.get(&tenant).map_or(1.0, |tenant| tenant.weight)
    }

    /// Number of tenants that are counted.
    pub(crate) fn tenants(&self) -> usize {
        self.tenants.len()
    }
}
