//! States of the tree that contradict themselves, made on purpose.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{super::invariants::lines::Lines, *};

/// Does something that breaks a rule: that ends a build with debug assertions.
fn breaks<T>(run: impl FnOnce() -> T) -> Option<T> {
    let outcome = catch_unwind(AssertUnwindSafe(run));
    assert_eq!(outcome.is_err(), cfg!(debug_assertions));
    outcome.ok()
}

fn tree_of(ids: &[u64]) -> (TreeWriter, Vec<Stretch>) {
    let (mut tree, mut stretches) = (TreeWriter::new(Arc::default()), Vec::new());
    // Evenly spread, as real hashes are.
    let spread = |id: &u64| BlockHash(id.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31));
    let hashes: Vec<BlockHash> = ids.iter().map(spread).collect();
    assert_eq!(tree.place(None, &hashes, 0, &mut stretches), hashes.len());
    (tree, stretches)
}

#[test]
fn a_segment_that_is_missing_is_counted_each_time_and_logged_once() {
    let (tree, lines) = (TreeWriter::new(Arc::default()), Lines::default());
    tracing::subscriber::with_default(lines.clone(), || {
        for _ in 0..3 {
            assert!(breaks(|| tree.len(7)).is_none_or(|length| length == 0));
        }
    });
    assert_eq!((tree.shared.broken.counts(), lines.count()), ([3, 0, 0, 0], 1));
}

#[test]
fn a_cover_beyond_the_end_of_a_segment_is_counted() {
    let (mut tree, stretches) = tree_of(&[1, 2, 3]);
    tree.cover(&Stretch { count: 9, ..stretches[0] }, 0);
    breaks(|| tree.trim(stretches[0].slot));
    assert_eq!(tree.shared.broken.counts(), [0, 1, 0, 0]);
}

#[test]
fn a_segment_that_forgot_what_follows_it_is_counted() {
    let (mut tree, stretches) = tree_of(&[1, 2, 3]);
    let slot = stretches[0].slot;
    assert!(tree.split(slot, 1));
    tree.nodes[slot as usize].children = 0;
    let end = tree.nodes[slot as usize].rest.unwrap();
    breaks(|| tree.trim(end));
    assert_eq!(tree.shared.broken.counts(), [0, 0, 1, 0]);
}
