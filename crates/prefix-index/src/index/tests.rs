use proptest::prelude::*;

use super::*;
use crate::events::KvEvent;

fn index(byte_budget: usize, ttl_s: u64) -> PrefixIndex {
    PrefixIndex::new(IndexConfig { byte_budget, ttl: Duration::from_secs(ttl_s), block_size: 4 }).unwrap()
}

fn chain(ids: &[u64]) -> Arc<[BlockHash]> {
    // Distinct and evenly spread, as real hashes are.
    ids.iter().map(|id| BlockHash(id.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31))).collect()
}

fn depth(index: &PrefixIndex, blocks: &[BlockHash], worker: u64) -> u32 {
    let mut overlaps = Overlaps::default();
    index.matches(blocks, &mut overlaps);
    overlaps.get(WorkerId(worker), DpRank(0)).device
}

#[test]
fn h3_the_longest_run_from_the_root_is_found_for_each_candidate() {
    let (index, now) = (index(1 << 20, 120), Instant::now());
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2, 3, 4]).into(), now);
    index.record(WorkerId(2), DpRank(0), &chain(&[1, 2, 9]).into(), now);
    index.record(WorkerId(2), DpRank(1), &chain(&[7]).into(), now);
    index.flush();
    let mut overlaps = Overlaps::default();
    index.matches(&chain(&[1, 2, 3, 5]), &mut overlaps);
    let of = |worker, rank| overlaps.get(WorkerId(worker), DpRank(rank)).device;
    // H3.1, H3.2
    assert_eq!([of(1, 0), of(2, 0), of(2, 1), of(3, 0)], [3, 2, 0, 0]);
}

#[test]
fn a_synchronous_index_has_applied_a_change_when_the_call_returns() {
    let index = PrefixIndex::synchronous(IndexConfig { block_size: 4, ..IndexConfig::default() });
    let blocks = chain(&[1, 2, 3]);
    index.record(WorkerId(1), DpRank(0), &blocks.clone().into(), Instant::now());
    assert_eq!(depth(&index, &blocks, 1), 3);
    index.remove_worker(WorkerId(1));
    assert_eq!(depth(&index, &blocks, 1), 0);
    index.flush();
}

#[test]
fn f5_a_record_lasts_for_its_ttl_and_a_new_one_extends_it() {
    let (index, start) = (index(1 << 20, 120), Instant::now());
    let blocks = chain(&[1, 2, 3]);
    index.record(WorkerId(1), DpRank(0), &blocks.clone().into(), start);
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2]).into(), start + Duration::from_secs(60));
    index.expire(start + Duration::from_secs(119));
    index.flush();
    assert_eq!(depth(&index, &blocks, 1), 3);
    index.expire(start + Duration::from_secs(120));
    index.flush();
    // F5.1
    assert_eq!(depth(&index, &blocks, 1), 2);
    index.expire(start + Duration::from_secs(180));
    index.flush();
    assert_eq!(depth(&index, &blocks, 1), 0);
    assert_eq!(index.stats(), IndexStats { expired: 2, ..IndexStats::default() });
}

#[test]
fn h4_the_byte_budget_holds_and_the_oldest_records_are_evicted() {
    let (index, now) = (index(20_000, 120), Instant::now());
    for prompt in 0..200_u64 {
        let ids: Vec<u64> = (0..10).map(|block| prompt * 100 + block + 1).collect();
        index.record(WorkerId(1), DpRank(0), &chain(&ids).into(), now);
        index.flush();
        // H4.1
        assert!(index.stats().bytes <= 20_000);
    }
    let newest: Vec<u64> = (0..10).map(|block| 199 * 100 + block + 1).collect();
    assert_eq!(depth(&index, &chain(&newest), 1), 10);
    // H4.1
    assert_eq!(depth(&index, &chain(&[1, 2, 3]), 1), 0);
    assert!(index.stats().evicted > 100);
}

