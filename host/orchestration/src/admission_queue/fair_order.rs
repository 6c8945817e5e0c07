//! The order in which waiting requests are admitted: bands of priority, then tenants by weighted tokens (L3).
//!
//! Each tenant has a counter for each model: the weighted tokens that it was served since requests of the
//! model began to wait, divided by its weight. Among the tenants of a band, the one with the smallest counter
//! is next. This is the virtual token counter of "Fairness in Serving Large Language Models" (OSDI 2024) with
//! the virtual time of weighted fair queueing. A new tenant begins at the virtual time, so new names cannot
//! hold back a tenant that waits. A tenant that comes back begins a little behind that time if it was served
//! so much less. Its next requests then pass those of a tenant that takes more than its share, instead of
//! alternating with them.
//!
//! ```text
//! admission:  counter += cost / weight       virtual time += cost / sum of the weights that wait
//! end:        both += (real cost - estimated cost) / the same
//! arrival:    begin = virtual time, within the counters that wait
//!             counter = begin                of a new tenant
//!             counter = max(counter, begin - CREDIT * average cost / weight)
//! ```

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
};

use pointsman_workers::{Invariant, ModelName};

use super::rules::LineId;

/// One in this many admissions goes to the band of the request that waits longest.
const AGEING_TURN: u64 = 4;
/// Largest head start of a tenant that was idle, in requests of average cost. With less than two, the oldest
/// request of another tenant still goes first when the counters are equal.
const CREDIT: f64 = 2.0;
/// Weight of the last admission in the average cost.
const AVERAGE_WEIGHT: f64 = 1.0 / 16.0;
/// Largest number of tenants of a model that are counted separately while requests wait. Further ones share
/// one counter.
const MAX_TENANTS: usize = 1_024;
/// The tenant that those share.
const OTHER_TENANTS: u64 = u64::MAX;
/// The tenant of requests without one.
const NO_TENANT: u64 = u64::MAX - 1;

/// Place of a request among those of its tenant. Smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) priority: Reverse<i64>,
    pub(super) due_us: i64,
    pub(super) ticket: u64,
}

/// A request in the order.
#[derive(Clone, Debug)]
pub(super) struct Position {
    pub(super) line: LineId,
    pub(super) tenant: u64,
    pub(super) key: Key,
}

/// A charge that its request's end corrects.
#[derive(Clone, Debug)]
pub(super) struct Charge {
    model: ModelName,
    tenant: u64,
    period: u64,
    cost: f64,
}

/// All waiting requests.
#[derive(Debug)]
pub(super) struct FairOrder<T> {
    lines: BTreeMap<LineId, Line<T>>,
    models: HashMap<ModelName, Model>,
    waiting: usize,
    admitted: u64,
    periods: u64,
}

/// Requests of one line.
#[derive(Debug)]
struct Line<T> {
    tenants: BTreeMap<u64, BTreeMap<Key, T>>,
    /// The same requests in the order of their arrival.
    by_age: BTreeMap<u64, (u64, Key)>,
}

/// Counters of a model while requests of it wait.
#[derive(Debug, Default)]
struct Model {
    period: u64,
    virtual_time: f64,
    /// Moving average of the costs of admissions; 0 before the first.
    average_cost: f64,
    tenants: HashMap<u64, Tenant>,
    waiting: usize,
}

#[derive(Clone, Copy, Debug)]
struct Tenant {
    counter: f64,
    weight: f64,
    waiting: usize,
}

impl<T> Default for FairOrder<T> {
    fn default() -> Self {
        Self { lines: BTreeMap::new(), models: HashMap::new(), waiting: 0, admitted: 0, periods: 0 }
    }
}

impl Model {
    /// Returns the tenant under which a hash is counted.
    fn known(&mut self, tenant: u64) -> u64 {
        if self.tenants.contains_key(&tenant) || self.tenants.len() < MAX_TENANTS {
            return tenant;
        }
        // A tenant whose counter the virtual time has passed would begin again at that time anyway.
        let now = self.virtual_time;
        self.tenants.retain(|_, tenant| tenant.waiting > 0 || tenant.counter > now);
        if self.tenants.len() < MAX_TENANTS { tenant } else { OTHER_TENANTS }
    }

