//! What a lookup says of the rows of a pool, against what it says of each candidate.

use super::*;
use crate::{
    Leg, ModelName, Pool, Registry, Snapshot, WorkerSpec,
    events::{Batch, KvEvent, Stored, Tier},
};

const WORKERS: u64 = 6;

/// Pools of the same workers, which joined in different orders and not all of them.
fn snapshot(order: &[u64]) -> Arc<Snapshot> {
    let registry = Registry::default();
    for id in order {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://a:{id},model=m,dp_size=2");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    }
    registry.snapshot()
}

fn stored(worker: u64, blocks: &[u64], tier: Tier) -> KvEvent {
    let tokens = blocks.iter().flat_map(|block| [*block as u32; 4]).collect();
    let hashes = (0_u64..).zip(blocks).map(|(depth, _)| worker << 32 | blocks[0] << 16 | depth).collect();
    KvEvent::Stored(Stored { hashes, token_ids: tokens, block_size: 4, tier, ..Stored::default() })
}

fn compare(overlaps: &mut Overlaps, pool: &Pool) -> Result<(), TestCaseError> {
    let mut found = vec![Matched::default(); pool.len()];
    overlaps.for_each_holder(pool, |row, matched| {
        assert_eq!(found[row as usize], Matched::default(), "a row comes once");
        found[row as usize] = matched;
    });
    for (candidate, found) in pool.iter().zip(found) {
        prop_assert_eq!(found, overlaps.get(candidate.worker_id(), candidate.rank));
    }
    Ok(())
}

proptest! {
    #[test]
    fn every_row_of_a_holder_gets_what_its_candidate_holds(
        steps in proptest::collection::vec((1..=WORKERS, 0_u32..2, 0_u8..8, 0_u64..3, 1_u64..6), 1..60),
    ) {
        let index = PrefixIndex::synchronous(IndexConfig { block_size: 4, ..IndexConfig::default() });
        let snapshots = [snapshot(&[3, 1, 6, 2, 5, 4]), snapshot(&[2, 9, 1]), snapshot(&[])];
        let model = ModelName::new("m");
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
                    let hashes = crate::block_hashes(&tokens, 4, &crate::Salt::default()).into();
                    index.record(worker, rank, &hashes, Instant::now());
                }
                _ => {
                    let tier = [Tier::Device, Tier::Device, Tier::Host, Tier::Disk][usize::from(action) % 4];
                    let events = vec![stored(id, &blocks, tier)];
                    index.events(worker, rank, Batch { ts: 0.0, dp_rank: None, events }).unwrap();
                }
            }
            let asked: Vec<u32> = (0..5).flat_map(|place| [(prompt * 10 + place) as u32; 4]).collect();
            index.matches(&crate::block_hashes(&asked, 4, &crate::Salt::default()), &mut overlaps);
            for snapshot in &snapshots {
                compare(&mut overlaps, snapshot.pool(&model, Leg::Aggregated))?;
            }
        }
    }
}