#[test]
fn h4_removing_a_worker_removes_everything_of_it() {
    let (index, now) = (index(1 << 20, 120), Instant::now());
    index.record(WorkerId(1), DpRank(0), &chain(&[1, 2]).into(), now);
    index.record(WorkerId(1), DpRank(1), &chain(&[1, 2, 3]).into(), now);
    index.remove_worker(WorkerId(1));
    index.flush();
    // H4.2
    assert_eq!(index.stats(), IndexStats::default());
    // The next worker gets the same holder and must not inherit anything.
    index.record(WorkerId(2), DpRank(0), &chain(&[1]).into(), now);
    index.flush();
    assert_eq!(depth(&index, &chain(&[1, 2, 3]), 2), 1);
}

#[test]
fn h5_prompts_of_bytes_are_in_the_same_index_whether_or_not_a_feed_is_live() {
    let index = index(1 << 20, 120);
    let prompt = crate::Prefix::of_bytes(&[7; 640], 64, &crate::Salt::default());
    let record = |worker| {
        index.record(WorkerId(worker), DpRank(0), &prompt, Instant::now());
        index.flush();
        depth(&index, prompt.hashes(), worker)
    };
    let held = |worker| {
        index.flush();
        depth(&index, prompt.hashes(), worker)
    };
    let (rank, live) = (DpRank(0), |live| index.set_live(WorkerId(2), DpRank(0), live));
    // H5.1
    assert_eq!(record(1), 10);
    live(true);
    assert_eq!(record(2), 10);
    live(false);
    live(true);
    assert_eq!(held(2), 10, "events of tokens do not replace it");
    index.forget(WorkerId(2), rank);
    assert_eq!(held(2), 10, "an event that was lost says nothing about it");
    let batch = Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Cleared] };
    index.events(WorkerId(2), rank, batch).unwrap();
    // H5.9
    assert_eq!((held(2), held(1)), (0, 10));
    assert_eq!(record(2), 10);
    index.forget_records(WorkerId(2));
    assert_eq!(held(2), 0);
    index.expire(Instant::now() + Duration::from_secs(120));
    assert_eq!(held(1), 0);
    assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
}

#[test]
fn f5_a_withdrawn_decision_leaves_what_others_recorded() {
    let (index, start) = (Arc::new(index(1 << 20, 120)), Instant::now());
    let at = |second| start + Duration::from_secs(second);
    let decide = |ids: &[u64], second| {
        index.record_provisionally(WorkerId(1), DpRank(0), &chain(ids).into(), at(second))
    };
    let held = |ids: &[u64]| {
        index.flush();
        depth(&index, &chain(ids), 1)
    };
    decide(&[1, 2, 3, 4], 0).keep();
    decide(&[1, 2, 7], 10).keep();
    let whole = [1, 2, 3, 4, 5];
    let (first, second) = (decide(&whole, 20), decide(&whole, 30));
    assert_eq!(held(&whole), 5);
    // F5.4
    drop(first);
    assert_eq!(held(&whole), 5, "the other one may be accepted");
    drop(second);
    assert_eq!((held(&whole), held(&[1, 2, 7])), (4, 3));
    let mut useless = decide(&[8, 9], 35);
    useless.keep();
    assert_eq!(held(&[8, 9]), 2);
    // E6.11
    useless.withdraw();
    assert_eq!(held(&[8]), 0);
    drop((decide(&whole, 40), decide(&[8, 9], 40)));
    index.expire(at(121));
    assert_eq!((held(&whole), held(&[8])), (2, 0), "each lasts for its own time");
    index.expire(at(131));
    index.flush();
    assert_eq!((index.stats().blocks, index.stats().records, index.stats().bytes), (0, 0, 0));
    let followed = decide(&[1, 2], 140);
    index.set_live(WorkerId(1), DpRank(0), true);
    drop((followed, decide(&[1, 2], 141)));
    assert_eq!((held(&[1]), index.stats().records), (0, 0));
}