    fn enter(&mut self, tenant: u64, weight: f64) {
        self.waiting += 1;
        if let Some(known) = self.tenants.get_mut(&tenant).filter(|known| known.waiting > 0) {
            known.waiting += 1;
            // A reload may have changed it.
            known.weight = weight;
            return;
        }
        let waiting = || self.tenants.values().filter(|tenant| tenant.waiting > 0);
        let least = waiting().map(|tenant| tenant.counter).fold(f64::INFINITY, f64::min);
        let most = waiting().map(|tenant| tenant.counter).fold(f64::NEG_INFINITY, f64::max);
        let begin = if least <= most { self.virtual_time.clamp(least, most) } else { self.virtual_time };
        let credit = CREDIT * self.average_cost / weight;
        let entry = self.tenants.entry(tenant).or_insert(Tenant { counter: begin, weight, waiting: 0 });
        entry.counter = entry.counter.max(begin - credit);
        entry.weight = weight;
        entry.waiting = 1;
    }

    fn leave(&mut self, tenant: u64) {
        Invariant::WaitingRequests.check(self.waiting > 0);
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            Invariant::WaitingRequests.check(entry.waiting > 0);
            entry.waiting = entry.waiting.saturating_sub(1);
        }
    }

    fn admit(&mut self, tenant: u64, cost: f64) {
        let weight = if self.average_cost > 0.0 { AVERAGE_WEIGHT } else { 1.0 };
        self.average_cost += (cost - self.average_cost) * weight;
        self.charge(tenant, cost);
    }

    fn charge(&mut self, tenant: u64, cost: f64) {
        let of_all: f64 = self.tenants.values().filter(|one| one.waiting > 0).map(|one| one.weight).sum();
        let Some(entry) = self.tenants.get_mut(&tenant) else { return };
        entry.counter += cost / entry.weight;
        self.virtual_time += cost / if of_all > 0.0 { of_all } else { entry.weight };
    }
}

impl<T: Clone> FairOrder<T> {
    /// Number of requests.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Number of requests of a model.
    pub(super) fn of_model(&self, model: &ModelName) -> usize {
        self.models.get(model).map_or(0, |model| model.waiting)
    }

    /// Returns whether requests wait in a line.
    pub(super) fn has(&self, line: &LineId) -> bool {
        self.lines.contains_key(line)
    }

    /// Adds a request. `weight` is the weight of its tenant.
    pub(super) fn insert(
        &mut self,
        line: LineId,
        tenant: Option<u64>,
        weight: f64,
        key: Key,
        value: T,
    ) -> Position {
        if !self.models.contains_key(&line.model) {
            self.periods += 1;
            let model = Model { period: self.periods, ..Model::default() };
            self.models.insert(line.model.clone(), model);
        }
        let mut tenant = tenant.unwrap_or(NO_TENANT);
        if let Some(model) = self.models.get_mut(&line.model) {
            tenant = model.known(tenant);
            model.enter(tenant, weight);
        }
        let empty = || Line { tenants: BTreeMap::new(), by_age: BTreeMap::new() };
        let requests = self.lines.entry(line.clone()).or_insert_with(empty);
        requests.tenants.entry(tenant).or_default().insert(key, value);
        requests.by_age.insert(key.ticket, (tenant, key));
        self.waiting += 1;
        Position { line, tenant, key }
    }

    /// Removes a request.
    pub(super) fn remove(&mut self, position: &Position) {
        let Position { line, tenant, key } = position;
        let Some(requests) = self.lines.get_mut(line) else { return };
        if requests.by_age.remove(&key.ticket).is_none() {
            return;
        }
        if let Some(own) = requests.tenants.get_mut(tenant) {
            own.remove(key);
            if own.is_empty() {
                requests.tenants.remove(tenant);
            }
        }
        if requests.by_age.is_empty() {
            self.lines.remove(line);
        }
        self.waiting -= 1;
        if let Some(model) = self.models.get_mut(&line.model) {
            model.leave(*tenant);
            if model.waiting == 0 {
                self.models.remove(&line.model);
            }
        }
    }

    /// Charges a waiting request's tenant for its admission; call it before [`Self::remove`].
    pub(super) fn charge(&mut self, position: &Position, weight: f64, cost: f64) -> Option<Charge> {
        self.admitted += 1;
        let model = self.models.get_mut(&position.line.model)?;
        if let Some(tenant) = model.tenants.get_mut(&position.tenant) {
            // A reload may have changed it.
            tenant.weight = weight;
        }
        model.admit(position.tenant, cost);
        let name = position.line.model.clone();
        Some(Charge { model: name, tenant: position.tenant, period: model.period, cost })
    }

