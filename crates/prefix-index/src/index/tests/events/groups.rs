//! Engines with several cache groups: 4 tokens a block, unless a test says otherwise.

use super::*;
use crate::events::GroupKind;

/// A store event of a group: the tokens of as many blocks as there are hashes.
fn of_group(group: u32, kind: GroupKind, parent: Option<u64>, hashes: &[u64], tokens: &[u32]) -> KvEvent {
    KvEvent::Stored(Stored {
        hashes: hashes.to_vec(),
        parent,
        token_ids: tokens.to_vec(),
        block_size: 4,
        group: Some(group),
        kind: Some(kind),
        ..Stored::default()
    })
}

fn removed_of(group: u32, hashes: &[u64]) -> KvEvent {
    KvEvent::Removed { hashes: hashes.to_vec(), tier: Tier::Device, group: Some(group) }
}

fn depth_of(index: &PrefixIndex, tokens: &[u32]) -> u32 {
    matched(index, tokens)[0]
}

#[test]
fn h6_the_first_group_of_full_attention_is_followed_whatever_its_number() {
    let (index, tokens) = (live(), (0..40).collect::<Vec<u32>>());
    let hashes: Vec<u64> = (1..=10).collect();
    // Three groups of Mamba come first. Of five blocks each, only the last one has a hash.
    for half in 0..2 {
        let (own, parent) = (&hashes[half * 5..half * 5 + 5], half.checked_sub(1).map(|_| 5));
        let tokens = &tokens[half * 20..half * 20 + 20];
        let mut events: Vec<_> =
            (0..3).map(|group| of_group(group, GroupKind::State, parent, &own[4..], tokens)).collect();
        events.push(of_group(3, GroupKind::Full, parent, own, tokens));
        apply(&index, events);
    }
    // H6.13
    assert_eq!(depth_of(&index, &tokens), 10);
    assert_eq!(index.stats().orphans, 0);
    // Without a state after the sixth block, the engine continues from the fifth.
    // H6.15
    assert_eq!(depth_of(&index, &tokens[..28]), 5);
    apply(&index, vec![removed_of(1, &[10])]);
    assert_eq!(depth_of(&index, &tokens), 5);
    apply(&index, vec![removed_of(2, &[5])]);
    assert_eq!(depth_of(&index, &tokens), 0);
    apply(&index, vec![of_group(2, GroupKind::State, None, &[5], &tokens[..20])]);
    assert_eq!(depth_of(&index, &tokens), 5);
    // Only the followed group counts. The states remain.
    apply(&index, vec![removed_of(3, &[3])]);
    assert_eq!(depth_of(&index, &tokens), 0);
    index.remove_worker(HERE.0);
    index.flush();
    assert_eq!(index.stats(), IndexStats::default());
}

#[test]
fn h6_blocks_in_front_of_the_window_may_leave() {
    let (index, tokens) = (live(), (0..64).collect::<Vec<u32>>());
    let hashes: Vec<u64> = (1..=16).collect();
    let all = |group, kind| of_group(group, kind, None, &hashes, &tokens);
    // A window of 17 tokens: 16 before the next one, in 4 blocks.
    apply(&index, vec![all(0, GroupKind::Window(17)), all(1, GroupKind::Full)]);
    assert_eq!(depth_of(&index, &tokens), 16);
    apply(&index, vec![removed_of(0, &hashes[..12])]);
    // H6.15
    assert_eq!(depth_of(&index, &tokens), 16);
    // A shorter prompt ends where the window is gone.
    assert_eq!(depth_of(&index, &tokens[..60]), 0);
    apply(&index, vec![removed_of(0, &hashes[12..13])]);
    assert_eq!(depth_of(&index, &tokens), 0);
    apply(&index, vec![of_group(0, GroupKind::Window(17), None, &hashes[..4], &tokens[..16])]);
    assert_eq!(depth_of(&index, &tokens), 4);
    apply(&index, vec![KvEvent::Cleared]);
    assert_eq!((depth_of(&index, &tokens), index.stats().bytes), (0, 0));
    apply(&index, vec![all(1, GroupKind::Full)]);
    assert_eq!(depth_of(&index, &tokens), 0, "the window is empty");
    apply(&index, vec![all(0, GroupKind::Window(17))]);
    assert_eq!(depth_of(&index, &tokens), 16);
}

#[test]
fn h6_without_kinds_group_zero_is_followed() {
    let (index, tokens) = (live(), (0..16).collect::<Vec<u32>>());
    let plain = |group, hashes: &[u64], tokens: &[u32]| {
        let KvEvent::Stored(stored) = stored(None, hashes, tokens, Tier::Device) else { unreachable!() };
        KvEvent::Stored(Stored { group, ..stored })
    };
    apply(&index, vec![plain(Some(1), &[1, 2, 3, 4], &tokens), plain(Some(0), &[1, 2], &tokens[..8])]);
    // H6.13
    assert_eq!(depth_of(&index, &tokens), 2);
    apply(&index, vec![removed_of(1, &[1, 2, 3, 4])]);
    assert_eq!(depth_of(&index, &tokens), 2);
    // The engine turns out to have another group of full attention.
    apply(&index, vec![of_group(1, GroupKind::Full, None, &[1, 2, 3, 4], &tokens)]);
    assert_eq!(depth_of(&index, &tokens), 4);
    // A lower number comes first.
    apply(&index, vec![of_group(0, GroupKind::Full, None, &[1], &tokens[..4])]);
    assert_eq!(depth_of(&index, &tokens), 1);
}

