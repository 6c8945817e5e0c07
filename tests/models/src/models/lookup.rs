//! Lookups, beside a writer that says what the index's own does: names before blocks, holes before what makes them.

use super::{lookup::Overlaps, names::Names, shards::{Shards, Table}};
use crate::{
    events::Tier,
    id::{BlockHash, DpRank, WorkerId},
    stand_in::{
        ArcSwap,
        sync::{Arc, atomic::Ordering},
    },
};

pub(crate) type Candidate = (WorkerId, DpRank);

/// What lookups and the writer share.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) shards: Arc<Shards>,
    pub(crate) names: ArcSwap<Names>,
}

/// What one candidate holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Matched {
    pub(crate) device: u32,
    pub(crate) host: u32,
    pub(crate) disk: u32,
}

const OLD: Candidate = (WorkerId(1), DpRank(0));
const NEW: Candidate = (WorkerId(2), DpRank(0));
const BLOCKS: [BlockHash; 3] = [BlockHash(10), BlockHash(11), BlockHash(12)];

fn name(shared: &Shared, candidate: Candidate, slot: Option<u32>) {
    let mut names = Names::clone(&shared.names.load());
    names.set(candidate, Tier::Device, slot, 1);
    shared.names.store(Arc::new(names));
}

/// The lookups of one thread, each checked by what it says of the old candidate and the new.
fn look(shared: &Arc<Shared>, blocks: usize, check: fn(u32, u32)) -> loom::thread::JoinHandle<()> {
    let shared = shared.clone();
    loom::thread::spawn(move || {
        let mut overlaps = Overlaps::default();
        overlaps.find(&shared, &BLOCKS[..blocks]);
        let [old, new] = [OLD, NEW].map(|(worker, rank)| overlaps.get(worker, rank).device);
        check(old, new);
    })
}

/// A candidate leaves, and another gets its slot and other blocks.
pub(crate) fn slot_goes_on() {
    let shared = Arc::new(Shared::default());
    let mut table = Table::new(shared.shards.clone());
    name(&shared, OLD, Some(0));
    table.add(BLOCKS[0], 0);
    let check = |old, new| {
        assert_eq!(new, 0, "it never held the block");
        assert!(old <= 1, "it held one");
    };
    let reader = look(&shared, 2, check);
    table.release(BLOCKS[0], 0);
    name(&shared, OLD, None);
    name(&shared, NEW, Some(0));
    table.add(BLOCKS[1], 0);
    reader.join().unwrap();
}

/// The middle of three blocks leaves and comes back. At no moment are two held from the root.
pub(crate) fn hole() {
    let shared = Arc::new(Shared::default());
    let mut table = Table::new(shared.shards.clone());
    name(&shared, OLD, Some(0));
    for block in BLOCKS {
        table.add(block, 0);
    }
    let reader = look(&shared, 3, |old, _| assert_ne!(old, 2, "one or three were held"));
    let names = shared.names.load();
    let holes = names.count_of_holes(0).unwrap();
    holes.fetch_add(1, Ordering::Release);
    table.release(BLOCKS[1], 0);
    let later = look(&shared, 3, |old, _| assert_eq!(old, 1, "what lies behind the hole does not count"));
    later.join().unwrap();
    table.add(BLOCKS[1], 0);
    holes.fetch_sub(1, Ordering::Release);
    reader.join().unwrap();
}
