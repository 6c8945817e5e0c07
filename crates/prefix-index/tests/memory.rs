//! The index's resident memory stays within its budget.
//!
//! `cargo xtask nightly --only index-memory` prints the figures. It runs each test in a process of its own,
//! because memory that an earlier index freed would falsify them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "tests")]

use std::time::Duration;

use prefix_index::{
    BlockHash, DpRank, WorkerId,
    events::{KvEvent, Tier},
};
use tokio::time::Instant;

#[path = "support/filling.rs"]
mod filling;

use filling::{MIB, chain, index, rss, send_events};

/// Fills an index of 256 MiB with ten million blocks by events, or twenty million by decisions, and prints
/// what it took.
fn fill(kind: &str, workers: u64) {
    let (budget, before) = (256_usize << 20, rss());
    let (index, now, mut most) = (index(budget), Instant::now(), (0, 0.0_f64));
    let prompts = if kind == "events" { 100_000 } else { 200_000_u64 };
    for name in 0..prompts {
        let worker = WorkerId(1 + name % workers);
        if kind == "events" {
            send_events(&index, worker, chain(name, 100));
        } else {
            let hash = |block: u64| BlockHash((name * 100 + block + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let hashes: Vec<_> = (0..100).map(hash).collect();
            index.record(worker, DpRank(0), &hashes.into(), now);
        }
        if name.is_multiple_of(64) {
            index.flush();
            most = (most.0.max(index.stats().bytes), most.1.max(rss() - before));
        }
    }
    index.flush();
    let stats = index.stats();
    eprintln!(
        "{kind} of {workers} workers: budget {} MiB, counted at most {:.1}, resident at most {:.1} more, at the end {:.1} and \
         {:.1}; {} blocks, {:.1} bytes each",
        budget >> 20,
        most.0 as f64 / MIB,
        most.1 / MIB,
        stats.bytes as f64 / MIB,
        (rss() - before) / MIB,
        stats.blocks,
        stats.bytes as f64 / stats.blocks as f64,
    );
    assert!(most.0 <= budget as u64);
    assert!(stats.evicted > 0 && stats.dropped == 0);
    assert!(most.1 < budget as f64 * 1.1, "{}", most.1);
    // Remove most workers: counted and resident memory both fall.
    (1..workers).for_each(|worker| index.remove_worker(WorkerId(1 + worker)));
    index.flush();
    let left = index.stats();
    eprintln!(
        "  one worker left: counted {:.1}, resident {:.1}",
        left.bytes as f64 / MIB,
        (rss() - before) / MIB
    );
    index.remove_worker(WorkerId(1));
    index.flush();
    assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
}

/// Returns the time to evict a block where prompts branch `depth` times, so that only the deepest branch can
/// be evicted first.
fn time_to_evict(depth: u64) -> Duration {
    let (index, worker) = (index(32 << 20), WorkerId(1));
    let one = |hash: u64, parent: Option<u64>| {
        let mut batch = chain(hash, 1);
        if let Some(KvEvent::Stored(stored)) = batch.events.first_mut() {
            (stored.hashes, stored.parent, stored.tier) = (vec![hash], parent, Tier::Device);
        }
        batch
    };
    for step in 0..depth {
        let above = step.checked_sub(1).map(|above| 2 * above + 2);
        // The first block continues its parent's run, so the second one starts a new run.
        send_events(&index, worker, one(2 * step + 1, above));
        send_events(&index, worker, one(2 * step + 2, above));
    }
    index.flush();
    assert_eq!((index.stats().blocks, index.stats().evicted), (2 * depth, 0));
    let mut started = None;
    for name in 0..10_000 {
        send_events(&index, WorkerId(2), chain(1_000_000 + name, 100));
        index.flush();
        let evicted = index.stats().evicted;
        let first = *started.get_or_insert_with(Instant::now);
        if evicted == 0 {
            started = None;
        } else if evicted > 2 * depth {
            return first.elapsed() / u32::try_from(evicted).unwrap();
        }
    }
    Duration::MAX
}

#[test]
#[ignore = "measures time: cargo xtask nightly --only index-memory"]
fn h4_evicting_a_block_takes_the_same_time_for_shallow_and_deep_prompts() {
    let [shallow, deep] = [500, 20_000].map(time_to_evict);
    eprintln!("time per evicted block: {shallow:?} with 500 branches, {deep:?} with 20,000 branches");
    assert!(deep < 4 * shallow + Duration::from_micros(5));
}

#[test]
#[ignore = "minutes without optimisation: cargo xtask nightly --only index-memory"]
fn h4_ten_million_blocks_by_events_stay_within_the_budget() {
    fill("events", 16);
}

#[test]
#[ignore = "minutes without optimisation: cargo xtask nightly --only index-memory"]
fn h4_ten_million_blocks_by_one_engine_s_events_stay_within_the_budget() {
    fill("events", 1);
}

#[test]
#[ignore = "minutes without optimisation: cargo xtask nightly --only index-memory"]
fn h4_twenty_million_blocks_by_decisions_stay_within_the_budget() {
    fill("decisions", 16);
}