#[test]
fn h6_a_second_group_of_full_attention_has_to_have_the_prefix_too() {
    let (index, tokens) = (live(), (0..16).collect::<Vec<u32>>());
    let all = |group| of_group(group, GroupKind::Full, None, &[1, 2, 3, 4], &tokens);
    apply(&index, vec![all(0), all(1), removed_of(1, &[3])]);
    // H6.15
    assert_eq!(depth_of(&index, &tokens), 2);
}

#[test]
fn h6_tokens_that_are_not_those_of_the_hashes_place_no_block() {
    let (index, tokens) = (live(), (0..20).collect::<Vec<u32>>());
    // Only one of five blocks has a hash, and the event does not say which.
    apply(&index, vec![stored(None, &[5], &tokens, Tier::Device)]);
    // H6.14
    assert_eq!((depth_of(&index, &tokens), index.stats().orphans), (0, 1));
    apply(&index, vec![stored(None, &[1, 2, 3], &tokens[..8], Tier::Device)]);
    assert_eq!((depth_of(&index, &tokens), index.stats().orphans), (0, 4));
    apply(&index, vec![stored(None, &[1, 2], &tokens[..8], Tier::Device)]);
    // Blocks that are known by their hashes are stored once more.
    apply(&index, vec![stored(None, &[2], &tokens[..8], Tier::Device), removed(&[2], Tier::Device)]);
    assert_eq!(depth_of(&index, &tokens), 2);
}

#[test]
fn h6_decisions_are_recorded_while_no_group_can_be_followed() {
    let (index, tokens) = (live(), (0..16).collect::<Vec<u32>>());
    let blocks: Arc<[BlockHash]> = block_hashes(&tokens, 4, &Salt::default()).into();
    let record = || {
        index.record(HERE.0, HERE.1, &blocks.clone().into(), Instant::now());
        index.flush();
        depth_of(&index, &tokens)
    };
    assert_eq!(record(), 0);
    apply(&index, vec![of_group(0, GroupKind::State, None, &[4], &tokens[12..])]);
    // H6.16
    assert_eq!(record(), 4);
    apply(&index, vec![of_group(1, GroupKind::Full, None, &[1, 2], &tokens[..8])]);
    // The events of attention replace the decisions. The state after block 4 is not one after block 2, but
    // no block of the group fits yet.
    assert_eq!((record(), index.stats().records), (2, 0));
}

#[test]
fn h6_kinds_that_are_not_understood_limit_nothing() {
    for kind in [GroupKind::Other, GroupKind::Window(9)] {
        let (index, tokens) = (live(), (0..16).collect::<Vec<u32>>());
        let KvEvent::Stored(stored) = of_group(0, kind, None, &[2], &tokens[..6]) else { unreachable!() };
        // Blocks of six tokens do not end where those of the followed group do.
        let odd = KvEvent::Stored(Stored { block_size: 6, ..stored });
        apply(&index, vec![odd, of_group(1, GroupKind::Full, None, &[1, 2, 3, 4], &tokens)]);
        // H6.16
        assert_eq!(depth_of(&index, &tokens), 4, "{kind:?}");
    }
}

#[test]
fn h6_a_window_of_larger_blocks_ends_at_their_ends() {
    let (index, tokens) = (live(), (0..32).collect::<Vec<u32>>());
    let hashes: Vec<u64> = (1..=8).collect();
    // Blocks of 8 tokens have the hash of the second one of 4. The window has 9 tokens: one such block.
    let wide = |hashes: &[u64]| {
        let KvEvent::Stored(stored) = of_group(0, GroupKind::Window(9), None, hashes, &[]) else {
            unreachable!()
        };
        KvEvent::Stored(Stored { block_size: 8, ..stored })
    };
    apply(&index, vec![of_group(1, GroupKind::Full, None, &hashes, &tokens), wide(&[2, 4, 6, 8])]);
    assert_eq!((depth_of(&index, &tokens), depth_of(&index, &tokens[..28])), (8, 6));
    apply(&index, vec![removed_of(0, &[2, 6])]);
    // H6.15
    assert_eq!((depth_of(&index, &tokens), depth_of(&index, &tokens[..28])), (8, 4));
    apply(&index, vec![removed_of(1, &[8])]);
    assert_eq!(depth_of(&index, &tokens), 4);
    index.remove_worker(HERE.0);
    index.flush();
    assert_eq!(index.stats(), IndexStats { orphans: index.stats().orphans, ..IndexStats::default() });
}

