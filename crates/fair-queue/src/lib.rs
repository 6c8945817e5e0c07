#![doc = include_str!("../README.md")]

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    fmt::Debug,
    hash::Hash,
};

mod group;
mod room;
#[cfg(test)]
mod tests;

use group::Group;
use room::Room;
pub use room::{Need, Newcomer};

/// The tenant of requests without one.
pub const NO_TENANT: u64 = u64::MAX - 1;

/// Requests that the same servers may serve.
pub trait Line: Clone + Ord {
    /// What the tenants of several lines share.
    type Group: Clone + Eq + Hash + Debug;

    /// Returns the group of the line.
    fn group(&self) -> &Self::Group;
}

impl Line for () {
    type Group = ();

    fn group(&self) -> &() {
        self
    }
}

/// What differs between queues.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// One in this many admissions goes to the priority of the request that waits longest; 0: none does.
    pub ageing_turn: u64,
    /// Largest head start of a tenant that was idle, in requests of average cost. With less than two, the
    /// oldest request of another tenant still goes first when the counters are equal.
    pub credit: f64,
    /// Called with whether a count is above zero before it is decreased. It always is, unless this crate is
    /// wrong.
    pub check: fn(bool),
}

/// Place of a request among those of its tenant. Smallest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Priority; a larger one goes first, whatever the tenant was served.
    pub priority: Reverse<i64>,
    /// When the request is due, in any unit.
    pub due_us: i64,
    /// Number of the request in the order of arrival; no two requests of a queue have the same.
    pub ticket: u64,
    /// When the request becomes late, in the unit of `due_us`; `i64::MAX`: never.
    pub deadline_us: i64,
}

/// A request in the queue.
#[derive(Clone, Debug)]
pub struct Position<L> {
    /// Its line.
    pub line: L,
    /// The tenant under which it is counted.
    pub tenant: u64,
    /// Its place among those of the tenant.
    pub key: Key,
}

/// A charge that its request's end may correct.
#[derive(Clone, Debug)]
pub struct Charge<G> {
    group: G,
    tenant: u64,
    period: u64,
    cost: f64,
}

/// All waiting requests.
#[derive(Debug)]
pub struct FairQueue<L: Line, T> {
    rules: Rules,
    lines: BTreeMap<L, Requests<T>>,
    groups: HashMap<L::Group, Group>,
    /// The requests that may lose their places, by group.
    rooms: HashMap<L::Group, Room<L>>,
    waiting: usize,
    admitted: u64,
    periods: u64,
}

/// Requests of one line.
#[derive(Debug)]
struct Requests<T> {
    tenants: BTreeMap<u64, BTreeMap<Key, T>>,
    /// The same requests in the order of their arrival.
    by_age: BTreeMap<u64, (u64, Key)>,
}

impl Key {
    /// Returns the place of a request that waits for its turn: without priority or deadline, after those that
    /// came before.
    #[must_use]
    pub fn in_turn(ticket: u64) -> Self {
        Self { priority: Reverse(0), due_us: 0, ticket, deadline_us: i64::MAX }
    }
}

