//! Queue of prompts that is fair between tenants (start-time fair queueing): a prompt starts after those of
//! its own tenant, and tenants share the threads by bytes, however many prompts one of them has waiting.

use std::collections::{BTreeMap, HashMap};

/// Cost of a prompt beside its bytes, so that many short prompts are not free.
const FIXED_COST: u64 = 1_024;
/// Number of tenants from which on those without waiting prompts are forgotten.
const MAX_TENANTS: usize = 1_024;

/// Place in the queue: virtual start time, then order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    start: u64,
    number: u64,
}

/// Waiting jobs by tenant.
#[derive(Debug)]
pub(super) struct Waiting<T> {
    tenant: u64,
    pub(super) bytes: usize,
    pub(super) item: T,
}

/// The queue. Its owner bounds its length.
#[derive(Debug)]
pub(super) struct FairQueue<T> {
    waiting: BTreeMap<Place, Waiting<T>>,
    /// Virtual time at which the last prompt of a tenant ends.
    ends: HashMap<u64, u64>,
    now: u64,
    arrived: u64,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), ends: HashMap::new(), now: 0, arrived: 0 }
    }
}

impl<T> FairQueue<T> {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a prompt.
    pub(super) fn push(&mut self, tenant: u64, bytes: usize, item: T) -> Place {
        let start = self.start_of(tenant);
        let place = Place { start, number: self.arrived };
        self.arrived += 1;
        self.ends.insert(tenant, start.saturating_add(cost(bytes)));
        self.waiting.insert(place, Waiting { tenant, bytes, item });
        place
    }

    /// Takes the next prompt whose size is accepted.
    pub(super) fn pop(&mut self, accepts: impl Fn(usize) -> bool) -> Option<Waiting<T>> {
        let place = *self.waiting.iter().find(|(_, waiting)| accepts(waiting.bytes))?.0;
        let waiting = self.waiting.remove(&place)?;
        self.now = self.now.max(place.start);
        self.forget();
        Some(waiting)
    }

    /// Takes a prompt out, as if it had never come; `None` if it was taken already.
    pub(super) fn remove(&mut self, place: Place) -> Option<Waiting<T>> {
        let waiting = self.waiting.remove(&place)?;
        let now = self.now;
        if let Some(end) = self.ends.get_mut(&waiting.tenant) {
            *end = end.saturating_sub(cost(waiting.bytes)).max(now);
        }
        self.forget();
        Some(waiting)
    }

    /// Takes out the last prompt, if a new one of `tenant` would come before it.
    pub(super) fn give_way(&mut self, tenant: u64) -> Option<Waiting<T>> {
        let start = self.start_of(tenant);
        let last = *self.waiting.last_key_value()?.0;
        if last.start <= start { None } else { self.remove(last) }
    }

    /// Forgets tenants that are owed nothing.
    fn forget(&mut self) {
        if self.waiting.is_empty() {
            self.ends.clear();
        } else if self.ends.len() > MAX_TENANTS {
            let now = self.now;
            self.ends.retain(|_, end| *end > now);
        }
    }

    fn start_of(&self, tenant: u64) -> u64 {
        self.ends.get(&tenant).copied().unwrap_or_default().max(self.now)
    }
}

fn cost(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(FIXED_COST)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn order(queue: &mut FairQueue<&'static str>) -> String {
        std::iter::from_fn(|| queue.pop(|_| true).map(|waiting| waiting.item)).collect()
    }

    fn fill(
        queue: &mut FairQueue<&'static str>,
        times: usize,
        tenant: u64,
        bytes: usize,
        item: &'static str,
    ) {
        for _ in 0..times {
            queue.push(tenant, bytes, item);
        }
    }

    #[test]
    fn a_tenant_with_many_prompts_does_not_delay_another() {
        let mut queue = FairQueue::default();
        fill(&mut queue, 5, 1, 10_000, "a");
        fill(&mut queue, 2, 2, 10_000, "b");
        assert_eq!(order(&mut queue), "ababaaa");
    }

    #[test]
    fn tenants_share_by_bytes_and_not_by_prompts() {
        let mut queue = FairQueue::default();
        fill(&mut queue, 3, 1, 30_000, "A");
        fill(&mut queue, 6, 2, 5_000, "b");
        assert_eq!(order(&mut queue), "AbbbbbbAA");
    }

    #[test]
    fn who_waited_long_owns_no_credit_and_who_left_costs_nothing() {
        let mut queue = FairQueue::default();
        let left = queue.push(1, 90_000, "x");
        queue.push(2, 1_000, "b");
        assert!(queue.remove(left).is_some() && queue.remove(left).is_none());
        queue.push(1, 1_000, "a");
        queue.push(2, 1_000, "b");
        assert_eq!(order(&mut queue), "bab");
    }

    #[test]
    fn a_full_queue_gives_way_at_its_end_to_a_tenant_with_less_in_it() {
        let mut queue = FairQueue::default();
        fill(&mut queue, 3, 1, 1_000, "a");
        assert!(queue.give_way(1).is_none(), "not for one's own");
        assert_eq!(queue.give_way(2).unwrap().item, "a");
        queue.push(2, 1_000, "b");
        assert_eq!(queue.give_way(3).unwrap().item, "a");
        assert!(queue.give_way(2).is_none(), "the second of 2 comes behind the only one of 1");
        assert_eq!(order(&mut queue), "ab");
    }

    #[test]
    fn a_prompt_that_is_not_accepted_waits() {
        let mut queue = FairQueue::default();
        queue.push(1, 900, "L");
        queue.push(1, 10, "s");
        assert_eq!(queue.pop(|bytes| bytes < 100).unwrap().item, "s");
        assert!(queue.pop(|bytes| bytes < 100).is_none());
        assert_eq!(order(&mut queue), "L");
    }

    proptest! {
        #[test]
        fn what_waits_comes_out_once_and_tenants_are_forgotten(
            steps in proptest::collection::vec((0_u64..6, 0_usize..5_000, 0_u8..4), 0..300),
        ) {
            let mut queue = FairQueue::default();
            let (mut places, mut inside) = (Vec::new(), 0_usize);
            for (tenant, bytes, step) in steps {
                match step {
                    0 => inside -= usize::from(queue.pop(|_| true).is_some()),
                    1 if !places.is_empty() => {
                        let place = places.swap_remove(bytes % places.len());
                        inside -= usize::from(queue.remove(place).is_some());
                    }
                    2 => inside -= usize::from(queue.give_way(tenant).is_some()),
                    _ => {
                        places.push(queue.push(tenant, bytes, ()));
                        inside += 1;
                    }
                }
                prop_assert_eq!(queue.len(), inside);
            }
            while queue.pop(|_| true).is_some() {
                inside -= 1;
            }
            prop_assert_eq!((inside, queue.ends.len()), (0, 0));
        }
    }
}
