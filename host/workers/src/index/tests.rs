use proptest::prelude::*;

use super::*;

fn index(byte_budget: usize, ttl_s: u64) -> PrefixIndex {
    PrefixIndex::new(IndexConfig { byte_budget, ttl: Duration::from_secs(ttl_s) }).unwrap()
}

fn chain(ids: &[u64]) -> Arc<[BlockHash]> {
    // Distinct, spread hashes, as real ones are.
    ids.iter().map(|id| BlockHash(id.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31))).collect()
}

fn depth(index: &PrefixIndex, blocks: &[BlockHash], worker: u64, now: Instant) -> u32 {
    let mut overlaps = Overlaps::default();
    index.matches(blocks, now, &mut overlaps);
    overlaps.get(WorkerId(worker), DpRank(0)).device
}

#[test]
fn h3_the_longest_run_from_the_root_is_found_for_each_candidate() {
    let (index, now) = (index(1 << 20, 120), Instant::now());
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2, 3, 4]), now);
    index.record(WorkerId(2), DpRank(0), &chain(&[1, 2, 9]), now);
    index.record(WorkerId(2), DpRank(1), &chain(&[7]), now);
    index.flush();
    let mut overlaps = Overlaps::default();
    index.matches(&chain(&[1, 2, 3, 5]), now, &mut overlaps);
    let of = |worker, rank| overlaps.get(WorkerId(worker), DpRank(rank)).device;
    assert_eq!([of(1, 0), of(2, 0), of(2, 1), of(3, 0)], [3, 2, 0, 0]);
}

#[test]
fn f5_a_record_lasts_for_its_ttl_and_a_new_one_prolongs_it() {
    let (index, start) = (index(1 << 20, 120), Instant::now());
    let blocks = chain(&[1, 2, 3]);
    index.record(WorkerId(1), DpRank(0), &blocks, start);
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2]), start + Duration::from_secs(60));
    index.expire(start + Duration::from_secs(119));
    index.flush();
    assert_eq!(depth(&index, &blocks, 1, start), 3);
    index.expire(start + Duration::from_secs(120));
    index.flush();
    assert_eq!(depth(&index, &blocks, 1, start), 2);
    index.expire(start + Duration::from_secs(180));
    index.flush();
    assert_eq!(depth(&index, &blocks, 1, start), 0);
    assert_eq!(index.stats(), IndexStats { expired: 2, ..IndexStats::default() });
}

#[test]
fn h4_the_byte_budget_holds_and_the_oldest_give_way() {
    let (index, now) = (index(20_000, 120), Instant::now());
    for prompt in 0..200_u64 {
        let ids: Vec<u64> = (0..10).map(|block| prompt * 100 + block + 1).collect();
        index.record(WorkerId(1), DpRank(0), &chain(&ids), now);
        index.flush();
        assert!(index.stats().bytes <= 20_000);
    }
    let newest: Vec<u64> = (0..10).map(|block| 199 * 100 + block + 1).collect();
    assert_eq!(depth(&index, &chain(&newest), 1, now), 10);
    assert_eq!(depth(&index, &chain(&[1, 2, 3]), 1, now), 0);
    assert!(index.stats().evicted > 100);
}

#[test]
fn h4_a_worker_that_left_leaves_nothing() {
    let (index, now) = (index(1 << 20, 120), Instant::now());
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2]), now);
    index.record(WorkerId(1), DpRank(1), &chain(&[1, 2, 3]), now);
    index.remove_worker(WorkerId(1));
    index.flush();
    assert_eq!(index.stats(), IndexStats::default());
    // Its slot is given to the next worker, which must not inherit anything.
    index.record(WorkerId(2), DpRank(0), &chain(&[1]), now);
    index.flush();
    assert_eq!(depth(&index, &chain(&[1, 2, 3]), 2, now), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Prompts share prefixes as conversations do; the naive model keeps every record and compares.
    #[test]
    fn h3_lookups_equal_a_naive_model(
        records in proptest::collection::vec((0_u64..5, 0_u64..4, 1_usize..40, 0_u64..3), 1..30),
        removed in 0_u64..6,
    ) {
        let (index, now) = (index(64 << 20, 120), Instant::now());
        let prompt = |family: u64, fork: u64, len: usize| -> Vec<u64> {
            (0..len as u64).map(|place| if place < 8 { family * 1_000 + place + 1 } else { family * 1_000 + fork * 100 + place + 1 }).collect()
        };
        let mut model: Vec<(u64, Vec<u64>)> = Vec::new();
        for (worker, family, len, fork) in &records {
            let ids = prompt(*family, *fork, *len);
            index.record(WorkerId(*worker), DpRank(0), &chain(&ids), now);
            model.push((*worker, ids));
        }
        index.remove_worker(WorkerId(removed));
        model.retain(|(worker, _)| *worker != removed);
        index.flush();
        for (_, family, len, fork) in &records {
            let asked = prompt(*family, *fork, *len);
            let mut overlaps = Overlaps::default();
            index.matches(&chain(&asked), now, &mut overlaps);
            for worker in 0..5 {
                let held = model.iter().filter(|(owner, _)| *owner == worker);
                let expected = held.map(|(_, ids)| ids.iter().zip(&asked).take_while(|(a, b)| a == b).count()).max().unwrap_or(0);
                prop_assert_eq!(overlaps.get(WorkerId(worker), DpRank(0)).device as usize, expected);
            }
        }
    }
}