impl<L: Line, T> FairQueue<L, T> {
    /// Returns an empty queue.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        let (lines, groups, rooms) = (BTreeMap::new(), HashMap::new(), HashMap::new());
        Self { rules, lines, groups, rooms, waiting: 0, admitted: 0, periods: 0 }
    }

    /// Number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting
    }

    /// Whether nothing is kept of any request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.groups.is_empty() && self.rooms.is_empty() && self.waiting == 0
    }

    /// Number of requests of a group.
    #[must_use]
    pub fn of_group(&self, group: &L::Group) -> usize {
        self.groups.get(group).map_or(0, |group| group.waiting)
    }

    /// Number of tenants that are counted.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.groups.values().map(Group::tenants).sum()
    }

    /// Whether requests wait in a line.
    #[must_use]
    pub fn has(&self, line: &L) -> bool {
        self.lines.contains_key(line)
    }

    /// Adds a request. `weight` is that of its tenant, above 0.
    pub fn insert(&mut self, line: L, tenant: u64, weight: f64, key: Key, value: T) -> Position<L> {
        let name = line.group();
        if !self.groups.contains_key(name) {
            self.periods += 1;
            self.groups.insert(name.clone(), Group::new(self.periods));
        }
        let mut tenant = tenant;
        if let Some(group) = self.groups.get_mut(name) {
            tenant = group.known(tenant);
            group.enter(tenant, weight, self.rules.credit);
            if let Some(room) = self.rooms.get_mut(name) {
                room.list(tenant, group);
            }
        }
        let empty = || Requests { tenants: BTreeMap::new(), by_age: BTreeMap::new() };
        let requests = self.lines.entry(line.clone()).or_insert_with(empty);
        requests.tenants.entry(tenant).or_default().insert(key, value);
        requests.by_age.insert(key.ticket, (tenant, key));
        self.waiting += 1;
        Position { line, tenant, key }
    }

    /// Removes and returns a request; `None` if it was removed before.
    pub fn remove(&mut self, position: &Position<L>) -> Option<T> {
        let Position { line, tenant, key } = position;
        let requests = self.lines.get_mut(line)?;
        // Its place is another one if it became late.
        let (_, key) = requests.by_age.remove(&key.ticket)?;
        let own = requests.tenants.get_mut(tenant);
        let value = own.and_then(|own| own.remove(&key));
        if requests.tenants.get(tenant).is_some_and(BTreeMap::is_empty) {
            requests.tenants.remove(tenant);
        }
        if requests.by_age.is_empty() {
            self.lines.remove(line);
        }
        self.waiting -= 1;
        if let Some(group) = self.groups.get_mut(line.group()) {
            if let Some(room) = self.rooms.get_mut(line.group()) {
                room.remove(*tenant, &key, group);
                room.leave(*tenant, key.ticket);
                if room.is_empty() {
                    self.rooms.remove(line.group());
                }
            }
            group.leave(*tenant, self.rules.check);
            if group.waiting == 0 {
                self.groups.remove(line.group());
            }
        }
        value
    }

    /// Charges a waiting request's tenant for its admission; call it before [`Self::remove`].
    pub fn charge(&mut self, position: &Position<L>, weight: f64, cost: f64) -> Option<Charge<L::Group>> {
        self.admitted += 1;
        let name = position.line.group();
        let group = self.groups.get_mut(name)?;
        group.reweigh(position.tenant, weight);
        if let Some(room) = self.rooms.get_mut(name) {
            room.list(position.tenant, group);
            room.serve(Some(position.key.ticket));
        }
        group.admit(position.tenant, cost);
        Some(Charge { group: name.clone(), tenant: position.tenant, period: group.period, cost })
    }

    /// Charges a tenant for a request that was admitted without waiting, when others of its group wait.
    pub fn charge_passing(
        &mut self,
        name: &L::Group,
        tenant: u64,
        weight: f64,
        cost: f64,
    ) -> Option<Charge<L::Group>> {
        let group = self.groups.get_mut(name)?;
        let tenant = group.known(tenant);
        group.enter(tenant, weight, self.rules.credit);
        if let Some(room) = self.rooms.get_mut(name) {
            room.list(tenant, group);
            room.serve(None);
        }
        group.admit(tenant, cost);
        group.leave(tenant, self.rules.check);
        Some(Charge { group: name.clone(), tenant, period: group.period, cost })
    }

    /// Replaces an estimated cost by the real one.
    pub fn settle(&mut self, charge: &Charge<L::Group>, real: f64) {
        let group = self.groups.get_mut(&charge.group);
        if let Some(group) = group.filter(|group| group.period == charge.period) {
            group.charge(charge.tenant, real - charge.cost);
        }
    }

    /// Makes requests late whose deadline is before the time that `until_us` returns for their line. Late
    /// requests come after all others of their tenant and priority, in the order of arrival. Looks at the
    /// requests that would be served next.
    pub fn pass_deadlines(&mut self, until_us: impl Fn(&L) -> i64) {
        for (line, requests) in &mut self.lines {
            let mut room = self.rooms.get_mut(line.group());
            requests.pass_deadlines(until_us(line), |tenant, from, to| {
                if let Some(room) = &mut room {
                    room.change_key(tenant, from, to);
                }
            });
        }
    }

    /// Returns the request that is admitted next, of the lines that `may` be served.
    pub fn next(&self, may: impl Fn(&L) -> bool) -> Option<(Position<L>, &T)> {
        let turn = self.rules.ageing_turn;
        let ageing = turn > 0 && self.admitted % turn == turn - 1;
        let mut best: Option<(Rank, Position<L>, &T)> = None;
        for (line, requests) in self.lines.iter().filter(|(line, _)| may(line)) {
            let group = self.groups.get(line.group());
            let counter = |tenant: u64| group.map_or(0.0, |group| group.ahead(tenant));
            let Some((rank, tenant, key, value)) = requests.first(ageing, counter) else { continue };
            if best.as_ref().is_none_or(|(so_far, ..)| rank.is_before(so_far)) {
                best = Some((rank, Position { line: line.clone(), tenant, key }, value));
            }
        }
        best.map(|(_, position, value)| (position, value))
    }

    /// Returns the last requests of a group that would be served after a new one of `tenant`, the very last
    /// one first: a full queue removes them for the new one. `cost` returns the cost of a request. `suffices`
    /// gets each of them, and returns whether there is room without it and those before it. Returns nothing
    /// if even all of them do not suffice. This reads every request of the group and ignores priorities.
    pub fn last_after(
        &self,
        group: &L::Group,
        tenant: u64,
        cost: impl Fn(&T) -> f64,
        mut suffices: impl FnMut(&T) -> bool,
    ) -> Option<Vec<Position<L>>> {
        let counters = self.groups.get(group)?;
        let mut tenants: BTreeMap<u64, Arrived<'_, L, T>> = BTreeMap::new();
        for (line, requests) in self.lines.iter().filter(|(line, _)| line.group() == group) {
            for (tenant, own) in &requests.tenants {
                let arrived =
                    tenants.entry(*tenant).or_insert_with(|| Arrived { cost: 0.0, requests: vec![] });
                arrived.requests.extend(own.iter().map(|(key, value)| (*key, line, value)));
            }
        }
        for arrived in tenants.values_mut() {
            arrived.requests.sort_unstable_by_key(|(key, ..)| key.ticket);
            arrived.cost = arrived.requests.iter().map(|(.., value)| cost(value)).sum();
        }
        let queued = tenants.get(&tenant).map_or(0.0, |own| own.cost);
        let start = counters.start(tenant, queued);
        let mut last = Vec::new();
        loop {
            let ends = tenants.iter().filter_map(|(tenant, arrived)| {
                let (key, _, value) = arrived.requests.last()?;
                Some((counters.start(*tenant, arrived.cost - cost(value)), key.ticket, *tenant))
            });
            let end = ends.max_by(|(one, a, _), (other, b, _)| one.total_cmp(other).then(a.cmp(b)));
            let (.., tenant) = end.filter(|(end, ..)| *end > start)?;
            let arrived = tenants.get_mut(&tenant)?;
            let (key, line, value) = arrived.requests.pop()?;
            arrived.cost -= cost(value);
            last.push(Position { line: line.clone(), tenant, key });
            if suffices(value) {
                return Some(last);
            }
        }
    }
}

