//! Several engines with the same prompts, engines' hashes that name the same tokens, long prompts, and
//! records beside events, against a naive model.

use std::collections::BTreeSet;

use super::*;

const ENGINES: u64 = 4;

/// Blocks of an engine form a tree: block `n` follows block `n / 2`. Returns the number that stands for the
/// tokens of a block. Every third pair of siblings has the same tokens, so different hashes of the engine
/// name the same prefix.
fn content(block: u64) -> u64 {
    if (block / 2).is_multiple_of(3) { block / 2 * 2 } else { block }
}

/// Returns what stands for the tokens of a block and of all blocks before it.
fn contents(block: u64) -> Vec<u64> {
    path_to(block).into_iter().map(content).collect()
}

fn tokens(contents: &[u64]) -> Vec<u32> {
    contents.iter().flat_map(|content| tokens_of(*content)).collect()
}

fn send(index: &PrefixIndex, engine: u64, event: KvEvent) {
    let mut batch = Batch { ts: 0.0, dp_rank: None, events: vec![event] };
    while let Err(full) = index.events(WorkerId(engine), DpRank(0), batch) {
        batch = full;
    }
}

/// One engine: how often each block is stored, and the decisions.
#[derive(Default)]
struct Model {
    stored: BTreeMap<u64, u32>,
    records: Vec<(Vec<u64>, ProvisionalRecord)>,
}

impl Model {
    /// Returns whether the index knows a block: it is stored, or one after it is.
    fn knows(&self, block: u64) -> bool {
        self.stored.keys().any(|other| path_to(*other).contains(&block))
    }

    /// Stores blocks, each the parent of the next, after the parent of the first one.
    fn store(&mut self, blocks: &[u64]) {
        let Some(first) = blocks.first() else { return };
        if *first > 1 && !self.knows(first / 2) {
            return;
        }
        for block in blocks {
            *self.stored.entry(*block).or_default() += 1;
        }
    }

    fn remove(&mut self, block: u64) {
        if let Some(count) = self.stored.get_mut(&block) {
            *count -= 1;
            if *count == 0 {
                self.stored.remove(&block);
            }
        }
    }

    fn matched(&self, asked: &[u64]) -> usize {
        let held: BTreeSet<Vec<u64>> = self.stored.keys().map(|block| contents(*block)).collect();
        let by_events = (1..=asked.len()).take_while(|depth| held.contains(&asked[..*depth])).count();
        let common =
            |(record, _): &(Vec<u64>, _)| record.iter().zip(asked).take_while(|(a, b)| a == b).count();
        by_events.max(self.records.iter().map(common).max().unwrap_or(0))
    }
}

