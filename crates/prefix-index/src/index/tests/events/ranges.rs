//! Events of many blocks: stored and removed in ranges, from either end, from the middle and in any order.

use super::*;

/// Blocks of a prompt.
const BLOCKS: usize = 48;

/// Number of block `at` of a prompt of this family. Families part after block 16 of the one before.
fn block(family: usize, at: usize) -> u64 {
    let shared_with = (0..family).find(|other| at < 16 * (other + 1)).unwrap_or(family);
    (shared_with * 1_000 + at + 1) as u64
}

fn tokens(family: usize, blocks: std::ops::Range<usize>) -> Vec<u32> {
    blocks.flat_map(|at| [block(family, at) as u32, 5, 6, 7]).collect()
}

/// Action of an event: it stores or removes blocks of a prompt.
#[derive(Clone, Debug)]
struct Act {
    family: usize,
    from: usize,
    count: usize,
    tier: usize,
    /// 0: first to last, 1: last to first, others: mixed up. None: the blocks are stored.
    removed: Option<usize>,
}

fn act() -> impl Strategy<Value = Act> {
    let tier = prop_oneof![4 => Just(0_usize), 1 => Just(1)];
    let removed = prop_oneof![3 => Just(None), 3 => (0_usize..4).prop_map(Some)];
    (0_usize..3, 0..BLOCKS, 1_usize..40, tier, removed).prop_map(|(family, from, count, tier, removed)| {
        let from = if removed.is_none() && from % 2 == 0 { 0 } else { from };
        Act { family, from, count: count.min(BLOCKS - from), tier, removed }
    })
}

/// How often each block is stored, by tier.
#[derive(Default)]
struct Model(BTreeMap<(u64, usize), u32>);

impl Model {
    fn apply(&mut self, act: &Act) {
        let blocks = (act.from..act.from + act.count).map(|at| block(act.family, at));
        for number in blocks {
            let count = self.0.entry((number, act.tier)).or_default();
            *count = if act.removed.is_some() { count.saturating_sub(1) } else { *count + 1 };
        }
        self.0.retain(|_, count| *count > 0);
    }

    fn has(&self, number: u64, tier: usize) -> bool {
        self.0.contains_key(&(number, tier))
    }

    /// Returns whether the index knows a block: it, or one that follows it, is stored.
    fn knows(&self, number: u64) -> bool {
        let follows = |family: usize| {
            let at = (0..BLOCKS).find(|at| block(family, *at) == number);
            at.is_some_and(|at| (at..BLOCKS).any(|at| (0..2).any(|tier| self.has(block(family, at), tier))))
        };
        (0..3).any(follows)
    }

    fn matched(&self, family: usize) -> [u32; 3] {
        let run = |from: usize, tier: usize| {
            (from..BLOCKS).take_while(|at| self.has(block(family, *at), tier)).count()
        };
        let device = run(0, 0);
        [device as u32, run(device, 1) as u32, 0]
    }
}

fn event(act: &Act) -> KvEvent {
    let tier = [Tier::Device, Tier::Host][act.tier];
    let mut hashes: Vec<u64> = (act.from..act.from + act.count).map(|at| block(act.family, at)).collect();
    let Some(order) = act.removed else {
        let parent = act.from.checked_sub(1).map(|before| block(act.family, before));
        return stored(parent, &hashes, &tokens(act.family, act.from..act.from + act.count), tier);
    };
    match order {
        0 => {}
        1 => hashes.reverse(),
        more => hashes.sort_by_key(|hash| (hash % more as u64, hash.wrapping_mul(0x9e37_79b9) % 13)),
    }
    removed(&hashes, tier)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn h3_ranges_of_blocks_that_come_and_leave_equal_a_naive_model(
        acts in proptest::collection::vec(act(), 1..40),
    ) {
        let (index, mut model) = (live(), Model::default());
        for act in &acts {
            apply(&index, vec![event(act)]);
            let placed = act.from == 0 || model.knows(block(act.family, act.from - 1));
            if act.removed.is_some() || placed {
                model.apply(act);
            }
            for family in 0..3 {
                // H3.1, H3.3
                prop_assert_eq!(matched(&index, &tokens(family, 0..BLOCKS)), model.matched(family));
            }
        }
        index.remove_worker(HERE.0);
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }

    #[test]
    fn h4_ranges_of_which_the_budget_evicts_blocks_are_never_more_than_the_engine_has(
        acts in proptest::collection::vec(act(), 1..60),
        budget in 3_000_usize..12_000,
    ) {
        let (index, mut model) = (index(budget, 120), Model::default());
        index.set_live(HERE.0, HERE.1, true);
        for act in acts.iter().map(|act| Act { tier: 0, ..act.clone() }) {
            apply(&index, vec![event(&act)]);
            model.apply(&act);
            // H4.1
            prop_assert!(index.stats().bytes <= budget as u64, "{:?}", index.stats());
            for family in 0..3 {
                let [device, ..] = matched(&index, &tokens(family, 0..BLOCKS));
                prop_assert!(device <= model.matched(family)[0]);
            }
        }
        index.remove_worker(HERE.0);
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }
}
