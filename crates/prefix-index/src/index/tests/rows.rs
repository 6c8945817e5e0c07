//! Compares a lookup over the rows of a list with lookups of each candidate alone.

use super::*;
use crate::events::{Batch, KvEvent, Stored, Tier};

const WORKERS: u64 = 6;

/// Two ranks of each of these workers, in their order.
struct List {
    serial: u64,
    candidates: Vec<Candidate>,
    by_id: Vec<(Candidate, u32)>,
}

impl List {
    fn of(serial: u64, workers: &[u64]) -> Self {
        let ranks = |id: &u64| [0, 1].map(|rank| (WorkerId(*id), DpRank(rank)));
        let candidates: Vec<Candidate> = workers.iter().flat_map(ranks).collect();
        let mut by_id: Vec<_> = candidates.iter().copied().zip(0..).collect();
        by_id.sort_unstable();
        Self { serial, candidates, by_id }
    }
}

fn stored(worker: u64, blocks: &[u64], tier: Tier) -> KvEvent {
    let tokens = blocks.iter().flat_map(|block| [*block as u32; 4]).collect();
    let hashes = (0_u64..).zip(blocks).map(|(depth, _)| worker << 32 | blocks[0] << 16 | depth).collect();
    KvEvent::Stored(Stored { hashes, token_ids: tokens, block_size: 4, tier, ..Stored::default() })
}

fn compare(overlaps: &mut Overlaps, list: &List) -> Result<(), TestCaseError> {
    let mut found = vec![Matched::default(); list.candidates.len()];
    let rows = CandidateRows { serial: list.serial, by_id: &list.by_id };
    overlaps.for_each_holder(rows, |row, matched| {
        assert_eq!(found[row as usize], Matched::default(), "a row comes once");
        found[row as usize] = matched;
    });
    for ((worker, rank), found) in list.candidates.iter().zip(found) {
        prop_assert_eq!(found, overlaps.get(*worker, *rank));
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_row_of_a_holder_gets_what_its_candidate_holds(
        steps in proptest::collection::vec((1..=WORKERS, 0_u32..2, 0_u8..8, 0_u64..3, 1_u64..6), 1..60),
    ) {
        let index = PrefixIndex::synchronous(IndexConfig { block_size: 4, ..IndexConfig::default() });
        let lists = [List::of(1, &[3, 1, 6, 2, 5, 4]), List::of(2, &[2, 9, 1]), List::of(0, &[])];
        // One set of buffers, as a thread has.
        let mut overlaps = Overlaps::default();
        for (id, rank, action, prompt, length) in steps {
            let (worker, rank) = (WorkerId(id), DpRank(rank));
            let blocks: Vec<u64> = (0..length).map(|place| prompt * 10 + place).collect();
            match action {
                0 => index.remove_worker(worker),
                1 => index.set_live(worker, rank, length % 2 == 0),
                2 | 3 => {
                    let tokens: Vec<u32> = blocks.iter().flat_map(|block| [*block as u32; 4]).collect();
                    let prefix = crate::block_hashes(&tokens, 4, &crate::Salt::default()).into();
                    index.record(worker, rank, &prefix, Instant::now());
                }
                _ => {
                    let tier = [Tier::Device, Tier::Device, Tier::Host, Tier::Disk][usize::from(action) % 4];
                    let events = vec![stored(id, &blocks, tier)];
                    index.events(worker, rank, Batch { ts: 0.0, dp_rank: None, events }).unwrap();
                }
            }
            let asked: Vec<u32> = (0..5).flat_map(|place| [(prompt * 10 + place) as u32; 4]).collect();
            index.matches(&crate::block_hashes(&asked, 4, &crate::Salt::default()), &mut overlaps);
            for list in &lists {
                compare(&mut overlaps, list)?;
            }
        }
    }
}
