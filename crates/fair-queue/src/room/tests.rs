use proptest::prelude::*;

use super::*;
use crate::tests::{Queue, Size};

/// What a request of these tests needs.
const ONE: Need = Need { cost: 1.0, size: 1 };

impl Queue {
    /// Adds a request that may lose its place, with a cost of 1.
    fn push_with(&mut self, tenant: u64, priority: i64, weight: f64) -> Position<Size> {
        let key = Key { priority: Reverse(priority), ..Key::in_turn(self.tickets) };
        self.tickets += 1;
        let position = self.queue.insert(Size::Small, tenant, weight, key, (1.0, ""));
        self.queue.may_lose_place(&position, ONE);
        position
    }

    fn fill_with(&mut self, times: usize, tenant: u64, priority: i64) {
        for _ in 0..times {
            self.push_with(tenant, priority, 1.0);
        }
    }

    /// Has a request of weight 1 take places in a full queue. Returns the tenants and priorities of those
    /// that lose theirs.
    fn take_places(&mut self, tenant: u64, priority: i64, count: usize) -> Option<Vec<(u64, i64)>> {
        let (mut left, new) = (count, Newcomer { tenant, weight: 1.0, priority, size: 1 });
        let suffices = |_: &(f64, &'static str)| {
            left -= 1;
            left == 0
        };
        let last = self.queue.make_room(&(), new, |_| true, suffices)?;
        assert!(last.iter().all(|(position, _)| self.queue.remove(position).is_some()));
        Some(last.iter().map(|(position, _)| (position.tenant, position.key.priority.0)).collect())
    }

    /// Returns how many of a number of requests of a tenant get a place of another one.
    fn times_with_room(&mut self, tenant: u64, priority: i64, times: usize) -> usize {
        let got = (0..times).filter(|_| {
            let has_room = self.take_places(tenant, priority, 1).is_some();
            has_room.then(|| self.push_with(tenant, priority, 1.0)).is_some()
        });
        got.count()
    }
}

#[test]
fn a_full_queue_has_room_for_tenants_with_less_of_a_priority_and_each_keeps_a_place() {
    let mut queue = Queue::new(4, 2.0);
    queue.fill_with(12, 1, 0);
    assert_eq!(queue.take_places(1, 0, 1), None, "not for one's own");
    assert_eq!(queue.times_with_room(2, 0, 20), 6, "as many as the other");
    assert_eq!(queue.take_places(3, -1, 1), None, "others go first");
    assert_eq!(queue.times_with_room(3, 0, 20), 4);
    let names = (4..5_000).map(|name| queue.times_with_room(name, 0, 1)).sum::<usize>();
    assert_eq!(names, 12 - 3, "new names leave each its first one");
    assert_eq!(queue.queue.len(), 12);
    let mut tenants: Vec<u64> = std::iter::from_fn(|| {
        let position = queue.queue.next(|_| true)?.0;
        queue.queue.remove(&position).map(|_| position.tenant)
    })
    .collect();
    tenants.sort_unstable();
    assert_eq!(tenants[..3], [1, 2, 3]);
    assert!(queue.queue.is_empty());
}

#[test]
fn weights_share_the_places_and_the_only_one_of_a_small_tenant_stays() {
    let mut queue = Queue::new(0, 0.0);
    for _ in 0..9 {
        queue.push_with(1, 0, 2.0);
    }
    queue.push_with(3, 0, 0.1);
    assert_eq!(queue.times_with_room(2, 0, 9), 3, "six for weight 2, and three for weight 1");
}

#[test]
fn a_higher_priority_has_room_until_lower_ones_have_a_quarter() {
    let mut queue = Queue::new(4, 2.0);
    queue.fill_with(20, 1, 0);
    queue.fill_with(20, 1, 3);
    assert_eq!(queue.take_places(1, 0, 1), None);
    assert_eq!(queue.take_places(1, 5, 3), Some(vec![(1, 0); 3]), "the lowest first");
    queue.fill_with(3, 1, 5);
    assert_eq!(queue.times_with_room(1, 5, 99), 27);
    assert_eq!(queue.times_with_room(1, 3, 99), 0, "10 of 40 are lower, and all of them are of priority 3");
}

