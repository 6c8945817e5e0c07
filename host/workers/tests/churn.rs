//! Workers that join and leave do not leak memory. `cargo xtask nightly --only index-memory`
//! prints the figures.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "tests")]

use std::time::Duration;

use pointsman_workers::{BlockHash, BookingRequest, DpRank, Leg, Registry, WorkerId, WorkerSpec};
use prefix_index::{IndexStats, Prefix, PrefixIndex, Salt};
use tokio::time::Instant;

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

#[path = "../../../crates/prefix-index/tests/support/filling.rs"]
mod filling;

use filling::{BLOCK, MIB, chain, index, rss, send_events};

fn booking(hashes: &[u32]) -> BookingRequest {
    let prefix = Prefix::of_tokens(hashes, BLOCK, &Salt::default(), &[]);
    BookingRequest::new(Leg::Decode, prefix, 64, 16)
}

/// Adds and removes a worker, and then sends what arrives late: events of its feed, and the record of a
/// request in flight.
fn join_and_leave(registry: &Registry, index: &PrefixIndex, id: u64, now: Instant) {
    let flag = format!(
        "id={id},role=decode,engine=vllm,model=m,url=http://10.{}.{}.{}:1",
        id >> 16,
        (id >> 8) & 255,
        id & 255
    );
    let worker = registry.upsert(WorkerSpec::parse_flag(&flag).expect("a worker"));
    let tokens: Vec<u32> = (0..64).map(|token| u32::try_from(id).unwrap() + token).collect();
    let request = booking(&tokens);
    let booked = registry
        .snapshot()
        .get(worker.id())
        .expect("there")
        .candidates()
        .pop()
        .expect("a rank")
        .book(&request);
    let prefix = &request.prefix;
    if id.is_multiple_of(2) {
        index.set_live(worker.id(), DpRank(0), true);
        (0..4).for_each(|turn| send_events(index, worker.id(), chain(id * 4 + turn, 64)));
    } else {
        index.record(worker.id(), DpRank(0), prefix, now);
    }
    registry.remove(worker.id());
    index.remove_worker(worker.id());
    if id.is_multiple_of(2) {
        send_events(index, worker.id(), chain(id * 4 + 3, 64));
        index.set_live(worker.id(), DpRank(0), false);
        index.forget(worker.id(), DpRank(0));
    } else {
        index.record(worker.id(), DpRank(0), prefix, now);
    }
    drop(booked);
}

#[test]
fn h4_workers_that_join_and_leave_leak_nothing() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let (registry, index, start) = (Registry::default(), index(64 << 20), Instant::now());
    let mut first = None;
    for round in 0..5_u64 {
        let now = start + Duration::from_secs(60 * round);
        (0..1_000).for_each(|id| join_and_leave(&registry, &index, 1 + round * 1_000 + id, now));
        // Late records end by their TTL.
        index.expire(now + Duration::from_secs(30));
        index.flush();
        let (stats, live, rss) = (index.stats(), dhat::HeapStats::get().curr_bytes, rss());
        eprintln!("{} workers: {live} bytes live, {:.1} MiB resident", (round + 1) * 1_000, rss / MIB);
        assert_eq!(stats, IndexStats { expired: 500 * (round + 1), ..IndexStats::default() });
        assert!(registry.snapshot().workers().is_empty());
        let first = *first.get_or_insert((live, rss));
        // A thread that waits at the index's queue may hold some hundred bytes. A leak of one byte per worker
        // would exceed the limit.
        assert!(live.abs_diff(first.0) < 1_000, "{live} bytes are live, {} after the first", first.0);
        // A coarse check, because the allocator keeps varying amounts of freed memory.
        assert!(rss <= first.1 * 1.25, "{rss} after {}", first.1);
    }
}

#[test]
fn h4_five_thousand_workers_join_and_leave_at_once() {
    let (index, now) = (index(64 << 20), Instant::now());
    let started = Instant::now();
    (1..=5_000).for_each(|id| send_events(&index, WorkerId(id), chain(id, 4)));
    index.flush();
    let joined = started.elapsed();
    assert_eq!((index.stats().holders, index.stats().blocks), (5_000, 20_000));
    (1..=5_000).for_each(|id| index.record(WorkerId(id), DpRank(1), &vec![BlockHash(id)].into(), now));
    index.flush();
    (1..=5_000).for_each(|id| index.remove_worker(WorkerId(id)));
    index.flush();
    eprintln!("5,000 workers join in {joined:?}; with decisions and leaves {:?}", started.elapsed());
    assert_eq!(index.stats(), IndexStats { dropped: index.stats().dropped, ..IndexStats::default() });
}