#[test]
fn h4_lookups_go_on_while_the_writer_works() {
    let index = index(1 << 28, 120);
    let asked = chain(&[1, 2, 3]);
    index.record(WorkerId(1), DpRank(0), &asked.clone().into(), Instant::now());
    index.flush();
    let ids: Vec<u64> = (10..1_000_000).collect();
    index.record(WorkerId(1), DpRank(0), &chain(&ids).into(), Instant::now());
    let writing = std::sync::atomic::AtomicBool::new(true);
    let (lookups, longest) = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            index.flush();
            writing.store(false, std::sync::atomic::Ordering::SeqCst);
        });
        let (mut lookups, mut longest) = (0_u64, Duration::ZERO);
        while writing.load(std::sync::atomic::Ordering::SeqCst) {
            let started = Instant::now();
            assert_eq!(depth(&index, &asked, 1), 3);
            longest = longest.max(started.elapsed());
            lookups += 1;
        }
        writer.join().unwrap();
        (lookups, longest)
    });
    // H4.3: one change of a million blocks holds up no lookup
    assert!(lookups > 500, "{lookups} lookups, the longest {longest:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Prompts share prefixes as conversations do. The model keeps every record and compares block by block.
    #[test]
    fn h3_lookups_equal_a_naive_model(
        records in proptest::collection::vec((0_u64..5, 0_u64..4, 1_usize..40, 0_u64..3), 1..30),
        removed in 0_u64..6,
    ) {
        let (index, now) = (index(64 << 20, 120), Instant::now());
        let prompt = |family: u64, fork: u64, len: usize| -> Vec<u64> {
            let block = |place| family * 1_000 + place + 1 + if place < 8 { 0 } else { fork * 100 };
            (0..len as u64).map(block).collect()
        };
        let mut model: Vec<(u64, Vec<u64>)> = Vec::new();
        for (worker, family, len, fork) in &records {
            let ids = prompt(*family, *fork, *len);
            index.record(WorkerId(*worker), DpRank(0), &chain(&ids).into(), now);
            model.push((*worker, ids));
        }
        index.remove_worker(WorkerId(removed));
        model.retain(|(worker, _)| *worker != removed);
        index.flush();
        for (_, family, len, fork) in &records {
            let asked = prompt(*family, *fork, *len);
            let mut overlaps = Overlaps::default();
            index.matches(&chain(&asked), &mut overlaps);
            for worker in 0..5 {
                let held = model.iter().filter(|(owner, _)| *owner == worker);
                let common = |ids: &Vec<_>| ids.iter().zip(&asked).take_while(|(a, b)| a == b).count();
                let expected = held.map(|(_, ids)| common(ids)).max().unwrap_or(0);
                // H3.1, H3.2
                prop_assert_eq!(overlaps.get(WorkerId(worker), DpRank(0)).device as usize, expected);
            }
        }
    }
}

mod rows;

