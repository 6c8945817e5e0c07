//! Which requests of a group lose their places in a full queue to a new one.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BTreeSet, HashMap},
};

use crate::{FairQueue, Key, Line, Position, group::Group};

mod taken;

use taken::{Taken, Taking};

/// Largest number of requests that lose their places to one.
const MAX_DISPLACED: usize = 16;
/// Number of priorities, and of tenants of each, that are looked at for each of them.
const MAX_PRIORITIES: usize = 16;
const MAX_TENANTS: usize = 4;
/// Lower priorities keep one in this many places, and a tenant keeps one for this many of another tenant with
/// a higher priority.
const LOWER_SHARE: u16 = 4;

/// A request that asks for a place in a full queue.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    /// Its tenant.
    pub tenant: u64,
    /// Weight of the tenant, above 0.
    pub weight: f64,
    /// Its priority.
    pub priority: i64,
    /// What it takes of the room.
    pub size: u64,
}

/// What a request that may lose its place needs.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Expected cost.
    pub cost: f64,
    /// What it takes of the room while it waits, in any unit.
    pub size: u64,
}

/// The requests of a group that may lose their places.
#[derive(Debug)]
pub(crate) struct Room<L> {
    tenants: HashMap<u64, Own<L>>,
    /// The tenants by the lowest priority of their requests, and of each the one that has the most first.
    by_priority: BTreeMap<i64, BTreeSet<Size>>,
    ranks: Ranks,
    taken: Taken,
}

/// Requests of a tenant.
#[derive(Debug)]
struct Own<L> {
    requests: BTreeMap<Key, (L, Need)>,
    /// What they need together.
    sum: Need,
    /// Its lowest priority, and its entry there.
    listed: Option<(i64, Size)>,
}

/// How much of the room a tenant has. The largest comes first.
type Size = (Reverse<Share>, Reverse<u64>, u64);

/// Size of a tenant's requests, divided by its weight.
#[derive(Clone, Copy, Debug)]
struct Share(f64);

/// Priorities and tickets of the requests.
#[derive(Debug, Default)]
struct Ranks {
    /// The lowest quarter of them, rounded down.
    low: BTreeSet<(i64, u64)>,
    high: BTreeSet<(i64, u64)>,
}

impl<L: Line, T> FairQueue<L, T> {
    /// Lets a request lose its place in a full queue to another one, as [`Self::make_room`] says.
    pub fn may_lose_place(&mut self, position: &Position<L>, need: Need) {
        let name = position.line.group();
        if let Some(group) = self.groups.get(name) {
            self.rooms.entry(name.clone()).or_default().add(position, need, group);
        }
    }

    /// Returns the requests of a group that lose their places to a new one, which would be served before
    /// them. The one that would be served last is the first.
    ///
    /// - Of its own priority, the new request takes places of a tenant that has more of the room for its
    ///   weight than its own tenant. Each tenant keeps one place.
    /// - It takes places of lower priorities while more than a quarter of the requests have one. It takes
    ///   none of another tenant when its own one has four times as much of the room.
    /// - Places that requests took and left ([`Self::take`]) count as if their tenants had them, with the
    ///   highest priority.
    ///
    /// `may` returns whether a request may lose its place now. `suffices` gets each of them, and returns
    /// whether there is room without it and those before it. Returns nothing if 16 do not suffice. The time
    /// grows with the logarithm of the length.
    pub fn make_room(
        &mut self,
        name: &L::Group,
        new: Newcomer,
        may: impl Fn(&T) -> bool,
        mut suffices: impl FnMut(&T) -> bool,
    ) -> Option<Vec<(Position<L>, Need)>> {
        let (group, room) = (self.groups.get_mut(name)?, self.rooms.get_mut(name)?);
        let new = Newcomer { tenant: group.known(new.tenant), ..new };
        let lines = &self.lines;
        let value = |one: &Position<L>| lines.get(&one.line)?.tenants.get(&one.tenant)?.get(&one.key);
        let start = room.start(&new, group);
        let (mut last, mut is_enough) = (Vec::new(), false);
        while !is_enough && last.len() < MAX_DISPLACED {
            let may = |position: &Position<L>| value(position).is_some_and(&may);
            let Some(position) = room.last_after(&new, start, group, may) else { break };
            let Some(need) = room.remove(position.tenant, &position.key, group) else { break };
            is_enough = value(&position).is_some_and(&mut suffices);
            last.push((position, need));
        }
        // They leave with `remove`.
        last.iter().for_each(|(position, need)| room.add(position, *need, group));
        if !is_enough {
            return None;
        }
        // What they took is the new one's now.
        for (position, _) in &last {
            room.taken.forget(position.key.ticket);
        }
        Some(last)
    }