/// One that claims high priorities takes most of the turns, but not most of the places.
#[test]
fn a_higher_priority_leaves_other_tenants_a_quarter_of_the_places_of_its_own() {
    let mut queue = Queue::new(4, 2.0);
    (1..=10).for_each(|tenant| queue.fill_with(10, tenant, 0));
    for priority in 1..1_000 {
        queue.times_with_room(99, priority, 1);
    }
    let places = std::iter::from_fn(|| {
        let position = queue.queue.next(|_| true)?.0;
        queue.queue.remove(&position).map(|_| position.tenant)
    });
    let own = places.filter(|tenant| *tenant == 99).count();
    assert_eq!(own, 30, "ten others have 70");
}

/// Places of one that comes, takes them and leaves at once count as its own.
#[test]
fn a_tenant_that_takes_places_and_leaves_does_not_empty_the_queue_of_others() {
    for (tenant, priority, kept, taken) in [(2, 0, 8, 15), (1, 5, 4, 48), (2, 5, 4, 48)] {
        let of = |queue: &Queue| queue.queue.of_group(&());
        let come_and_leave = |queue: &mut Queue| {
            let new = Newcomer { tenant, weight: 1.0, priority, size: 1 };
            let Some(last) = queue.queue.make_room(&(), new, |_| true, |_| true) else { return false };
            assert!(last.iter().all(|(position, _)| queue.queue.remove(position).is_some()));
            let taker = queue.push_with(tenant, priority, 1.0);
            queue.queue.take(&taker, &last);
            queue.queue.remove(&taker).is_some()
        };
        let mut queue = Queue::new(0, 0.0);
        queue.fill_with(16, 1, 0);
        let mut times = (0..1_000).filter(|_| come_and_leave(&mut queue)).count();
        assert_eq!(of(&queue), kept, "{tenant} {priority}");
        // The others come back each time.
        times += (0..1_000)
            .filter(|_| {
                queue.fill_with(16 - of(&queue), 1, 0);
                come_and_leave(&mut queue)
            })
            .count();
        assert_eq!((times, of(&queue)), (taken, 16), "{tenant} {priority}");
        // A request that is served makes up for one place.
        queue.pop(|_| true);
        queue.fill_with(1, 1, 0);
        assert_eq!((0..9).filter(|_| come_and_leave(&mut queue)).count(), 1);
        while queue.pop(|_| true).is_some() {}
        assert!(queue.queue.is_empty());
    }
}

#[test]
fn what_a_request_took_is_forgotten_when_it_is_served() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill_with(16, 1, 0);
    let taker = |queue: &mut Queue, tenant| {
        let new = Newcomer { tenant, weight: 1.0, priority: 0, size: 1 };
        let last = queue.queue.make_room(&(), new, |_| true, |_| true).unwrap();
        assert!(last.iter().all(|(position, _)| queue.queue.remove(position).is_some()));
        let taker = queue.push_with(tenant, 0, 1.0);
        queue.queue.take(&taker, &last);
        taker
    };
    for _ in 0..100 {
        let taker = taker(&mut queue, 2);
        queue.queue.charge(&taker, 1.0, 0.0);
        assert!(queue.queue.remove(&taker).is_some());
        queue.fill_with(1, 1, 0);
    }
    assert_eq!((queue.times_with_room(2, 0, 99), queue.queue.len()), (8, 16));
}

#[test]
fn large_requests_share_the_room_by_their_size() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill_with(10, 1, 0);
    for (size, count) in [(9, None), (5, Some(5))] {
        let (mut left, new) = (size, Newcomer { tenant: 2, weight: 1.0, priority: 0, size });
        let suffices = |_: &(f64, &'static str)| {
            left -= 1;
            left == 0
        };
        let last = queue.queue.make_room(&(), new, |_| true, suffices);
        assert_eq!(last.map(|last| last.len()), count);
    }
}

