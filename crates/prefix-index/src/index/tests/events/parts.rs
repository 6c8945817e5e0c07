//! Engines whose blocks do not end where those of the index do: 4 tokens.

use super::*;
use crate::events::ExtraKey;

fn store(parent: Option<u64>, hash: u64, tokens: &[u32], tier: Tier) -> KvEvent {
    KvEvent::Stored(Stored {
        hashes: vec![hash],
        parent,
        token_ids: tokens.to_vec(),
        block_size: tokens.len() as u32,
        tier,
        ..Stored::default()
    })
}

/// Token `place` of a prompt of this family; families part after 10 tokens.
fn token(family: u64, place: usize) -> u32 {
    if place < 10 { place as u32 } else { 1_000 * (family as u32 + 1) + place as u32 }
}

fn prompt(family: u64, tokens: usize) -> Vec<u32> {
    (0..tokens).map(|place| token(family, place)).collect()
}

/// Hash of block `number` of `size` tokens: it identifies the prefix up to its end.
fn hash(family: u64, size: usize, number: usize) -> u64 {
    let shared = (number + 1) * size <= 10;
    (if shared { 0 } else { family + 1 }) * 1_000_000 + (number as u64 + 1) * 100 + size as u64
}

/// Events that store the blocks of a prompt, in order.
fn storing(family: u64, size: usize, blocks: std::ops::Range<usize>, tier: Tier) -> Vec<KvEvent> {
    let tokens = prompt(family, blocks.end * size);
    let event = |number: usize| {
        let parent = number.checked_sub(1).map(|before| hash(family, size, before));
        store(parent, hash(family, size, number), &tokens[number * size..(number + 1) * size], tier)
    };
    blocks.map(event).collect()
}

#[test]
fn h2_pages_of_one_token_become_blocks_and_leave_in_any_order() {
    let index = live();
    apply(&index, storing(0, 1, 0..11, Tier::Device));
    assert_eq!(matched(&index, &prompt(0, 20)), [2, 0, 0]);
    apply(&index, storing(0, 1, 11..20, Tier::Device));
    assert_eq!(matched(&index, &prompt(0, 20)), [5, 0, 0]);
    // SGLang removes the pages of a node from the first to the last.
    let leaving = (13..20).map(|number| removed(&[hash(0, 1, number)], Tier::Device));
    for (number, event) in leaving.enumerate() {
        apply(&index, vec![event]);
        assert_eq!(matched(&index, &prompt(0, 20)), [3, 0, 0], "after {number}");
    }
    apply(&index, storing(0, 1, 13..16, Tier::Device));
    assert_eq!(matched(&index, &prompt(0, 20)), [4, 0, 0]);
    apply(&index, vec![KvEvent::Cleared]);
    assert_eq!((matched(&index, &prompt(0, 20)), index.stats().bytes), ([0; 3], 0));
}

#[test]
fn h2_prompts_that_part_within_a_block_share_what_lies_before_it() {
    for size in [1, 2, 3, 6, 10] {
        let index = live();
        let blocks = 30 / size;
        apply(&index, storing(0, size, 0..blocks, Tier::Device));
        let shared = 10 / size;
        apply(&index, storing(1, size, shared..blocks, Tier::Device));
        let most = (blocks * size / 4) as u32;
        assert_eq!(matched(&index, &prompt(0, 40)), [most, 0, 0], "size {size}");
        assert_eq!(matched(&index, &prompt(1, 40)), [most, 0, 0], "size {size}");
        assert_eq!(matched(&index, &prompt(2, 40)), [2, 0, 0], "size {size}");
        // The second prompt's own blocks leave; the first one stays whole.
        let own: Vec<u64> =
            (0..blocks).filter(|at| (at + 1) * size > 10).map(|at| hash(1, size, at)).collect();
        apply(&index, vec![removed(&own, Tier::Device)]);
        let left = ((blocks - own.len()) * size / 4) as u32;
        assert_eq!(matched(&index, &prompt(1, 40)), [left.max(2), 0, 0], "size {size}");
        assert_eq!(matched(&index, &prompt(0, 40)), [most, 0, 0], "size {size}");
    }
}

