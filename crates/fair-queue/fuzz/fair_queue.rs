//! The queue under any sequence of steps: each request comes out once, of a line that may be served, and
//! nothing is kept at the end.
#![no_main]

use std::collections::BTreeSet;

use fair_queue::{FairQueue, Key, Line, Need, Newcomer, Rules};
use libfuzzer_sys::fuzz_target;

/// Group and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place(u8, u8);

impl Line for Place {
    type Group = u8;

    fn group(&self) -> &u8 {
        &self.0
    }
}

#[derive(arbitrary::Arbitrary, Debug)]
enum Step {
    Insert { line: (u8, u8), tenant: u8, weight: u8, priority: i8, due: i8, deadline: i8 },
    PassDeadlines(i8),
    Leave(u8),
    Serve { only: Option<u8>, cost: u16, real: u16 },
    Pass { group: u8, tenant: u8, cost: u16 },
    GiveWay { group: u8, tenant: u8 },
    MakeRoom { group: u8, tenant: u8, priority: i8, size: u8 },
}

fuzz_target!(|steps: Vec<Step>| {
    let mut queue = FairQueue::new(Rules { ageing_turn: 4, credit: 2.0, check: |right| assert!(right) });
    let (mut positions, mut inside) = (Vec::new(), BTreeSet::new());
    for (ticket, step) in (0_u64..).zip(steps) {
        match step {
            Step::Insert { line: (group, number), tenant, weight, priority, due, deadline } => {
                let line = Place(group % 2, number % 3);
                let priority = std::cmp::Reverse(i64::from(priority));
                let (due_us, deadline_us) = (due.into(), deadline.into());
                let key = Key { priority, due_us, deadline_us, ..Key::in_turn(ticket) };
                let weight = f64::from(weight) / 16.0 + 0.1;
                let position = queue.insert(line, tenant.into(), weight, key, ticket);
                if ticket % 3 > 0 {
                    queue.may_lose_place(&position, Need { cost: 1.0, size: ticket % 7 });
                }
                positions.push(position);
                inside.insert(ticket);
            }
            Step::Leave(which) if !positions.is_empty() => {
                let position = positions.swap_remove(usize::from(which) % positions.len());
                let removed = queue.remove(&position);
                assert_eq!(removed.is_some(), inside.remove(&position.key.ticket));
            }
            Step::Leave(_) => {}
            Step::PassDeadlines(now) => queue.pass_deadlines(|_| now.into()),
            Step::Serve { only, cost, real } => {
                let may = |line: &Place| only.is_none_or(|number| number % 3 == line.1);
                let waits = positions.iter().any(|one| may(&one.line) && inside.contains(&one.key.ticket));
                let next = queue.next(may).map(|(position, ticket)| (position, *ticket));
                assert_eq!(next.is_some(), waits);
                let Some((position, ticket)) = next else { continue };
                assert!(may(&position.line) && inside.remove(&ticket));
                let charge = queue.charge(&position, 1.0, cost.into()).expect("it waits");
                assert_eq!(queue.remove(&position), Some(ticket));
                queue.settle(&charge, real.into());
            }
            Step::Pass { group, tenant, cost } => {
                drop(queue.charge_passing(&(group % 2), tenant.into(), 1.0, cost.into()));
            }
            Step::GiveWay { group, tenant } => {
                let mut enough = 0_u8;
                let two = |_: &u64| {
                    enough += 1;
                    enough == 2
                };
                for last in queue.last_after(&(group % 2), tenant.into(), |_| 1.0, two).unwrap_or_default() {
                    assert!(inside.remove(&last.key.ticket) && queue.remove(&last).is_some());
                }
            }
            Step::MakeRoom { group, tenant, priority, size } => {
                let (tenant, priority) = (tenant.into(), priority.into());
                let new = Newcomer { tenant, weight: 1.0, priority, size: size.into() };
                let mut enough = 0_u8;
                let two = |_: &u64| {
                    enough += 1;
                    enough == 2
                };
                let may = |ticket: &u64| ticket % 3 > 1;
                let lost = queue.make_room(&(group % 2), new, may, two).unwrap_or_default();
                for (last, _) in &lost {
                    let ticket = last.key.ticket;
                    assert!(last.key.priority.0 <= priority && ticket % 3 > 1);
                    assert!(inside.remove(&ticket) && queue.remove(last) == Some(ticket));
                }
                // Any request may be the one that took them.
                if let Some(taker) = positions.iter().find(|one| inside.contains(&one.key.ticket)) {
                    queue.take(taker, &lost);
                }
            }
        }
        assert_eq!(queue.len(), inside.len());
    }
    while let Some((position, ticket)) = queue.next(|_| true).map(|(position, ticket)| (position, *ticket)) {
        assert!(inside.remove(&ticket) && queue.remove(&position).is_some());
    }
    assert!(inside.is_empty() && queue.is_empty());
});