#[test]
fn requests_that_keep_their_places_hide_no_others() {
    let mut queue = Queue::new(0, 0.0);
    queue.fill_with(60, 1, 0);
    // Each of these has as many as the new request's tenant, and they are less than a quarter.
    for tenant in 100..106 {
        queue.fill_with(2, tenant, -9);
    }
    queue.fill_with(3, 2, 0);
    assert_eq!(queue.take_places(2, 0, 1), Some(vec![(1, 0)]));
    let new = Newcomer { tenant: 3, weight: 1.0, priority: 0, size: 1 };
    let mut seen = 0_u32;
    let last = queue.queue.make_room(
        &(),
        new,
        |_| true,
        |_| {
            seen += 1;
            false
        },
    );
    assert_eq!((last.map(|last| last.len()), seen, queue.queue.len()), (None, 16, 74), "at most 16");
    assert!(queue.queue.make_room(&(), new, |_| false, |_| true).is_none(), "none may lose its place now");
}

#[test]
fn a_late_request_loses_its_place_first() {
    let mut queue = Queue::new(0, 0.0);
    for ticket in 0..3 {
        let due_us = 10 - i64::try_from(ticket).unwrap();
        let key = Key { due_us, deadline_us: due_us, ..Key::in_turn(ticket) };
        let position = queue.queue.insert(Size::Small, 1, 1.0, key, (1.0, ""));
        queue.queue.may_lose_place(&position, ONE);
    }
    queue.queue.pass_deadlines(|_| 9);
    let new = Newcomer { tenant: 2, weight: 1.0, priority: 0, size: 1 };
    let last = queue.queue.make_room(&(), new, |_| true, |_| true).unwrap();
    assert_eq!(last[0].0.key.ticket, 2, "the one that was due at 8");
    assert!(queue.queue.remove(&last[0].0).is_some());
    assert_eq!(queue.queue.make_room(&(), new, |_| true, |_| true).unwrap()[0].0.key.ticket, 0);
}

proptest! {
    /// What loses its place would have been served after the new request, is not of its tenant and priority,
    /// and is as much as is needed.
    #[test]
    fn only_what_comes_later_loses_its_place(
        waiting in proptest::collection::vec((0_u64..5, 0_i64..3), 1..40),
        served in 0_usize..20,
        (tenant, priority, count) in (0_u64..6, 0_i64..4, 1_usize..4),
    ) {
        let mut queue = Queue::new(0, 0.0);
        waiting.iter().for_each(|(tenant, priority)| queue.fill_with(1, *tenant, *priority));
        for _ in 0..served.min(waiting.len() - 1) {
            queue.pop(|_| true);
        }
        let (len, mut left) = (queue.queue.len(), count);
        let new = Newcomer { tenant, weight: 1.0, priority, size: 1 };
        let suffices = |_: &(f64, &'static str)| {
            left -= 1;
            left == 0
        };
        let last = queue.queue.make_room(&(), new, |_| true, suffices);
        prop_assert_eq!(queue.queue.len(), len);
        prop_assert!(last.as_ref().is_none_or(|last| last.len() == count));
        let own = queue.push_with(tenant, priority, 1.0);
        let mut order = Vec::new();
        while let Some(position) = queue.queue.next(|_| true).map(|(position, _)| position) {
            queue.queue.charge(&position, 1.0, 1.0);
            queue.queue.remove(&position);
            order.push(position.key.ticket);
        }
        let turn = |ticket: u64| order.iter().position(|one| *one == ticket);
        for (lost, _) in last.into_iter().flatten() {
            prop_assert!(lost.key.priority.0 < priority || lost.tenant != tenant);
            prop_assert!(turn(lost.key.ticket) > turn(own.key.ticket), "{:?} {:?}", order, lost);
        }
        prop_assert!(queue.queue.is_empty());
    }
}
