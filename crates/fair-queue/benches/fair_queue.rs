//! Time of a request's turn in a queue of 1,000: it arrives, and the next one is chosen, charged and removed.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use fair_queue::{FairQueue, Key, Rules};

/// Requests that wait.
const WAITING: u64 = 1_000;

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fair queue");
    for tenants in [10, 1_000] {
        group.bench_function(format!("a turn, {tenants} tenants"), |b| {
            let mut queue = FairQueue::new(Rules { ageing_turn: 4, credit: 2.0, check: |_| {} });
            let mut ticket = 0;
            let mut insert = |queue: &mut FairQueue<(), u64>| {
                queue.insert((), ticket % tenants, 1.0, Key::in_turn(ticket), ticket);
                ticket += 1;
            };
            (0..WAITING).for_each(|_| insert(&mut queue));
            b.iter(|| {
                insert(&mut queue);
                let position = queue.next(|()| true).unwrap().0;
                queue.charge(&position, 1.0, 100.0);
                black_box(queue.remove(&position))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
