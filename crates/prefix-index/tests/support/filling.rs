//! Fills an index, and reads the memory of the process.

use std::time::Duration;

use prefix_index::{
    DpRank, IndexConfig, PrefixIndex, WorkerId,
    events::{Batch, KvEvent, Stored, Tier},
};

pub(crate) const BLOCK: usize = 16;
pub(crate) const MIB: f64 = 1024.0 * 1024.0;

pub(crate) fn index(byte_budget: usize) -> PrefixIndex {
    PrefixIndex::new(IndexConfig { byte_budget, ttl: Duration::from_secs(30), block_size: BLOCK })
        .expect("a thread")
}

/// Returns the resident bytes of this process.
pub(crate) fn rss() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number") * 1024.0
}

/// Returns an event that stores a chain of `count` blocks, which no other chain shares.
pub(crate) fn chain(name: u64, count: u64) -> Batch {
    let first = name * count;
    let token_ids = (0..count)
        .flat_map(|block| [u32::try_from((first + block) % 4_000_000_000).unwrap(); BLOCK])
        .collect();
    Batch {
        ts: 0.0,
        dp_rank: None,
        events: vec![KvEvent::Stored(Stored {
            hashes: (first..first + count).map(|hash| hash.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect(),
            parent: None,
            token_ids,
            block_size: u32::try_from(BLOCK).unwrap(),
            lora: None,
            tier: if name.is_multiple_of(4) { Tier::Host } else { Tier::Device },
            extra_keys: Vec::new(),
            ..Stored::default()
        })],
    }
}

pub(crate) fn send_events(index: &PrefixIndex, worker: WorkerId, batch: Batch) {
    let mut batch = batch;
    while let Err(returned) = index.events(worker, DpRank(0), batch) {
        batch = returned;
        std::thread::sleep(Duration::from_millis(1));
    }
}