#[test]
fn h3_a_lower_tier_continues_where_whole_blocks_of_the_device_end() {
    let index = live();
    apply(&index, storing(0, 1, 0..20, Tier::Device));
    apply(&index, storing(0, 1, 0..20, Tier::Host));
    apply(&index, (14..20).rev().map(|at| removed(&[hash(0, 1, at)], Tier::Device)).collect());
    assert_eq!(matched(&index, &prompt(0, 20)), [3, 2, 0]);
}

#[test]
fn h2_a_block_that_begins_in_another_run_is_forgotten_with_what_it_begins_with() {
    let index = live();
    apply(&index, storing(0, 1, 0..12, Tier::Device));
    apply(&index, storing(1, 1, 10..12, Tier::Device));
    assert_eq!(matched(&index, &prompt(1, 12)), [3, 0, 0]);
    // Token 9 is part of both third blocks, and the second prompt's continues in a run of its own.
    apply(&index, vec![removed(&[hash(0, 1, 9)], Tier::Device)]);
    assert!(matched(&index, &prompt(1, 12))[0] <= 2, "never more than the engine has");
    assert!(matched(&index, &prompt(0, 12))[0] <= 2);
}

#[test]
fn h2_hashes_that_do_not_identify_a_prefix_are_not_placed() {
    // Old versions of SGLang hash the page alone.
    let index = live();
    apply(&index, vec![store(None, 1, &[1, 2, 3, 4], Tier::Device)]);
    apply(&index, vec![store(Some(1), 2, &[5, 6, 7, 8], Tier::Device)]);
    apply(&index, vec![store(None, 2, &[5, 6, 7, 8], Tier::Device)]);
    assert_eq!(matched(&index, &[1, 2, 3, 4, 5, 6, 7, 8]), [2, 0, 0]);
    assert_eq!((matched(&index, &[5, 6, 7, 8]), index.stats().orphans), ([0; 3], 1));
}

#[test]
fn h1_objects_of_an_event_are_part_of_the_hashes_and_are_no_salt() {
    use crate::hash::multimodal_block_hashes;
    let tokens: Vec<u32> = (0..16).collect();
    let object = |hash, offset| ExtraKey::Object { hash, offset };
    let text = |text: &str| ExtraKey::Text(text.to_owned());
    // (size, lora, keys by block, salt, objects by block of the index)
    type Case<'a> = (usize, Option<&'a str>, Vec<Vec<ExtraKey>>, Option<&'a str>, Vec<Vec<u64>>);
    let cases: Vec<Case<'_>> = vec![
        (
            4,
            None,
            vec![vec![object(7, 1)], vec![object(7, -3)], vec![], vec![object(9, 0), object(8, 2)]],
            None,
            vec![vec![7], vec![7], vec![], vec![8, 9]],
        ),
        (
            4,
            Some("l"),
            vec![vec![text("l"), object(7, 1), text("tenant")], vec![text("l")]],
            Some("tenant"),
            vec![vec![7]],
        ),
        (4, None, vec![vec![text("tenant")]], Some("tenant"), vec![]),
        (
            2,
            None,
            vec![vec![], vec![object(7, 1)], vec![object(7, -1)], vec![object(7, -3), object(5, 0)]],
            None,
            vec![vec![7], vec![5, 7]],
        ),
        (
            8,
            None,
            vec![vec![object(7, 5)], vec![object(7, -3)]],
            None,
            vec![vec![], vec![7], vec![7], vec![7]],
        ),
    ];
    for (size, lora, extra_keys, salt, objects) in cases {
        let index = live();
        let hashes: Vec<u64> = (1..=(16 / size) as u64).collect();
        let stored = Stored {
            hashes,
            token_ids: tokens.clone(),
            block_size: size as u32,
            lora: lora.map(str::to_owned),
            extra_keys: extra_keys.clone(),
            ..Stored::default()
        };
        apply(&index, vec![KvEvent::Stored(stored)]);
        let find = |objects: &[Vec<u64>]| {
            let mut overlaps = Overlaps::default();
            let salt = Salt { lora, cache: salt };
            index.matches(&multimodal_block_hashes(&tokens, 4, &salt, objects), &mut overlaps);
            overlaps.get(HERE.0, HERE.1).device
        };
        assert_eq!(find(&objects), 4, "{size} {extra_keys:?}");
        if !objects.is_empty() {
            assert!(find(&[]) < 4, "{size} {extra_keys:?}: another image");
        }
    }
}