fn compare(index: &PrefixIndex, models: &[Model]) -> Result<(), TestCaseError> {
    index.flush();
    for leaf in 32_u64..64 {
        let asked = contents(leaf);
        let mut overlaps = Overlaps::default();
        index.matches(&block_hashes(&tokens(&asked), 4, &Salt::default()), &mut overlaps);
        for (engine, model) in (1..).zip(models) {
            let found = overlaps.get(WorkerId(engine), DpRank(0)).device as usize;
            // H3.1, H3.2
            prop_assert_eq!(found, model.matched(&asked), "engine {} for {:?}", engine, asked);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn h3_lookups_equal_a_naive_model_of_several_engines(
        steps in proptest::collection::vec((1..=ENGINES, 0_u8..12, 1_u64..64, 1_usize..7), 1..60),
    ) {
        let index = Arc::new(index(1 << 24, 120));
        let mut models: Vec<Model> = (0..ENGINES).map(|_| Model::default()).collect();
        for (number, (engine, action, block, count)) in steps.into_iter().enumerate() {
            let model = &mut models[engine as usize - 1];
            // Engines name the same blocks differently.
            let name = |block: u64| block + 1_000 * engine;
            match action {
                0..=2 => {
                    let gone: Vec<u64> = path_to(block).into_iter().rev().take(count).collect();
                    let hashes: Vec<u64> = gone.iter().map(|block| name(*block)).collect();
                    send(&index, engine, removed(&hashes, Tier::Device));
                    gone.into_iter().for_each(|block| model.remove(block));
                }
                3 => {
                    send(&index, engine, removed(&[name(block)], Tier::Device));
                    model.remove(block);
                }
                4 if count == 1 => {
                    send(&index, engine, KvEvent::Cleared);
                    model.stored.clear();
                    model.records.clear();
                }
                5 if count < 3 && !model.records.is_empty() => {
                    // Withdraws one of them.
                    drop(model.records.remove(block as usize % model.records.len()));
                }
                5 => {
                    let record = contents(block);
                    let prefix = block_hashes(&tokens(&record), 4, &Salt::default()).into();
                    let (worker, now) = (WorkerId(engine), Instant::now());
                    model.records.push((record, index.record_provisionally(worker, DpRank(0), &prefix, now)));
                }
                6 if count == 1 => {
                    index.remove_worker(WorkerId(engine));
                    *model = Model::default();
                }
                7 if count == 1 => {
                    // Replaces the records.
                    index.set_live(WorkerId(engine), DpRank(0), true);
                    model.records.clear();
                    index.set_live(WorkerId(engine), DpRank(0), false);
                    model.stored.clear();
                }
                _ => {
                    let path = path_to(block);
                    let blocks = &path[path.len().saturating_sub(count)..];
                    let parent = Some(blocks[0] / 2).filter(|parent| *parent > 0);
                    let held: Vec<u64> = blocks.iter().map(|block| content(*block)).collect();
                    let hashes: Vec<u64> = blocks.iter().map(|block| name(*block)).collect();
                    send(&index, engine, stored(parent.map(name), &hashes, &tokens(&held), Tier::Device));
                    model.store(blocks);
                }
            }
            if number % 3 == 0 {
                compare(&index, &models)?;
            }
        }
        compare(&index, &models)?;
        (1..=ENGINES).for_each(|engine| index.remove_worker(WorkerId(engine)));
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }

    /// Prompts of thousands of blocks part anywhere, grow, and lose their ends.
    #[test]
    fn h3_long_prompts_part_and_shrink_anywhere(
        steps in proptest::collection::vec((1..=ENGINES, 0_u64..3, 0_usize..3_000), 1..24),
    ) {
        let index = index(64 << 20, 120);
        let family = |of: u64, place: usize| if place < 700 * of as usize { 0 } else { of };
        let prompt = |of: u64, len: usize| -> Vec<u32> {
            (0..len).flat_map(|place| [family(of, place) as u32, place as u32, 7, 7]).collect()
        };
        let name = |of: u64, place: usize| (family(of, place) + 1) * 1_000_000 + place as u64;
        let mut held = vec![[0_usize; 3]; ENGINES as usize];
        for (engine, of, len) in steps {
            let mine = &mut held[engine as usize - 1];
            let now = mine[of as usize];
            // A prefix that several families share is stored once for each family.
            if len >= now {
                let hashes: Vec<u64> = (now..len).map(|place| name(of, place)).collect();
                let parent = now.checked_sub(1).map(|last| name(of, last));
                send(&index, engine, stored(parent, &hashes, &prompt(of, len)[now * 4..], Tier::Device));
            } else {
                let gone: Vec<u64> = (len..now).rev().map(|place| name(of, place)).collect();
                send(&index, engine, removed(&gone, Tier::Device));
            }
            mine[of as usize] = len;
            index.flush();
            for asked in 0..3_u64 {
                let mut overlaps = Overlaps::default();
                index.matches(&block_hashes(&prompt(asked, 3_100), 4, &Salt::default()), &mut overlaps);
                for (engine, held) in (1..).zip(&held) {
                    let has = |place: &usize| (0..3_u64).any(|of| {
                        held[of as usize] > *place && family(of, *place) == family(asked, *place)
                    });
                    let expected = (0..3_100).take_while(has).count();
                    let found = overlaps.get(WorkerId(engine), DpRank(0)).device as usize;
                    // H3.1
                    prop_assert_eq!(found, expected, "engine {} holds {:?} for {}", engine, held, asked);
                }
            }
        }
        (1..=ENGINES).for_each(|engine| index.remove_worker(WorkerId(engine)));
        index.flush();
        prop_assert_eq!((index.stats().blocks, index.stats().bytes), (0, 0));
    }
}

#[test]
fn h2_hashes_seeded_by_a_salt_are_found_behind_the_first_event_of_a_prompt() {
    use crate::events::ExtraKey;
    let (index, tokens) = (live(), (0..24).collect::<Vec<u32>>());
    // Events without a salt come first: their tokens are not kept.
    apply(&index, vec![stored(None, &[1], &tokens[..4], Tier::Device)]);
    let first = Stored {
        hashes: vec![11, 12],
        token_ids: tokens[..8].to_vec(),
        block_size: 4,
        extra_keys: vec![vec![ExtraKey::Text("tenant".to_owned())], vec![]],
        ..Stored::default()
    };
    apply(&index, vec![KvEvent::Stored(first), stored(Some(12), &[13, 14], &tokens[8..16], Tier::Device)]);
    apply(&index, vec![stored(Some(14), &[15], &tokens[16..20], Tier::Device)]);
    let find = |cache: Option<&str>| {
        let mut overlaps = Overlaps::default();
        index.matches(&block_hashes(&tokens, 4, &Salt { lora: None, cache }), &mut overlaps);
        overlaps.get(HERE.0, HERE.1).device
    };
    // H2.1, H1.3
    assert_eq!([find(Some("tenant")), find(None)], [5, 1]);
}
