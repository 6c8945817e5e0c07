use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Returns an engine hash with a tag. Those with the same tag differ in `other`.
fn engine_hash(tag: u32, other: u32) -> u64 {
    Mixer::default().unmix(u64::from(other) << 32 | u64::from(tag))
}

#[test]
fn tags_are_32_bits_of_the_mixed_hash_and_never_empty() {
    let tag = |tag, other| tag_of(Mixer::default(), engine_hash(tag, other));
    assert_eq!([tag(7, 0), tag(7, 99), tag(0, 5)], [7, 7, 1]);
}

/// Checks that each line counts the keys that lie after it although it is in their path.
fn counts_what_passed(part: &Part) {
    let mut expected = vec![0; part.lines.len()];
    for (number, line) in part.lines.iter().enumerate() {
        for (tag, _) in line.keys() {
            let mut passed = part.home(tag);
            while passed != number {
                expected[passed] += 1;
                passed = part.after(passed);
            }
        }
    }
    let counted: Vec<u32> = part.lines.iter().map(|line| line.state / PASSED).collect();
    assert_eq!(counted, expected);
    assert_eq!(part.keys().count(), part.held);
}

proptest! {
    #[test]
    fn the_table_holds_what_a_std_map_holds(
        steps in proptest::collection::vec((0_u32..40, 0_u32..9, 0_u8..3), 1..1_500),
        spread in 0_u32..3,
    ) {
        let (mut table, mut model) = (BlockPositions::default(), HashMap::new());
        for (number, (name, other, action)) in (0_u32..).zip(steps) {
            // Up to nine hashes have one tag. Many tags share a home, or all are spread.
            let tag = [name + 1, name << 27 | 1, name.wrapping_mul(0x9e37_79b9)][spread as usize];
            let (engine, at) = (engine_hash(tag, other), Position { run: other, at: number });
            let is = |at: Position| model.get(&engine) == Some(&at);
            if action == 0 {
                if let Some(known) = model.remove(&engine) {
                    table.remove(engine, known);
                }
            } else {
                prop_assert_eq!(table.insert_new(engine, at, is), !model.contains_key(&engine));
                model.entry(engine).or_insert(at);
            }
            let is = |at: Position| model.get(&engine) == Some(&at);
            prop_assert_eq!(table.find(engine, is), model.get(&engine).copied());
            table.parts.iter().for_each(counts_what_passed);
        }
        for (engine, at) in &model {
            prop_assert_eq!(table.find(*engine, |found| found == *at), Some(*at));
        }
        model.iter().for_each(|(engine, at)| table.remove(*engine, *at));
        prop_assert_eq!((table.held, table.bytes(), table.parts.len()), (0, 0, 0));
    }
}

#[test]
fn a_table_that_is_divided_keeps_all_blocks_and_gives_memory_back() {
    let mut table = BlockPositions::default();
    let at = |engine: u64| Position { run: 3, at: engine as u32 };
    let blocks = MAX_UNDIVIDED as u64 + 20_000;
    (0..blocks).for_each(|engine| assert!(table.insert_new(engine, at(engine), |found| found == at(engine))));
    assert_eq!(table.parts.len(), PARTS);
    let full = table.bytes();
    assert!((14..27).contains(&(full as u64 / blocks)), "{full} bytes");
    (0..blocks)
        .for_each(|engine| assert_eq!(table.find(engine, |found| found == at(engine)), Some(at(engine))));
    (1_000..blocks).for_each(|engine| table.remove(engine, at(engine)));
    assert!(table.bytes() < full / 8, "{} of {full} bytes", table.bytes());
    (0..1_000).for_each(|engine| table.remove(engine, at(engine)));
    assert_eq!(table.bytes(), 0);
}