mod events {
    //! The index under engines' events, also against a naive model.

    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        events::{Stored, Tier, decode_batch},
        hash::{Salt, block_hashes},
    };

    mod eviction;
    mod fleet;
    mod groups;
    mod parts;
    mod ranges;
    mod unplaced;

    const HERE: (WorkerId, DpRank) = (WorkerId(1), DpRank(0));

    fn apply(index: &PrefixIndex, events: Vec<KvEvent>) {
        let mut batch = Batch { ts: 0.0, dp_rank: None, events };
        while let Err(full) = index.events(HERE.0, HERE.1, batch) {
            batch = full;
        }
        index.flush();
    }

    fn stored(parent: Option<u64>, hashes: &[u64], tokens: &[u32], tier: Tier) -> KvEvent {
        KvEvent::Stored(Stored {
            hashes: hashes.to_vec(),
            parent,
            token_ids: tokens.to_vec(),
            block_size: 4,
            tier,
            ..Stored::default()
        })
    }

    fn removed(hashes: &[u64], tier: Tier) -> KvEvent {
        KvEvent::Removed { hashes: hashes.to_vec(), tier, group: None }
    }

    fn matched(index: &PrefixIndex, tokens: &[u32]) -> [u32; 3] {
        let mut overlaps = Overlaps::default();
        index.matches(&block_hashes(tokens, 4, &Salt::default()), &mut overlaps);
        let Matched { device, host, disk } = overlaps.get(HERE.0, HERE.1);
        [device, host, disk]
    }

    fn live() -> PrefixIndex {
        let index = index(1 << 24, 120);
        index.set_live(HERE.0, HERE.1, true);
        index
    }

    #[test]
    fn h2_blocks_are_found_by_our_hashes_and_removed_by_the_engine_s() {
        let (index, tokens) = (live(), (0..12).collect::<Vec<u32>>());
        apply(&index, vec![stored(None, &[901, 902], &tokens[..8], Tier::Device)]);
        apply(&index, vec![stored(Some(902), &[903], &tokens[8..], Tier::Device)]);
        // H2.1
        assert_eq!(matched(&index, &tokens), [3, 0, 0]);
        // Stored twice, so one removal is not enough.
        apply(
            &index,
            vec![stored(Some(902), &[903], &tokens[8..], Tier::Device), removed(&[903], Tier::Device)],
        );
        // H6.10
        assert_eq!(matched(&index, &tokens), [3, 0, 0]);
        // H6.20: a reused block is no further copy.
        apply(&index, vec![reused(&tokens), reused(&tokens)]);
        apply(&index, vec![removed(&[903], Tier::Device)]);
        // H2.2
        assert_eq!(matched(&index, &tokens), [2, 0, 0]);
        apply(&index, vec![KvEvent::Cleared]);
        assert_eq!((matched(&index, &tokens), index.stats().bytes), ([0; 3], 0));
    }

    /// A report of blocks 901 to 903 that a request reused.
    fn reused(tokens: &[u32]) -> KvEvent {
        let event = serde_json::json!({"type": "BlockStored", "block_hashes": [901, 902, 903],
            "parent_block_hash": null, "token_ids": tokens, "block_size": 4, "origin": "REUSED"});
        let payload = rmp_serde::to_vec(&serde_json::json!([1.0, [event]])).expect("msgpack");
        decode_batch(&payload).expect("a batch").events.remove(0)
    }

    #[test]
    fn h6_a_report_of_reused_blocks_restores_them() {
        let (index, tokens) = (live(), (0..12).collect::<Vec<u32>>());
        apply(&index, vec![stored(None, &[901], &tokens[..4], Tier::Device), reused(&tokens)]);
        // H6.20
        assert_eq!(matched(&index, &tokens), [3, 0, 0]);
        apply(&index, vec![removed(&[903, 902, 901], Tier::Device)]);
        assert_eq!((matched(&index, &tokens), index.stats().bytes), ([0; 3], 0));
    }

    #[test]
    fn h6_blocks_that_move_to_another_tier_in_one_batch_stay_known() {
        let (index, tokens) = (live(), (0..12).collect::<Vec<u32>>());
        apply(&index, vec![stored(None, &[1, 2, 3], &tokens, Tier::Device)]);
        let offloaded = |hashes: &[u64], tier| stored(None, hashes, &[], tier);
        // vLLM lists the events of the device first.
        let (device, host) = (removed(&[3, 2, 1], Tier::Device), offloaded(&[1, 2, 3], Tier::Host));
        apply(&index, vec![device, host]);
        // H6.21
        assert_eq!(matched(&index, &tokens), [0, 3, 0]);
        apply(&index, vec![removed(&[3, 2, 1], Tier::Host), offloaded(&[1, 2], Tier::Disk)]);
        assert_eq!(matched(&index, &tokens), [0, 0, 2]);
        // Blocks that the same batch stores are known only then.
        let later = stored(None, &[4], &[9; 4], Tier::Device);
        apply(&index, vec![removed(&[1], Tier::Disk), later, offloaded(&[1, 4], Tier::Host)]);
        apply(&index, vec![removed(&[4], Tier::Device)]);
        assert_eq!((matched(&index, &[9; 4]), matched(&index, &tokens)), ([0, 1, 0], [0, 1, 1]));
    }

    #[test]
    fn h2_the_engine_s_block_size_may_be_a_multiple_of_the_index_s() {
        let (index, tokens) = (live(), (0..32).collect::<Vec<u32>>());
        let wide = |hashes: &[u64], parent, tokens: &[u32]| {
            KvEvent::Stored(Stored {
                hashes: hashes.to_vec(),
                parent,
                token_ids: tokens.to_vec(),
                block_size: 16,
                ..Stored::default()
            })
        };
        apply(&index, vec![wide(&[1], None, &tokens[..16]), wide(&[2], Some(1), &tokens[16..])]);
        // H2.3
        assert_eq!(matched(&index, &tokens), [8, 0, 0]);
        apply(&index, vec![removed(&[2], Tier::Device)]);
        assert_eq!(matched(&index, &tokens), [4, 0, 0]);
        // A size that no engine has is ignored and counted.
        let odd = Stored { hashes: vec![3], token_ids: vec![0; 6], block_size: 0, ..Stored::default() };
        apply(&index, vec![KvEvent::Stored(odd)]);
        assert_eq!(index.stats().orphans, 1);
    }

    #[test]
    fn h2_a_block_with_an_unknown_parent_is_ignored_and_counted() {
        let (index, tokens) = (live(), (0..8).collect::<Vec<u32>>());
        apply(&index, vec![stored(Some(77), &[78], &tokens[4..], Tier::Device)]);
        assert_eq!((matched(&index, &tokens), index.stats().orphans), ([0; 3], 1));
    }

    #[test]
    fn h3_a_match_ends_at_a_gap_and_continues_when_it_is_filled() {
        let (index, tokens) = (live(), (0..40).collect::<Vec<u32>>());
        let hashes: Vec<u64> = (1..=10).collect();
        apply(&index, vec![stored(None, &hashes, &tokens, Tier::Device)]);
        apply(&index, vec![removed(&[4], Tier::Device)]);
        // H3.1
        assert_eq!(matched(&index, &tokens), [3, 0, 0], "blocks 5 to 10 are held but not reachable");
        apply(&index, vec![stored(Some(3), &[4], &tokens[12..16], Tier::Device)]);
        assert_eq!(matched(&index, &tokens), [10, 0, 0]);
    }

    #[test]
    fn h3_lower_tiers_continue_where_the_device_ends() {
        let (index, tokens) = (live(), (0..24).collect::<Vec<u32>>());
        let hashes: Vec<u64> = (1..=6).collect();
        apply(&index, vec![stored(None, &hashes, &tokens, Tier::Device)]);
        // Offloaded blocks are reported without tokens; then they are removed from the device.
        apply(
            &index,
            vec![stored(Some(2), &[3, 4, 5], &[], Tier::Host), stored(Some(5), &[6], &[], Tier::Disk)],
        );
        apply(&index, vec![removed(&[6, 5, 4, 3], Tier::Device)]);
        // H3.3, H6.9
        assert_eq!(matched(&index, &tokens), [2, 3, 1]);
        apply(&index, vec![removed(&[3], Tier::Host)]);
        assert_eq!(matched(&index, &tokens), [2, 0, 0]);
    }

    #[test]
    fn f5_decisions_are_recorded_only_while_the_event_feed_is_not_live() {
        let index = index(1 << 20, 120);
        let tokens: Vec<u32> = (0..16).collect();
        let blocks: Arc<[BlockHash]> = block_hashes(&tokens, 4, &Salt::default()).into();
        let record = || {
            index.record(HERE.0, HERE.1, &blocks.clone().into(), Instant::now());
            index.flush();
            matched(&index, &tokens)[0]
        };
        assert_eq!(record(), 4);
        index.set_live(HERE.0, HERE.1, true);
        // F5.1: approximate mode only
        assert_eq!(record(), 0);
        apply(&index, vec![stored(None, &[1, 2], &tokens[..8], Tier::Device)]);
        assert_eq!(record(), 2);
        index.set_live(HERE.0, HERE.1, false);
        index.flush();
        assert_eq!(matched(&index, &tokens)[0], 0, "the events are forgotten with the feed");
        assert_eq!(record(), 4);
    }

    #[test]
    fn h2_decisions_are_recorded_besides_events_while_an_engine_continues_unknown_blocks() {
        let index = index(1 << 20, 120);
        let tokens: Vec<u32> = (0..16).collect();
        let blocks: Arc<[BlockHash]> = block_hashes(&tokens, 4, &Salt::default()).into();
        let now = Instant::now();
        let record = |minutes: u64| {
            index.record(HERE.0, HERE.1, &blocks.clone().into(), now + Duration::from_mins(minutes));
            index.flush();
            matched(&index, &tokens)[0]
        };
        index.set_live(HERE.0, HERE.1, true);
        apply(&index, vec![stored(Some(7), &[8], &tokens[..4], Tier::Device)]);
        // H2.5
        assert_eq!(record(0), 4);
        assert_eq!(record(20), 0, "it continued none for a while");
        apply(&index, vec![stored(Some(7), &[9], &tokens[..4], Tier::Device)]);
        assert_eq!(record(21), 4);
        index.forget(HERE.0, HERE.1);
        index.flush();
        assert_eq!(record(40), 0, "the engine restarted");
    }

    #[test]
    fn h6_decisions_for_adapters_are_recorded_besides_events_that_name_none() {
        let tokens: Vec<u32> = (0..16).collect();
        let prefix = |lora| Prefix::of_tokens(&tokens, 4, &Salt { lora, cache: None }, &[]);
        let adapter = prefix(Some("ad"));
        let named = |lora: &str| {
            let KvEvent::Stored(stored) = stored(None, &[1, 2], &tokens[..8], Tier::Device) else { panic!() };
            KvEvent::Stored(Stored { lora: Some(lora.to_owned()), ..stored })
        };
        let found = |index: &PrefixIndex| {
            let mut overlaps = Overlaps::default();
            index.matches(adapter.hashes(), &mut overlaps);
            overlaps.get(HERE.0, HERE.1).device
        };
        let record = |index: &PrefixIndex, prefix: &Prefix| {
            index.record(HERE.0, HERE.1, prefix, Instant::now());
            index.flush();
        };
        for unnamed in [stored(None, &[1, 2], &tokens[..8], Tier::Device), named("3")] {
            let index = live();
            // H6.23: before the first event, and after one
            record(&index, &adapter);
            assert_eq!(found(&index), 4);
            apply(&index, vec![unnamed]);
            record(&index, &adapter);
            assert_eq!((found(&index), index.stats().records), (4, 2));
            record(&index, &prefix(None));
            assert_eq!(index.stats().records, 2, "those of the model are not recorded");
        }
        let index = live();
        record(&index, &adapter);
        apply(&index, vec![named("ad")]);
        // H6.23
        assert_eq!((found(&index), index.stats().records), (2, 0));
        record(&index, &adapter);
        assert_eq!((found(&index), index.stats().records), (2, 0));
    }

    #[test]
    fn h2_an_offloaded_chunk_without_tokens_is_named_by_its_last_block() {
        let (index, tokens) = (live(), (0..40).collect::<Vec<u32>>());
        let chunks = |hashes: &[u64]| {
            KvEvent::Stored(Stored {
                hashes: hashes.to_vec(),
                block_size: 16,
                tier: Tier::Host,
                ..Stored::default()
            })
        };
        let other: Vec<u32> = (0..12).chain(90..94).collect();
        let all: Vec<u64> = (1..=10).collect();
        apply(&index, vec![stored(None, &all, &tokens, Tier::Device), chunks(&[4, 8])]);
        apply(&index, vec![stored(Some(3), &[104], &other[12..], Tier::Device), chunks(&[104])]);
        let gone: Vec<u64> = [104].into_iter().chain(all.iter().rev().copied()).collect();
        apply(&index, vec![removed(&gone, Tier::Device)]);
        // H2.8
        assert_eq!(matched(&index, &tokens), [0, 8, 0]);
        assert_eq!(matched(&index, &tokens[..28]), [0, 4, 0]);
        assert_eq!(matched(&index, &other), [0, 4, 0]);
        apply(&index, vec![removed(&[8], Tier::Host), removed(&[104], Tier::Host)]);
        // H2.8: a block that two chunks share leaves with the last one
        assert_eq!((matched(&index, &tokens), matched(&index, &other)), ([0, 4, 0], [0; 3]));
        apply(&index, vec![removed(&[4], Tier::Host)]);
        assert_eq!((matched(&index, &tokens), index.stats().bytes), ([0; 3], 0));
        // H2.8, H6.21: in one batch
        apply(&index, vec![stored(None, &all, &tokens, Tier::Device)]);
        apply(&index, vec![removed(&all, Tier::Device), chunks(&[4, 8])]);
        assert_eq!(matched(&index, &tokens), [0, 8, 0]);
        // A chunk whose blocks are not known is not placed, and its removal takes nothing from others.
        apply(&index, vec![chunks(&[70]), removed(&[70], Tier::Host)]);
        assert_eq!(matched(&index, &tokens), [0, 8, 0]);
    }

    #[test]
    fn h2_an_offloaded_chunk_counts_as_a_whole_only() {
        let index = index(1 << 20, 120);
        let tokens: Vec<u32> = (0..64).collect();
        index.set_live(HERE.0, HERE.1, true);
        let KvEvent::Stored(event) = stored(None, &[1, 2], &tokens[..32], Tier::Host) else { panic!() };
        apply(&index, vec![KvEvent::Stored(Stored { block_size: 16, ..event })]);
        // H2.7
        assert_eq!(matched(&index, &tokens[..12]), [0, 0, 0]);
        assert_eq!(matched(&index, &tokens[..28]), [0, 4, 0]);
        assert_eq!(matched(&index, &tokens), [0, 8, 0]);
        apply(&index, vec![stored(None, &[11, 12, 13, 14, 15], &tokens[..20], Tier::Device)]);
        assert_eq!(matched(&index, &tokens[..28]), [5, 0, 0], "the device has more than the whole chunks");
        assert_eq!(matched(&index, &tokens[..32]), [5, 3, 0]);
    }

    #[test]
    fn h4_the_byte_budget_holds_for_events_and_removing_a_worker_removes_everything() {
        let index = index(60_000, 120);
        index.set_live(HERE.0, HERE.1, true);
        for prompt in 0..200_u64 {
            let tokens: Vec<u32> = (0..40).map(|place| prompt as u32 * 1_000 + place).collect();
            let hashes: Vec<u64> = (1..=10).map(|block| prompt * 100 + block).collect();
            apply(&index, vec![stored(None, &hashes, &tokens, Tier::Device)]);
            // H4.1
            assert!(index.stats().bytes <= 60_000, "{:?}", index.stats());
        }
        let newest: Vec<u32> = (0..40).map(|place| 199_000 + place).collect();
        assert_eq!(matched(&index, &newest), [10, 0, 0], "the oldest blocks were evicted");
        index.remove_worker(HERE.0);
        index.flush();
        // H4.2
        assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }

    #[test]
    fn h4_an_evicted_block_is_removed_from_every_tier() {
        let index = index(4_000, 120);
        index.set_live(HERE.0, HERE.1, true);
        let tokens: Vec<u32> = (0..40).collect();
        let hashes: Vec<u64> = (1..=10).collect();
        apply(
            &index,
            vec![stored(None, &hashes, &tokens, Tier::Device), stored(None, &hashes, &tokens, Tier::Host)],
        );
        for prompt in 1..40_u64 {
            let tokens: Vec<u32> = (0..4).map(|place| prompt as u32 * 1_000 + place).collect();
            apply(&index, vec![stored(None, &[prompt * 100], &tokens, Tier::Device)]);
        }
        assert_eq!(matched(&index, &tokens), [0, 0, 0]);
        index.remove_worker(HERE.0);
        index.flush();
        assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }

    #[test]
    fn h6_recorded_events_of_a_real_engine_fill_and_empty_the_index() {
        let index = PrefixIndex::new(IndexConfig { block_size: 32, ..IndexConfig::default() }).unwrap();
        index.set_live(HERE.0, HERE.1, true);
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/kvevents");
        let mut files: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let mut most = 0;
        for file in files.iter().filter(|file| file.extension().is_some_and(|kind| kind == "bin")) {
            let batch = decode_batch(&std::fs::read(file).unwrap()).unwrap();
            let _ = index.events(HERE.0, HERE.1, batch);
            index.flush();
            most = most.max(index.stats().blocks);
        }
        // H6.3, H6.11
        assert!(most > 0, "{:?}", index.stats());
        index.set_live(HERE.0, HERE.1, false);
        index.flush();
        assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }

    /// Returns the tokens of a block of a small tree, in which block `n` has the parent `n / 2`.
    fn tokens_of(block: u64) -> Vec<u32> {
        (0..4).map(|place| block as u32 * 10 + place).collect()
    }

    fn path_to(block: u64) -> Vec<u64> {
        let mut path: Vec<u64> =
            std::iter::successors(Some(block), |one| Some(one / 2).filter(|one| *one > 0)).collect();
        path.reverse();
        path
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn h3_lookups_after_any_events_equal_a_naive_model(
            steps in proptest::collection::vec((1_u64..32, 0_u8..5, 0_usize..3), 1..80),
        ) {
            let index = live();
            // (block, tier) -> times stored. A block is placed only if its parent is known.
            let mut model: BTreeMap<(u64, usize), u32> = BTreeMap::new();
            let tiers = [Tier::Device, Tier::Host, Tier::Disk];
            for (block, action, tier) in steps {
                let known = |model: &BTreeMap<(u64, usize), u32>, block: u64| {
                    // The index knows a block that is stored in any tier, and its ancestors.
                    model.keys().any(|(other, _)| path_to(*other).contains(&block))
                };
                match action {
                    0 => {
                        apply(&index, vec![removed(&[block], tiers[tier])]);
                        if let Some(count) = model.get_mut(&(block, tier)) {
                            *count -= 1;
                            if *count == 0 {
                                model.remove(&(block, tier));
                            }
                        }
                    }
                    1 if block == 1 => {
                        apply(&index, vec![KvEvent::Cleared]);
                        model.clear();
                    }
                    _ => {
                        let parent = Some(block / 2).filter(|parent| *parent > 0);
                        apply(&index, vec![stored(parent, &[block], &tokens_of(block), tiers[tier])]);
                        if parent.is_none_or(|parent| known(&model, parent)) {
                            *model.entry((block, tier)).or_default() += 1;
                        }
                    }
                }
                for leaf in 16_u64..32 {
                    let path = path_to(leaf);
                    let tokens: Vec<u32> = path.iter().flat_map(|block| tokens_of(*block)).collect();
                    let run = |from: usize, tier: usize| {
                        path[from..].iter().take_while(|block| model.contains_key(&(**block, tier))).count()
                    };
                    let device = run(0, 0);
                    let host = run(device, 1);
                    let disk = run(device + host, 2);
                    // H3.1, H3.3
                    prop_assert_eq!(matched(&index, &tokens), [device as u32, host as u32, disk as u32], "leaf {}", leaf);
                }
            }
            index.remove_worker(HERE.0);
            index.flush();
            prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
        }
    }
}