    /// Notes that a request took the places of others, as [`Self::make_room`] returned them. If it leaves
    /// without being charged, they count as its tenant's places until as many requests of the group were.
    pub fn take(&mut self, position: &Position<L>, places: &[(Position<L>, Need)]) {
        let room = self.rooms.get_mut(position.line.group());
        if let Some(room) = room.filter(|_| !places.is_empty()) {
            let places =
                places.iter().map(|(lost, need)| Taking { ticket: lost.key.ticket, size: need.size });
            room.taken.hold(position.key.ticket, places.collect());
        }
    }
}

impl<L> Default for Room<L> {
    fn default() -> Self {
        let (tenants, by_priority) = (HashMap::new(), BTreeMap::new());
        Self { tenants, by_priority, ranks: Ranks::default(), taken: Taken::default() }
    }
}

impl<L: Clone> Room<L> {
    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    pub(crate) fn add(&mut self, position: &Position<L>, need: Need, counters: &Group) {
        let Position { line, tenant, key } = position;
        let sum = Need { cost: 0.0, size: 0 };
        let empty = || Own { requests: BTreeMap::new(), sum, listed: None };
        let own = self.tenants.entry(*tenant).or_insert_with(empty);
        own.requests.insert(*key, (line.clone(), need));
        own.sum.cost += need.cost;
        own.sum.size += need.size;
        self.ranks.insert((key.priority.0, key.ticket));
        self.list(*tenant, counters);
    }

    /// Removes a request, if it is one of them. Returns what it needed.
    pub(crate) fn remove(&mut self, tenant: u64, key: &Key, counters: &Group) -> Option<Need> {
        let own = self.tenants.get_mut(&tenant)?;
        let (_, need) = own.requests.remove(key)?;
        own.sum.cost -= need.cost;
        own.sum.size -= need.size;
        self.ranks.remove((key.priority.0, key.ticket));
        self.list(tenant, counters);
        Some(need)
    }

    /// Counts a request that leaves.
    pub(crate) fn leave(&mut self, tenant: u64, ticket: u64) {
        self.taken.leave(tenant, ticket, &mut self.ranks);
    }

    /// Counts a request that is served, with its ticket if it waited.
    pub(crate) fn serve(&mut self, ticket: Option<u64>) {
        if !ticket.is_some_and(|ticket| self.taken.forget(ticket)) {
            self.taken.forget_oldest(&mut self.ranks);
        }
    }

    /// Changes the place of a request among those of its tenant and priority.
    pub(crate) fn change_key(&mut self, tenant: u64, from: &Key, to: Key) {
        let Some(own) = self.tenants.get_mut(&tenant) else { return };
        if let Some(request) = own.requests.remove(from) {
            own.requests.insert(to, request);
        }
    }

    /// Lists a tenant anew, because its requests or its weight changed.
    pub(crate) fn list(&mut self, tenant: u64, counters: &Group) {
        let Some(own) = self.tenants.get_mut(&tenant) else { return };
        if let Some((priority, size)) = own.listed.take()
            && let Some(sizes) = self.by_priority.get_mut(&priority)
        {
            sizes.remove(&size);
            if sizes.is_empty() {
                self.by_priority.remove(&priority);
            }
        }
        let Some((last, _)) = own.requests.last_key_value() else {
            self.tenants.remove(&tenant);
            return;
        };
        let share = Share::new(own.sum.size, counters.weight(tenant));
        let (priority, size) = (last.priority.0, (Reverse(share), Reverse(last.ticket), tenant));
        own.listed = Some((priority, size));
        self.by_priority.entry(priority).or_default().insert(size);
    }