#[test]
fn h4_memory_of_an_engine_s_tokens_by_block_size() {
    let bytes = [1, 8, 16, 32].map(|size| {
        let config = IndexConfig { block_size: 16, ..IndexConfig::default() };
        let index = PrefixIndex::new(config).unwrap();
        index.set_live(HERE.0, HERE.1, true);
        for talk in 0..128_u32 {
            let tokens: Vec<u32> = (0..512).map(|place| talk * 1_000 + place).collect();
            let name = |block: usize| u64::from(talk) * 1_000 + block as u64 + 1;
            let blocks = tokens.chunks(size).enumerate();
            let events = blocks.map(|(block, tokens)| {
                store(block.checked_sub(1).map(name), name(block), tokens, Tier::Device)
            });
            apply(&index, events.collect());
        }
        let stats = index.stats();
        assert_eq!((stats.blocks, stats.orphans), (4_096, 0), "size {size}");
        stats.bytes
    });
    println!("bytes by block size 1, 8, 16, 32: {bytes:?}");
    assert!(bytes[0] < 20 * bytes[2], "{bytes:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Prompts grow and shrink as in a radix tree: a prompt loses its end, in any order within one batch.
    #[test]
    fn h2_lookups_with_any_block_size_equal_what_the_engine_has(
        size in 1_usize..14,
        steps in proptest::collection::vec((0_u64..3, 0_usize..40, any::<bool>()), 1..40),
    ) {
        let index = live();
        let mut held = [0_usize; 3];
        let same = |a: u64, b: u64, number: usize| hash(a, size, number) == hash(b, size, number);
        for (family, tokens, forward) in steps {
            let (now, blocks) = (held[family as usize], tokens / size);
            if blocks >= now {
                apply(&index, storing(family, size, 0..blocks, Tier::Device));
                // A block that another prompt or an earlier turn stored is stored again.
                for number in 0..blocks {
                    let owners = (0..3).filter(|other| {
                        held[*other as usize] > number && same(*other, family, number)
                    });
                    for _ in 0..owners.count().min(1) {
                        apply(&index, vec![removed(&[hash(family, size, number)], Tier::Device)]);
                    }
                }
            } else {
                let gone = (blocks..now).filter(|number| {
                    let kept = |other: u64| {
                        other != family && held[other as usize] > *number && same(other, family, *number)
                    };
                    !(0..3).any(kept)
                });
                let mut gone: Vec<u64> = gone.map(|number| hash(family, size, number)).collect();
                if forward {
                    // A node leaves before the one above it, its blocks from the first to the last.
                    let shared = gone.iter().filter(|one| **one < 1_000_000).count();
                    gone.rotate_left(shared);
                } else {
                    gone.reverse();
                }
                apply(&index, vec![removed(&gone, Tier::Device)]);
            }
            held[family as usize] = blocks;
            for family in 0..3_u64 {
                let has = |number: &usize| (0..3_u64).any(|other| {
                    held[other as usize] > *number && same(other, family, *number)
                });
                let whole = (0..100).take_while(has).count() * size / 4;
                // Families share 10 tokens, but no hash of a block that ends after them.
                let found = matched(&index, &prompt(family, 60))[0] as usize;
                let shared = held.iter().map(|blocks| (blocks * size).min(10) / 4).max().unwrap_or(0);
                prop_assert_eq!(found, whole.max(shared), "family {} of {:?}", family, held);
            }
        }
        index.remove_worker(HERE.0);
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }
}

#[test]
fn h2_blocks_that_were_placed_for_others_only_leave_with_them() {
    let index = live();
    let stored = |hashes: &[u64], parent, tokens: usize, size, tier| {
        let (hashes, token_ids) = (hashes.to_vec(), vec![1; tokens]);
        KvEvent::Stored(Stored { hashes, parent, token_ids, block_size: size, tier, ..Stored::default() })
    };
    // All tokens are equal, so that blocks of several lengths have the same hashes.
    apply(
        &index,
        vec![
            stored(&[11, 15], None, 14, 7, Tier::Host),
            stored(&[1, 12, 1], Some(15), 9, 3, Tier::Device),
            stored(&[11, 15, 14], None, 24, 8, Tier::Host),
            removed(&[1], Tier::Device),
            stored(&[1], Some(11), 0, 3, Tier::Device),
            KvEvent::Cleared,
        ],
    );
    let stats = index.stats();
    assert_eq!((stats.blocks, stats.bytes), (0, 0));
}
