use proptest::prelude::*;

use super::*;

/// A queue of requests with a size, which is their cost.
pub(crate) struct Queue {
    pub(crate) queue: FairQueue<Size, (f64, &'static str)>,
    pub(crate) tickets: u64,
}

/// Large and small requests, which have the tenants in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Size {
    Small,
    Large,
}

impl Line for Size {
    type Group = ();

    fn group(&self) -> &() {
        &()
    }
}

impl Queue {
    pub(crate) fn new(ageing_turn: u64, credit: f64) -> Self {
        let rules = Rules { ageing_turn, credit, check: |right| assert!(right) };
        Self { queue: FairQueue::new(rules), tickets: 0 }
    }

    fn push(&mut self, tenant: u64, cost: f64, item: &'static str) -> Position<Size> {
        let key = Key::in_turn(self.tickets);
        self.tickets += 1;
        let size = if cost < 100.0 { Size::Small } else { Size::Large };
        self.queue.insert(size, tenant, 1.0, key, (cost, item))
    }

    fn fill(&mut self, times: usize, tenant: u64, cost: f64, item: &'static str) {
        for _ in 0..times {
            self.push(tenant, cost, item);
        }
    }

    pub(crate) fn pop(&mut self, may: impl Fn(&Size) -> bool) -> Option<&'static str> {
        let (position, (cost, _)) = self.queue.next(may)?;
        let cost = *cost;
        self.queue.charge(&position, 1.0, cost);
        self.queue.remove(&position).map(|(_, item)| item)
    }

    fn give_way(&mut self, tenant: u64) -> Option<&'static str> {
        let last = self.queue.last_after(&(), tenant, |(cost, _)| *cost, |_| true)?;
        self.queue.remove(&last[0]).map(|(_, item)| item)
    }

    /// Returns the items that the queue would drop for a new request of this cost.
    fn give_way_for(&self, tenant: u64, cost: f64) -> Option<Vec<&'static str>> {
        let (mut freed, mut items) = (0.0, Vec::new());
        let suffices = |(cost_of_one, item): &(f64, &'static str)| {
            freed += cost_of_one;
            items.push(*item);
            freed >= cost
        };
        let last = self.queue.last_after(&(), tenant, |_| 1.0, suffices)?;
        assert_eq!(last.len(), items.len());
        Some(items)
    }

    fn order(&mut self) -> String {
        std::iter::from_fn(|| self.pop(|_| true)).collect()
    }
}

#[test]
fn a_tenant_with_many_requests_does_not_delay_another() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill(5, 1, 10_000.0, "a");
    queue.fill(2, 2, 10_000.0, "b");
    assert_eq!(queue.order(), "ababaaa");
}

#[test]
fn tenants_share_by_cost_and_not_by_requests() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill(3, 1, 31_024.0, "A");
    queue.fill(6, 2, 6_024.0, "b");
    assert_eq!(queue.order(), "AbbbbbbAA");
}

#[test]
fn a_tenant_that_waited_long_has_no_credit_and_a_request_that_left_costs_nothing() {
    let mut queue = Queue::new(0, 0.0);
    let left = queue.push(1, 90_000.0, "x");
    queue.push(2, 1_000.0, "b");
    assert!(queue.queue.remove(&left).is_some() && queue.queue.remove(&left).is_none());
    queue.push(1, 1_000.0, "a");
    queue.push(2, 1_000.0, "b");
    assert_eq!(queue.order(), "bab");
}

#[test]
fn with_credit_a_tenant_that_comes_back_passes_others_and_without_it_alternates() {
    for (credit, order) in [(0.0, "ababab"), (2.0, "bbabaa")] {
        let mut queue = Queue::new(0, credit);
        queue.push(2, 100.0, "b");
        queue.fill(23, 1, 100.0, "a");
        // Tenant 2 is served once, then only tenant 1, which always waits.
        let served: String = std::iter::from_fn(|| queue.pop(|_| true)).take(21).collect();
        assert_eq!(served, format!("b{}", "a".repeat(20)));
        queue.fill(3, 2, 100.0, "b");
        assert_eq!(queue.order(), order, "credit {credit}");
    }
}

#[test]
fn a_full_queue_gives_way_at_its_end_to_a_tenant_with_less_in_it() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill(3, 1, 1_000.0, "a");
    assert!(queue.give_way(1).is_none(), "not for one's own");
    assert_eq!(queue.give_way(2).unwrap(), "a");
    queue.push(2, 1_000.0, "b");
    assert_eq!(queue.give_way(3).unwrap(), "a");
    assert!(queue.give_way(2).is_none(), "the second of 2 comes behind the only one of 1");
    assert_eq!(queue.order(), "ab");
}

#[test]
fn as_many_give_way_as_suffice_and_otherwise_none() {
    let mut queue = Queue::new(0, 0.0);
    queue.push(3, 800.0, "C");
    for item in ["a", "b", "c"] {
        queue.push(1, 10.0, item);
    }
    queue.fill(2, 2, 10.0, "x");
    assert_eq!(queue.give_way_for(4, 15.0).unwrap(), ["c", "x"], "the newest of those with as many");
    assert_eq!(queue.give_way_for(4, 30.0).unwrap(), ["c", "x", "b"]);
    assert!(queue.give_way_for(4, 31.0).is_none(), "each tenant keeps one");
    assert!(queue.give_way_for(2, 10.0).is_none(), "a third one of 2 is no better than that of 1");
    assert_eq!(queue.queue.len(), 6);
}