    /// Returns the counter of the new request's tenant when its other requests were served.
    pub(crate) fn start(&self, new: &Newcomer, counters: &Group) -> f64 {
        counters.start(new.tenant, self.tenants.get(&new.tenant).map_or(0.0, |own| own.sum.cost))
    }

    /// Returns the first request to lose its place to a new one that would be served at the counter `start`.
    /// `may` returns whether one may lose it now.
    pub(crate) fn last_after(
        &self,
        new: &Newcomer,
        start: f64,
        counters: &Group,
        may: impl Fn(&Position<L>) -> bool,
    ) -> Option<Position<L>> {
        let lower_have_more = self.ranks.more_than_a_quarter_is_below(new.priority);
        let own = self.tenants.get(&new.tenant).map_or(0, |own| own.sum.size);
        let size = new.size + own + self.taken.size(new.tenant);
        let gives_way = |tenant: u64| {
            let own = self.tenants.get(&tenant)?;
            let (last, need) = own.last(tenant, &may)?;
            let priority = last.key.priority.0;
            let by_priority = priority < new.priority && lower_have_more;
            if tenant == new.tenant {
                return by_priority.then_some(last);
            }
            let share = Share::new(own.sum.size, counters.weight(tenant));
            let has_more = |times| share > Share::new(size, new.weight * times);
            // Each tenant keeps one place, so that new names take none that is the only one.
            let by_share = || {
                let is_after = counters.start(tenant, own.sum.cost - need.cost) > start;
                own.requests.len() > 1 && priority <= new.priority && has_more(1.0) && is_after
            };
            ((by_priority && has_more(LOWER_SHARE.into())) || by_share()).then_some(last)
        };
        let others = self.by_priority.range(..=new.priority).take(MAX_PRIORITIES);
        let mut others = others.flat_map(|(_, sizes)| sizes.iter().take(MAX_TENANTS));
        let other = others.find_map(|(.., tenant)| gives_way(*tenant));
        let own = gives_way(new.tenant);
        own.into_iter().chain(other).min_by_key(|last| last.key.priority.0)
    }
}

impl<L: Clone> Own<L> {
    /// Returns the last request that may lose its place, and what it needs. Few may not.
    fn last(&self, tenant: u64, may: impl Fn(&Position<L>) -> bool) -> Option<(Position<L>, Need)> {
        let last = self.requests.iter().rev().take(2);
        let mut last =
            last.map(|(key, (line, need))| (Position { line: line.clone(), tenant, key: *key }, *need));
        last.find(|(position, _)| may(position))
    }
}

impl Share {
    #[expect(clippy::cast_precision_loss, reason = "shares need no more precision")]
    fn new(size: u64, weight: f64) -> Self {
        Self(size as f64 / weight)
    }
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Share {}

impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Share {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Ranks {
    fn insert(&mut self, one: (i64, u64)) {
        let is_low = self.high.first().is_some_and(|first| one < *first);
        if is_low {
            self.low.insert(one)
        } else {
            self.high.insert(one)
        };
        self.balance();
    }

    fn remove(&mut self, one: (i64, u64)) {
        if !self.low.remove(&one) {
            self.high.remove(&one);
        }
        self.balance();
    }

    fn len(&self) -> usize {
        self.low.len() + self.high.len()
    }

    fn balance(&mut self) {
        let low = self.len() / usize::from(LOWER_SHARE);
        while self.low.len() < low
            && let Some(first) = self.high.pop_first()
        {
            self.low.insert(first);
        }
        while self.low.len() > low
            && let Some(last) = self.low.pop_last()
        {
            self.high.insert(last);
        }
    }

    fn more_than_a_quarter_is_below(&self, priority: i64) -> bool {
        self.high.first().is_some_and(|(first, _)| *first < priority)
    }
}

#[cfg(test)]
mod tests;
