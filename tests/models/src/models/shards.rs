//! The block table. Blocks with several holders have lists, and the index of a list passes from one block to
//! another.

use std::sync::Arc;

use super::shards::{Shards, TableWriter};
use crate::id::BlockHash;

const ONE: BlockHash = BlockHash(10);
const OTHER: BlockHash = BlockHash(11);

#[derive(Clone, Copy)]
enum Step {
    Add(BlockHash, u32),
    Release(BlockHash, u32),
}

use Step::{Add, Release};

/// A lookup of a block: the holders that it has to find, and those that it may find.
type Lookup = (BlockHash, &'static [u32], &'static [u32]);

fn run(before: &[Step], steps: &'static [Step], lookups: [&'static [Lookup]; 2], last: [&[u32]; 2]) {
    let shards = Arc::new(Shards::default());
    let mut table = TableWriter::new(shards.clone());
    let mut step = |step: &Step| match *step {
        Add(block, holder) => drop(table.add(block, holder)),
        Release(block, holder) => drop(table.release(block, holder)),
    };
    before.iter().for_each(&mut step);
    let readers = lookups.map(|lookups| {
        let shards = shards.clone();
        loom::thread::spawn(move || {
            for (block, must, may) in lookups {
                let found = holders(&shards, *block);
                assert!(
                    must.iter().all(|holder| found.contains(holder)),
                    "a holder was not found: {found:?}"
                );
                assert!(found.iter().all(|holder| may.contains(holder)), "another block's holder: {found:?}");
            }
        })
    });
    steps.iter().for_each(step);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!([ONE, OTHER].map(|block| holders(&shards, block)), last, "the holders in the end");
}

fn holders(shards: &Shards, block: BlockHash) -> Vec<u32> {
    let mut found = Vec::new();
    shards.for_each_holder(block, |holder| found.push(holder));
    found
}

/// The list of a block is freed, and another block gets its index.
pub(crate) fn lists() {
    run(
        &[Add(ONE, 1), Add(ONE, 2), Add(OTHER, 3)],
        &[Release(ONE, 2), Add(OTHER, 4), Release(OTHER, 3)],
        [&[(ONE, &[1], &[1, 2])], &[(OTHER, &[], &[3, 4]), (ONE, &[1], &[1, 2])]],
        [&[1], &[4]],
    );
}

/// Holders change while the block always has at least one.
pub(crate) fn hands_over() {
    run(
        &[Add(ONE, 1)],
        &[Add(ONE, 2), Release(ONE, 1), Add(ONE, 3)],
        [&[(ONE, &[], &[1, 2, 3]), (OTHER, &[], &[])], &[(ONE, &[], &[1, 2, 3])]],
        [&[2, 3], &[]],
    );
}

/// Blocks are added until the map is rebuilt.
pub(crate) fn grows() {
    run(
        &[Add(ONE, 1), Add(BlockHash(12), 1), Add(BlockHash(13), 1)],
        &[Add(OTHER, 2), Add(ONE, 3), Release(BlockHash(12), 1)],
        [&[(ONE, &[1], &[1, 3]), (OTHER, &[], &[2])], &[(OTHER, &[], &[2]), (BlockHash(13), &[1], &[1])]],
        [&[1, 3], &[2]],
    );
}