    /// Charges a tenant for a request that was admitted without waiting, when others of its model wait.
    pub(super) fn charge_passing(
        &mut self,
        name: &ModelName,
        tenant: Option<u64>,
        weight: f64,
        cost: f64,
    ) -> Option<Charge> {
        let model = self.models.get_mut(name)?;
        let tenant = model.known(tenant.unwrap_or(NO_TENANT));
        model.enter(tenant, weight);
        model.admit(tenant, cost);
        model.leave(tenant);
        Some(Charge { model: name.clone(), tenant, period: model.period, cost })
    }

    /// Replaces an estimated cost by the real one.
    pub(super) fn settle(&mut self, charge: &Charge, real: f64) {
        let model = self.models.get_mut(&charge.model);
        if let Some(model) = model.filter(|model| model.period == charge.period) {
            model.charge(charge.tenant, real - charge.cost);
        }
    }

    /// Returns the request that is admitted next, of the lines that `may` be served.
    pub(super) fn next(&self, may: impl Fn(&LineId) -> bool) -> Option<(Position, T)> {
        let ageing = self.admitted % AGEING_TURN == AGEING_TURN - 1;
        let mut best: Option<(Rank, Position, T)> = None;
        for (id, line) in self.lines.iter().filter(|(id, _)| may(id)) {
            let model = self.models.get(&id.model);
            let counter = |tenant: u64| {
                let known = model.and_then(|model| Some((model.tenants.get(&tenant)?, model.virtual_time)));
                known.map_or(0.0, |(tenant, now)| tenant.counter - now)
            };
            let Some((rank, tenant, key, value)) = line.first(ageing, counter) else { continue };
            if best.as_ref().is_none_or(|(so_far, ..)| rank.is_before(so_far)) {
                best = Some((rank, Position { line: id.clone(), tenant, key }, value));
            }
        }
        best.map(|(_, position, value)| (position, value))
    }

    /// Returns whether nothing is kept of any request, for tests.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.models.is_empty() && self.waiting == 0
    }

    /// Returns the number of counters, for tests.
    #[cfg(test)]
    pub(super) fn tenants(&self) -> usize {
        self.models.values().map(|model| model.tenants.len()).sum()
    }

    /// Returns the tickets of all requests in the order in which they would be admitted, for tests.
    #[cfg(test)]
    pub(super) fn admit_all(&mut self) -> Vec<u64> {
        let mut tickets = Vec::new();
        while let Some((position, _)) = self.next(|_| true) {
            self.charge(&position, 1.0, 1.0);
            self.remove(&position);
            tickets.push(position.key.ticket);
        }
        tickets
    }
}

/// Rank of a line's next request among those of other lines.
#[derive(Clone, Copy, Debug)]
struct Rank {
    /// Age before band, in an ageing turn.
    age: Option<u64>,
    priority: Reverse<i64>,
    counter: f64,
    due_us: i64,
    ticket: u64,
}

impl Rank {
    fn is_before(&self, other: &Self) -> bool {
        let by_band = self.age.cmp(&other.age).then(self.priority.cmp(&other.priority));
        let by_counter = by_band.then(self.counter.total_cmp(&other.counter));
        by_counter.then((self.due_us, self.ticket).cmp(&(other.due_us, other.ticket))).is_lt()
    }
}

impl<T: Clone> Line<T> {
    /// Returns the line's next request, by the counters of tenants.
    fn first(&self, ageing: bool, counter: impl Fn(u64) -> f64) -> Option<(Rank, u64, Key, T)> {
        let (oldest_ticket, (oldest_tenant, oldest)) = self.by_age.first_key_value()?;
        let band = ageing.then_some(oldest.priority);
        let mut best: Option<(Rank, u64, Key)> = None;
        for (tenant, requests) in &self.tenants {
            let key = match band {
                Some(priority) => {
                    let from = Key { priority, due_us: i64::MIN, ticket: 0 };
                    requests.range(from..).next().map(|(key, _)| *key).filter(|key| key.priority == priority)
                }
                None => requests.keys().next().copied(),
            };
            let Some(key) = key else { continue };
            let Key { priority, due_us, ticket } = key;
            let age = ageing.then_some(*oldest_ticket);
            let rank = Rank { age, priority, counter: counter(*tenant), due_us, ticket };
            if best.as_ref().is_none_or(|(so_far, ..)| rank.is_before(so_far)) {
                best = Some((rank, *tenant, key));
            }
        }
        let (rank, tenant, mut key) = best?;
        if ageing && tenant == *oldest_tenant {
            key = *oldest;
        }
        let value = self.tenants.get(&tenant)?.get(&key)?.clone();
        Some((rank, tenant, key, value))
    }
}

/// Lines that found no worker since capacity was released.
pub(super) type Refused = BTreeSet<LineId>;
