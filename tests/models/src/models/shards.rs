//! The block table: blocks that several hold are in lists, whose places go from one block to another.

use super::shards::{Shards, Table};
use crate::{id::BlockHash, stand_in::sync::Arc};

const ONE: BlockHash = BlockHash(10);
const OTHER: BlockHash = BlockHash(11);

#[derive(Clone, Copy)]
enum Step {
    Add(BlockHash, u32),
    Release(BlockHash, u32),
}

use Step::{Add, Release};

/// A look at a block: whom it has to find, and whom it may.
type Look = (BlockHash, &'static [u32], &'static [u32]);

fn run(before: &[Step], steps: &'static [Step], looks: [&'static [Look]; 2], last: [&[u32]; 2]) {
    let shards = Arc::new(Shards::default());
    let mut table = Table::new(shards.clone());
    let mut step = |step: &Step| match *step {
        Add(block, slot) => drop(table.add(block, slot)),
        Release(block, slot) => drop(table.release(block, slot)),
    };
    before.iter().for_each(&mut step);
    let readers = looks.map(|looks| {
        let shards = shards.clone();
        loom::thread::spawn(move || {
            for (block, must, may) in looks {
                let found = holders(&shards, *block);
                assert!(must.iter().all(|slot| found.contains(slot)), "a holder was not found: {found:?}");
                assert!(found.iter().all(|slot| may.contains(slot)), "another block's holder: {found:?}");
            }
        })
    });
    steps.iter().for_each(step);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    assert_eq!([ONE, OTHER].map(|block| holders(&shards, block)), last, "who holds them in the end");
}

fn holders(shards: &Shards, block: BlockHash) -> Vec<u32> {
    let mut found = Vec::new();
    shards.holders(block, |slot| found.push(slot));
    found
}

/// A block's list goes, and its place becomes another's.
pub(crate) fn lists() {
    run(
        &[Add(ONE, 1), Add(ONE, 2), Add(OTHER, 3)],
        &[Release(ONE, 2), Add(OTHER, 4), Release(OTHER, 3)],
        [&[(ONE, &[1], &[1, 2])], &[(OTHER, &[], &[3, 4]), (ONE, &[1], &[1, 2])]],
        [&[1], &[4]],
    );
}

/// Holders change while the block is held by somebody.
pub(crate) fn hands_over() {
    run(
        &[Add(ONE, 1)],
        &[Add(ONE, 2), Release(ONE, 1), Add(ONE, 3)],
        [&[(ONE, &[], &[1, 2, 3]), (OTHER, &[], &[])], &[(ONE, &[], &[1, 2, 3])]],
        [&[2, 3], &[]],
    );
}

/// Blocks come until the table is written anew.
pub(crate) fn grows() {
    run(
        &[Add(ONE, 1), Add(BlockHash(12), 1), Add(BlockHash(13), 1)],
        &[Add(OTHER, 2), Add(ONE, 3), Release(BlockHash(12), 1)],
        [&[(ONE, &[1], &[1, 3]), (OTHER, &[], &[2])], &[(OTHER, &[], &[2]), (BlockHash(13), &[1], &[1])]],
        [&[1, 3], &[2]],
    );
}
