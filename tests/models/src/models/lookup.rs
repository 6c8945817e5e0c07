//! Lookups beside a writer that follows the index's rules: it publishes a holder before its blocks, and
//! counts a gap before it makes it.

use std::sync::Arc;

use super::{
    holders::{Candidate, HolderDirectory},
    lookup::Overlaps,
    shards::TableWriter,
    shared::Shared,
};
use crate::{
    events::Tier,
    id::{BlockHash, DpRank, WorkerId},
    loom_types::atomic::Ordering,
};

const OLD: Candidate = (WorkerId(1), DpRank(0));
const NEW: Candidate = (WorkerId(2), DpRank(0));
const BLOCKS: [BlockHash; 3] = [BlockHash(10), BlockHash(11), BlockHash(12)];

fn assign(shared: &Shared, candidate: Candidate, holder: Option<u32>) {
    let mut directory = HolderDirectory::clone(&shared.directory.load());
    directory.set(candidate, Tier::Device, holder, 1);
    shared.directory.store(Arc::new(directory));
}

/// Looks up blocks in a thread of its own and checks what it finds for the old candidate and the new one.
fn look_up(shared: &Arc<Shared>, blocks: usize, check: fn(u32, u32)) -> loom::thread::JoinHandle<()> {
    let shared = shared.clone();
    loom::thread::spawn(move || {
        let mut overlaps = Overlaps::default();
        overlaps.find(&shared, &BLOCKS[..blocks]);
        let [old, new] = [OLD, NEW].map(|(worker, rank)| overlaps.get(worker, rank).device);
        check(old, new);
    })
}

/// A candidate leaves, and another gets its holder and other blocks.
pub(crate) fn holder_is_reassigned() {
    let shared = Arc::new(Shared::default());
    let mut table = TableWriter::new(shared.shards.clone());
    assign(&shared, OLD, Some(0));
    table.add(BLOCKS[0], 0);
    let check = |old, new| {
        assert_eq!(new, 0, "it never held the block");
        assert!(old <= 1, "it held one");
    };
    let reader = look_up(&shared, 2, check);
    table.release(BLOCKS[0], 0);
    assign(&shared, OLD, None);
    assign(&shared, NEW, Some(0));
    table.add(BLOCKS[1], 0);
    reader.join().unwrap();
}

/// The middle of three blocks is removed and comes back. At no moment are exactly two blocks held from the
/// root.
pub(crate) fn gap() {
    let shared = Arc::new(Shared::default());
    let mut table = TableWriter::new(shared.shards.clone());
    assign(&shared, OLD, Some(0));
    for block in BLOCKS {
        table.add(block, 0);
    }
    let reader = look_up(&shared, 3, |old, _| assert_ne!(old, 2, "one or three were held"));
    let directory = shared.directory.load();
    let gaps = directory.gaps(0).unwrap();
    gaps.fetch_add(1, Ordering::Release);
    table.release(BLOCKS[1], 0);
    let later = look_up(&shared, 3, |old, _| assert_eq!(old, 1, "blocks behind the gap do not count"));
    later.join().unwrap();
    table.add(BLOCKS[1], 0);
    gaps.fetch_sub(1, Ordering::Release);
    reader.join().unwrap();
}
