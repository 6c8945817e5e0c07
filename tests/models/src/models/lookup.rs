//! Lookups beside a writer that follows the index's rules: it publishes a holder before its blocks.

use std::sync::Arc;

use super::{
    Candidate,
    holders::HolderDirectory,
    lookup::Overlaps,
    shared::Shared,
    trail::{Stretch, Trail},
    tree::TreeWriter,
};
use crate::id::{BlockHash, DpRank, WorkerId};

const OLD: Candidate = (WorkerId(1), DpRank(0));
const NEW: Candidate = (WorkerId(2), DpRank(0));
const BLOCKS: [BlockHash; 3] = [BlockHash(10), BlockHash(11), BlockHash(12)];

fn assign(shared: &Shared, candidate: Candidate, holder: Option<u32>) {
    let mut directory = HolderDirectory::clone(&shared.directory.load());
    directory.set(candidate, 0, holder, 1);
    shared.directory.store(Arc::new(directory));
}

/// Notes that holder 0 has blocks of a prompt.
fn add(tree: &mut TreeWriter, trail: &mut Trail, blocks: &[BlockHash]) -> Vec<Stretch> {
    let mut stretches = Vec::new();
    tree.place(None, blocks, 0, &mut stretches);
    for stretch in &stretches {
        trail.add(*stretch);
        tree.cover(stretch, 0);
    }
    stretches
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
    let (mut tree, mut trail) = (TreeWriter::new(shared.tree.clone()), Trail::default());
    assign(&shared, OLD, Some(0));
    // The tree is never empty.
    tree.place(None, &[BlockHash(40)], 0, &mut Vec::new());
    add(&mut tree, &mut trail, &BLOCKS[..1]);
    let check = |old, new| {
        assert_eq!(new, 0, "it has another prompt's block");
        assert!(old <= 1, "it held one");
    };
    let reader = look_up(&shared, 2, check);
    tree.uncover(&mut trail, &BLOCKS, 0..1, 0);
    assign(&shared, OLD, None);
    assign(&shared, NEW, Some(0));
    add(&mut tree, &mut Trail::default(), &BLOCKS[1..2]);
    reader.join().unwrap();
}

/// The middle of three blocks is removed and comes back. At no moment are exactly two blocks held from the
/// root.
pub(crate) fn gap() {
    let shared = Arc::new(Shared::default());
    let (mut tree, mut trail) = (TreeWriter::new(shared.tree.clone()), Trail::default());
    assign(&shared, OLD, Some(0));
    let stretches = add(&mut tree, &mut trail, &BLOCKS);
    let reader = look_up(&shared, 3, |old, _| assert_ne!(old, 2, "one or three were held"));
    tree.uncover(&mut trail, &BLOCKS, 1..2, 0);
    let later = look_up(&shared, 3, |old, _| assert_eq!(old, 1, "blocks behind the gap do not count"));
    later.join().unwrap();
    tree.cover(&Stretch { at: 1, count: 1, ..stretches[0] }, 0);
    reader.join().unwrap();
}