#[test]
fn a_request_whose_line_cannot_be_served_waits() {
    let mut queue = Queue::new(0, 0.0);
    queue.push(1, 900.0, "L");
    queue.push(1, 10.0, "s");
    assert_eq!(queue.pop(|size| *size == Size::Small).unwrap(), "s");
    assert!(queue.pop(|size| *size == Size::Small).is_none());
    assert_eq!(queue.order(), "L");
}

#[test]
fn priorities_go_first_and_the_oldest_request_gets_its_turn() {
    for (ageing_turn, place) in [(0, 20), (4, 3)] {
        let mut queue = Queue::new(ageing_turn, 0.0);
        queue.push(1, 1.0, "low");
        for ticket in 1..=20 {
            let key = Key { priority: Reverse(5), ..Key::in_turn(ticket) };
            queue.queue.insert(Size::Small, 2, 1.0, key, (1.0, "high"));
        }
        let served: Vec<_> = std::iter::from_fn(|| queue.pop(|_| true)).collect();
        assert_eq!(served.iter().position(|item| *item == "low"), Some(place));
    }
}

#[test]
fn late_requests_wait_for_those_in_time_but_the_shares_of_tenants_hold() {
    let mut queue = Queue::new(4, 0.0);
    let due = |ticket, due_us| Key { due_us, deadline_us: due_us, ..Key::in_turn(ticket) };
    for (ticket, due_us, item) in [(1, 10, "a"), (2, 20, "b"), (3, 30, "c"), (4, 40, "d"), (5, 9, "e")] {
        queue.queue.insert(Size::Small, 1, 1.0, due(ticket, due_us), (1.0, item));
    }
    queue.queue.pass_deadlines(|_| 20);
    queue.queue.insert(Size::Small, 2, 1.0, due(6, 5), (1.0, "x"));
    queue.queue.pass_deadlines(|_| 20);
    // The late request of the second tenant comes before the second one of the first tenant.
    assert_eq!(queue.order(), "bxcdae");
    assert!(queue.queue.is_empty());
}

#[test]
fn a_late_request_waits_for_those_in_time_in_ageing_turns_too_and_each_line_has_its_own_time() {
    let mut queue = Queue::new(1, 0.0);
    let mut add = |size, ticket, priority, due_us, item| {
        let key = Key { priority: Reverse(priority), due_us, deadline_us: due_us, ..Key::in_turn(ticket) };
        queue.queue.insert(size, 1, 1.0, key, (1.0, item));
    };
    add(Size::Small, 0, 0, 1, "late, ");
    add(Size::Small, 1, 0, 50, "in time, ");
    add(Size::Small, 2, 5, 40, "high, ");
    add(Size::Large, 3, 5, 1, "large");
    queue.queue.pass_deadlines(|size| if *size == Size::Small { 10 } else { 0 });
    assert_eq!(queue.pop(|size| *size == Size::Large), Some("large"));
    assert_eq!(queue.order(), "in time, late, high, ");
    assert!(queue.queue.is_empty());
}

#[test]
fn tenants_share_by_weight_and_a_real_cost_replaces_the_estimate() {
    let mut queue = FairQueue::<(), ()>::new(Rules { ageing_turn: 0, credit: 0.0, check: |_| {} });
    for ticket in 0..80 {
        let tenant = ticket % 2;
        queue.insert((), tenant, if tenant == 0 { 3.0 } else { 1.0 }, Key::in_turn(ticket), ());
    }
    let mut take = |estimate, real| {
        let position = queue.next(|()| true).unwrap().0;
        let charge = queue.charge(&position, if position.tenant == 0 { 3.0 } else { 1.0 }, estimate);
        queue.remove(&position);
        queue.settle(&charge.unwrap(), real);
        usize::from(position.tenant == 0)
    };
    assert_eq!((0..40).map(|_| take(100.0, 100.0)).sum::<usize>(), 30);
    // Both were charged alike. One request that costs ten times its estimate is made up for by the other's.
    let dear = take(100.0, 1_000.0);
    assert_eq!((0..3).map(|_| take(100.0, 100.0)).sum::<usize>(), if dear == 1 { 0 } else { 3 });
}

proptest! {
    #[test]
    fn what_waits_comes_out_once_and_tenants_are_forgotten(
        steps in proptest::collection::vec((0_u64..6, 0_u32..5_000, 0_u8..4), 0..300),
    ) {
        let mut queue = Queue::new(4, 2.0);
        let (mut places, mut inside) = (Vec::new(), 0_usize);
        for (tenant, cost, step) in steps {
            match step {
                0 => inside -= usize::from(queue.pop(|_| true).is_some()),
                1 if !places.is_empty() => {
                    let place: Position<Size> = places.swap_remove(cost as usize % places.len());
                    inside -= usize::from(queue.queue.remove(&place).is_some());
                }
                2 => inside -= usize::from(queue.give_way(tenant).is_some()),
                _ => {
                    places.push(queue.push(tenant, f64::from(cost), ""));
                    inside += 1;
                }
            }
            prop_assert_eq!(queue.queue.len(), inside);
        }
        while queue.pop(|_| true).is_some() {
            inside -= 1;
        }
        prop_assert!(inside == 0 && queue.queue.is_empty());
    }
}
