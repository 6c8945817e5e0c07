//! The tree of prefixes beside lookups: segments are split, grow, shrink and disappear. A lookup finds no
//! fewer blocks than a holder had all the time, and never a block that it never had.

use std::sync::Arc;

use super::{
    segments::{Segment, Tree},
    trail::{Stretch, Trail},
    tree::{Spot, TreeWriter},
};
use crate::id::BlockHash;

const A: [BlockHash; 3] = [BlockHash(10), BlockHash(11), BlockHash(12)];
const B: [BlockHash; 3] = [BlockHash(10), BlockHash(21), BlockHash(22)];

/// A lookup of a prompt: a holder, and the numbers of blocks that it may find.
type Lookup = (&'static [BlockHash], u32, &'static [usize]);

/// The run of one holder.
#[derive(Default)]
struct Run {
    hashes: Vec<BlockHash>,
    trail: Trail,
}

fn add(tree: &mut TreeWriter, run: &mut Run, hashes: &[BlockHash], holder: u32) {
    let from = run.hashes.len();
    let after: Option<Spot> = from.checked_sub(1).map(|last| {
        tree.locate(&mut run.trail, &run.hashes, last).expect("a held block has a place")
    });
    let mut stretches = Vec::new();
    assert_eq!(tree.place(after, hashes, holder, &mut stretches), hashes.len());
    run.hashes.extend(hashes);
    for stretch in stretches {
        run.trail.add(Stretch { from: stretch.from + from, ..stretch });
        tree.cover(&stretch, holder);
    }
}

/// Removes the blocks of a run from `from` on.
fn cut(tree: &mut TreeWriter, run: &mut Run, from: usize, holder: u32) {
    tree.uncover(&mut run.trail, &run.hashes, from..run.hashes.len(), holder);
    run.hashes.truncate(from);
    run.trail.truncate(from);
}

fn extend(end: &mut usize, before: usize, matching: usize, segment: &Segment, holder: u32) {
    for cover in segment.covers().filter(|cover| cover.holder == holder) {
        if (before + cover.from..before + cover.to.min(matching)).contains(end) {
            *end = before + cover.to.min(matching);
        }
    }
}

fn held(tree: &Tree, prompt: &[BlockHash], holder: u32) -> usize {
    let mut end = 0;
    tree.walk(prompt, |before, matching, segment| {
        extend(&mut end, before, matching, segment, holder);
        true
    });
    end
}

/// Runs the writer's steps beside two lookups.
fn run(
    before: impl FnOnce(&mut TreeWriter, &mut [Run; 3]),
    steps: impl FnOnce(&mut TreeWriter, &mut [Run; 3]),
    lookups: [&'static [Lookup]; 2],
) {
    let shared = Arc::new(Tree::default());
    let (mut tree, mut runs) = (TreeWriter::new(shared.clone()), <[Run; 3]>::default());
    before(&mut tree, &mut runs);
    let readers = lookups.map(|lookups| {
        let shared = shared.clone();
        loom::thread::spawn(move || {
            for (prompt, holder, expected) in lookups {
                let found = held(&shared, prompt, *holder);
                assert!(expected.contains(&found), "holder {holder}: {found}, not one of {expected:?}");
            }
        })
    });
    steps(&mut tree, &mut runs);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    for (holder, run) in (0..).zip(&mut runs) {
        assert_eq!(held(&shared, &run.hashes, holder), run.hashes.len(), "holder {holder} in the end");
        cut(&mut tree, run, 0, holder);
    }
    assert_eq!((tree.blocks(), tree.bytes()), (0, 0));
}

/// A prompt parts within a segment.
pub(crate) fn splits() {
    run(
        |tree, [zero, ..]| add(tree, zero, &A, 0),
        |tree, [_, one, _]| add(tree, one, &B, 1),
        [&[(&A, 0, &[3]), (&B, 0, &[1])], &[(&B, 1, &[0, 1, 3]), (&A, 1, &[0, 1])]],
    );
}

/// Blocks at the end of a segment leave, and other ones follow in their place.
pub(crate) fn replaced() {
    run(
        |tree, [zero, ..]| add(tree, zero, &A, 0),
        |tree, [zero, ..]| {
            cut(tree, zero, 1, 0);
            add(tree, zero, &B[1..2], 0);
        },
        [&[(&A, 0, &[1, 3]), (&B, 0, &[1, 2])], &[(&A, 0, &[1, 3])]],
    );
}

/// The blocks of a holder leave, and another one's block, of another prompt, gets the slot.
pub(crate) fn passes_on() {
    const OTHER: [BlockHash; 1] = [BlockHash(30)];
    run(
        |tree, [zero, _, two]| {
            add(tree, zero, &A[..1], 0);
            add(tree, two, &[BlockHash(40)], 2);
        },
        |tree, [zero, one, _]| {
            cut(tree, zero, 0, 0);
            add(tree, one, &OTHER, 1);
        },
        [&[(&A, 1, &[0])], &[(&OTHER, 1, &[0, 1]), (&OTHER, 0, &[0])]],
    );
}

/// Holders of the same blocks come and go.
pub(crate) fn hands_over() {
    run(
        |tree, [zero, one, _]| {
            add(tree, zero, &A[..2], 0);
            add(tree, one, &A[..1], 1);
        },
        |tree, [zero, one, two]| {
            cut(tree, one, 0, 1);
            add(tree, two, &A[..2], 2);
            cut(tree, zero, 1, 0);
        },
        [&[(&A, 0, &[1, 2]), (&A, 1, &[0, 1])], &[(&A, 2, &[0, 2]), (&A, 0, &[1, 2])]],
    );
}

/// A segment grows beyond its space, and beyond the longest one.
pub(crate) fn grows() {
    const LONG: &[BlockHash] =
        &[BlockHash(10), BlockHash(11), BlockHash(12), BlockHash(13), BlockHash(14), BlockHash(15)];
    const FIRST: &[BlockHash] = LONG.split_at(3).0;
    run(
        |tree, [zero, ..]| add(tree, zero, &LONG[..2], 0),
        |tree, [zero, ..]| {
            add(tree, zero, &LONG[2..3], 0);
            add(tree, zero, &LONG[3..], 0);
        },
        [&[(LONG, 0, &[2, 3, 4, 6])], &[(FIRST, 0, &[2, 3])]],
    );
}