#[test]
fn h4_a_group_without_bound_is_ignored() {
    let (index, tokens) = (live(), (0..16).collect::<Vec<u32>>());
    apply(&index, vec![of_group(1, GroupKind::Full, None, &[1, 2, 3, 4], &tokens)]);
    apply(&index, vec![of_group(0, GroupKind::State, None, &[2], &tokens[4..8])]);
    assert_eq!(depth_of(&index, &tokens), 2);
    for batch in 1..=40_u64 {
        let hashes: Vec<u64> = (0..1_000).map(|block| batch * 1_000 + block).collect();
        apply(&index, vec![of_group(0, GroupKind::State, None, &hashes, &[])]);
    }
    // H4.1
    assert!(index.stats().bytes < 1 << 20, "{:?}", index.stats());
    assert_eq!(depth_of(&index, &tokens), 4);
    // A feed that begins again may be of another model.
    index.forget(HERE.0, HERE.1);
    apply(&index, vec![stored(None, &[1, 2], &tokens[..8], Tier::Device)]);
    assert_eq!(depth_of(&index, &tokens), 2);
}

#[test]
fn h4_the_byte_budget_holds_with_several_groups() {
    let index = index(60_000, 120);
    index.set_live(HERE.0, HERE.1, true);
    let mut most = 0;
    for prompt in 0..200_u64 {
        let tokens: Vec<u32> = (0..40).map(|place| prompt as u32 * 1_000 + place).collect();
        let hashes: Vec<u64> = (1..=10).map(|block| prompt * 100 + block).collect();
        let all = |group, kind| of_group(group, kind, None, &hashes, &tokens);
        // The states are evicted by the engine soon, the window stays.
        apply(&index, vec![all(0, GroupKind::Window(9)), all(1, GroupKind::State), all(2, GroupKind::Full)]);
        assert_eq!(depth_of(&index, &tokens), 10);
        apply(&index, vec![removed_of(1, &hashes[5..])]);
        assert_eq!(depth_of(&index, &tokens), 5);
        most = most.max(index.stats().bytes);
    }
    // H4.1
    assert!(most <= 60_000 && index.stats().evicted > 100, "{most} {:?}", index.stats());
    index.remove_worker(HERE.0);
    index.flush();
    // H4.2
    assert_eq!((index.stats().blocks, index.stats().bytes, index.stats().holders), (0, 0, 0));
}

/// Groups of the engine in the property test, and their kinds: a window of two blocks and a state.
const KINDS: [(u32, GroupKind); 3] = [(3, GroupKind::Full), (0, GroupKind::Window(9)), (1, GroupKind::State)];

/// Returns how many blocks of a path the engine could use.
fn usable(path: &[u64], held: &BTreeMap<(u64, usize), u32>, gates: [bool; 3]) -> usize {
    let has = |block: u64, group: usize| held.contains_key(&(block, group));
    let full = path.iter().take_while(|block| has(**block, 0)).count();
    let fits = |end: &usize| {
        let window = path[end.saturating_sub(2)..*end].iter().all(|block| has(*block, 1));
        let state = has(path[end - 1], 2);
        (window || !gates[1]) && (state || !gates[2])
    };
    (1..=full).rev().find(fits).unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn h6_lookups_equal_a_naive_model_of_three_groups(
        steps in proptest::collection::vec((1_u64..32, 0_u8..9, 0_usize..3), 1..150),
    ) {
        let index = live();
        let mut held: BTreeMap<(u64, usize), u32> = BTreeMap::new();
        let mut gates = [true, false, false];
        for (block, action, group) in steps {
            let (number, kind) = KINDS[group];
            match action {
                0..=2 => {
                    apply(&index, vec![removed_of(number, &[block])]);
                    if let Some(count) = held.get_mut(&(block, group)) {
                        *count -= 1;
                        if *count == 0 {
                            held.remove(&(block, group));
                        }
                    }
                }
                3 if block == 1 => {
                    apply(&index, vec![KvEvent::Cleared]);
                    held.clear();
                }
                _ => {
                    let parent = Some(block / 2).filter(|parent| *parent > 0);
                    apply(&index, vec![of_group(number, kind, parent, &[block], &tokens_of(block))]);
                    let known = |parent| {
                        held.keys().any(|(other, of)| *of == 0 && path_to(*other).contains(&parent))
                    };
                    if group > 0 || parent.is_none_or(known) {
                        *held.entry((block, group)).or_default() += 1;
                    }
                }
            }
            // A group counts once a block of it is one of the followed group.
            for (gate, active) in gates.iter_mut().enumerate().skip(1) {
                let in_both = |block| held.contains_key(&(block, gate)) && held.contains_key(&(block, 0));
                *active |= (1..32).any(in_both);
            }
            for leaf in 16_u64..32 {
                let path = path_to(leaf);
                let tokens: Vec<u32> = path.iter().flat_map(|block| tokens_of(*block)).collect();
                // H6.15
                prop_assert_eq!(depth_of(&index, &tokens), usable(&path, &held, gates) as u32, "leaf {}", leaf);
            }
        }
        index.remove_worker(HERE.0);
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes, index.stats().holders), (0, 0, 0));
    }
}
