//! Order of eviction when the byte budget is exceeded.

use super::*;

fn small(byte_budget: usize) -> PrefixIndex {
    let index = index(byte_budget, 120);
    index.set_live(HERE.0, HERE.1, true);
    index
}

/// A prompt that shares no block with others.
fn filler(number: u64) -> Vec<KvEvent> {
    let tokens: Vec<u32> = (0..16).map(|place| 1_000_000 + number as u32 * 100 + place).collect();
    let hashes: Vec<u64> = (0..4).map(|block| 1_000_000 + number * 100 + block).collect();
    vec![stored(None, &hashes, &tokens, Tier::Device)]
}

#[test]
fn h4_a_conversation_in_use_outlives_an_idle_one() {
    let index = small(40_000);
    let turn =
        |of: u32, turn: u32| -> Vec<u32> { (0..4).map(|place| of * 10_000 + turn * 10 + place).collect() };
    let mut held = [Vec::new(), Vec::new()];
    for of in [0_u32, 1] {
        held[of as usize] = turn(of, 0);
        apply(&index, vec![stored(None, &[u64::from(of) + 1], &turn(of, 0), Tier::Device)]);
    }
    let mut last = 1;
    for number in 0..400 {
        apply(&index, filler(number));
        if number % 10 == 0 {
            let (next, tokens) = (2 + number, turn(0, number as u32 + 1));
            apply(&index, vec![stored(Some(last), &[next + 500], &tokens, Tier::Device)]);
            (last, held[0]) = (next + 500, [held[0].clone(), tokens].concat());
        }
    }
    assert!(index.stats().evicted > 500, "{:?}", index.stats());
    assert_eq!(matched(&index, &held[0])[0] as usize, held[0].len() / 4);
    assert_eq!(matched(&index, &held[1]), [0; 3]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Everything that is held can be reached from the root: a parent is never evicted before its child.
    #[test]
    fn h4_a_parent_is_never_evicted_before_its_child(
        steps in proptest::collection::vec((1_u64..64, 0_u8..8, 0_u64..50), 1..60),
        budget in 3_000_usize..12_000,
    ) {
        let index = small(budget);
        for (block, action, other) in steps {
            match action {
                0 => apply(&index, filler(other)),
                _ => {
                    let path = path_to(block);
                    let tokens: Vec<u32> = path.iter().flat_map(|block| tokens_of(*block)).collect();
                    apply(&index, vec![stored(None, &path, &tokens, Tier::Device)]);
                }
            }
            prop_assert!(index.stats().bytes <= budget as u64);
            let mut reached = std::collections::BTreeSet::new();
            for leaf in 32_u64..64 {
                let path = path_to(leaf);
                let tokens: Vec<u32> = path.iter().flat_map(|block| tokens_of(*block)).collect();
                reached.extend(path.into_iter().take(matched(&index, &tokens)[0] as usize));
            }
            let mut fillers = 0;
            for number in 0..50 {
                let [KvEvent::Stored(one)] = &filler(number)[..] else { continue };
                fillers += matched(&index, &one.token_ids)[0] as usize;
            }
            prop_assert_eq!(reached.len() + fillers, index.stats().blocks as usize);
        }
        index.remove_worker(HERE.0);
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }
}