/// A tenant's requests in the order of their arrival, and what they cost.
struct Arrived<'a, L, T> {
    cost: f64,
    requests: Vec<(Key, &'a L, &'a T)>,
}

/// Where a line's next request stands among those of other lines.
#[derive(Clone, Copy, Debug)]
struct Rank {
    /// Age before priority, in an ageing turn.
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

impl<T> Requests<T> {
    /// `passed` gets the tenant of each request that becomes late, its key and its new one.
    fn pass_deadlines(&mut self, until_us: i64, mut passed: impl FnMut(u64, &Key, Key)) {
        // An ageing turn serves the priority of the oldest request, any other turn a tenant's highest one.
        let oldest = self.by_age.first_key_value().map(|(_, (_, key))| key.priority);
        for (tenant, requests) in &mut self.tenants {
            let highest = requests.keys().next().map(|key| key.priority);
            for priority in [highest, oldest].into_iter().flatten() {
                while let Some(key) = first_of(requests, priority)
                    && key.deadline_us < until_us
                    && let Some(value) = requests.remove(&key)
                {
                    let late = Key { due_us: i64::MAX, deadline_us: i64::MAX, ..key };
                    self.by_age.insert(key.ticket, (*tenant, late));
                    requests.insert(late, value);
                    passed(*tenant, &key, late);
                }
            }
        }
    }

    /// Returns the line's next request, by the counters of tenants.
    fn first(&self, ageing: bool, counter: impl Fn(u64) -> f64) -> Option<(Rank, u64, Key, &T)> {
        let (oldest_ticket, (_, oldest)) = self.by_age.first_key_value()?;
        let band = ageing.then_some(oldest.priority);
        let mut best: Option<(Rank, u64, Key)> = None;
        for (tenant, requests) in &self.tenants {
            let key = match band {
                Some(priority) => first_of(requests, priority),
                None => requests.keys().next().copied(),
            };
            let Some(key) = key else { continue };
            let Key { priority, due_us, ticket, .. } = key;
            let age = ageing.then_some(*oldest_ticket);
            let rank = Rank { age, priority, counter: counter(*tenant), due_us, ticket };
            if best.as_ref().is_none_or(|(so_far, ..)| rank.is_before(so_far)) {
                best = Some((rank, *tenant, key));
            }
        }
        let (rank, tenant, key) = best?;
        let value = self.tenants.get(&tenant)?.get(&key)?;
        Some((rank, tenant, key, value))
    }
}

/// Returns the first key of a priority.
fn first_of<T>(requests: &BTreeMap<Key, T>, priority: Reverse<i64>) -> Option<Key> {
    let from = Key { priority, due_us: i64::MIN, ..Key::in_turn(0) };
    requests.range(from..).next().map(|(key, _)| *key).filter(|key| key.priority == priority)
}
