//! Time to record decisions, to apply an engine's events, and to look a prompt up among 64 workers.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use prefix_index::{
    DpRank, IndexConfig, Overlaps, Prefix, PrefixIndex, Salt, WorkerId,
    events::{Batch, KvEvent, Stored},
};
use tokio::time::Instant;

const BLOCK: usize = 16;
const BLOCKS: u32 = 256;
const WORKERS: u64 = 64;

/// Returns the tokens of a prompt. Prompts of one family share half of their blocks.
fn tokens(family: u32, own: u32) -> Vec<u32> {
    let block =
        |block: u32| [family * 1_000_000 + if block < BLOCKS / 2 { 0 } else { own * 1_000 } + block; BLOCK];
    (0..BLOCKS).flat_map(block).collect()
}

fn prefix(family: u32, own: u32) -> Prefix {
    Prefix::of_tokens(&tokens(family, own), BLOCK, &Salt::default(), &[])
}

fn index() -> PrefixIndex {
    PrefixIndex::synchronous(IndexConfig { block_size: BLOCK, ..IndexConfig::default() })
}

fn stored(family: u32, own: u32) -> Batch {
    let hash = |block: u32| u64::from(family) << 40 | u64::from(own) << 20 | u64::from(block);
    let stored = Stored {
        hashes: (0..BLOCKS).map(hash).collect(),
        token_ids: tokens(family, own),
        block_size: u32::try_from(BLOCK).unwrap(),
        ..Stored::default()
    };
    Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prefix_index");
    group.throughput(Throughput::Elements(u64::from(BLOCKS)));
    let prompts: Vec<_> = (0..64).map(|own| prefix(1, own)).collect();
    group.bench_function("record a decision", |b| {
        let (index, now, mut next) = (index(), Instant::now(), 0);
        b.iter(|| {
            next += 1;
            let worker = WorkerId(next % WORKERS);
            index.record(worker, DpRank(0), prompts.get(next as usize % prompts.len()).unwrap(), now);
        });
    });
    group.bench_function("apply an event", |b| {
        let index = index();
        let mut next = 0;
        b.iter_batched(
            || {
                next += 1;
                (WorkerId(u64::from(next) % WORKERS), stored(2, next))
            },
            |(worker, batch)| index.events(worker, DpRank(0), batch).unwrap(),
            BatchSize::SmallInput,
        );
    });
    let index = index();
    for worker in 0..WORKERS {
        let own = u32::try_from(worker).unwrap();
        index.events(WorkerId(worker), DpRank(0), stored(3, own)).unwrap();
    }
    let mut overlaps = Overlaps::default();
    let asked = prefix(3, 7);
    group.bench_function("look up", |b| b.iter(|| index.matches(black_box(asked.hashes()), &mut overlaps)));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
