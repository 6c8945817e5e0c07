//! Stores whose blocks cannot be placed, and engines that write 0 for "no parent".

use super::*;

#[test]
fn h2_decisions_are_recorded_besides_events_whose_blocks_cannot_be_placed() {
    let tokens: Vec<u32> = (0..16).collect();
    let blocks: Arc<[BlockHash]> = block_hashes(&tokens, 4, &Salt::default()).into();
    let recorded = |events: Vec<KvEvent>| {
        let index = live();
        apply(&index, events);
        index.record(HERE.0, HERE.1, &blocks.clone().into(), Instant::now());
        index.flush();
        matched(&index, &tokens)[0]
    };
    let sized = |block_size, hashes: &[u64], token_ids: &[u32]| {
        let (hashes, token_ids) = (hashes.to_vec(), token_ids.to_vec());
        KvEvent::Stored(Stored { hashes, token_ids, block_size, ..Stored::default() })
    };
    let all = |hashes: &[u64]| stored(None, hashes, &tokens, Tier::Device);
    // H2.5, H6.14
    assert_eq!(recorded(vec![all(&[1, 2, 3])]), 4, "the tokens do not fit");
    assert_eq!(recorded(vec![sized(0, &[1, 2, 3], &tokens)]), 4, "the size is not known");
    assert_eq!(recorded(vec![sized(70_000, &[1], &vec![7; 70_000])]), 4, "no engine has such a size");
    let page = |parent, hash, tokens: &[u32]| stored(parent, &[hash], tokens, Tier::Device);
    let by_page = vec![page(None, 1, &[7; 4]), page(Some(1), 2, &[8; 4]), page(None, 2, &[8; 4])];
    assert_eq!(recorded(by_page), 4, "the hash says nothing about the beginning");
    // Events of offloaded blocks never have tokens, and name no block that a decision would add.
    assert_eq!(recorded(vec![stored(None, &[1, 2], &[], Tier::Host)]), 0);
    assert_eq!(recorded(vec![all(&[1, 2, 3, 4]), removed(&[4], Tier::Device)]), 3, "all could be placed");
}

#[test]
fn h6_a_parent_of_0_is_none_of_an_engine_that_names_parents() {
    let tokens: Vec<u32> = (0..16).collect();
    let store = |parent, hashes: &[u64], tokens: &[u32]| stored(parent, hashes, tokens, Tier::Device);
    let index = live();
    apply(&index, vec![store(Some(0), &[1, 2], &tokens[..8]), store(Some(2), &[3, 4], &tokens[8..])]);
    // H6.24
    assert_eq!((matched(&index, &tokens)[0], index.stats().orphans), (4, 0));
    apply(&index, vec![store(Some(0), &[5], &[7; 4])]);
    assert_eq!(matched(&index, &[7; 4])[0], 1);
    // The engine restarted with a version that always writes 0: its second blocks begin no prompt.
    index.forget(HERE.0, HERE.1);
    apply(&index, vec![store(Some(0), &[1, 2], &tokens[..8]), store(Some(0), &[3, 4], &tokens[8..])]);
    // H6.24
    assert_eq!([matched(&index, &tokens)[0], matched(&index, &tokens[8..])[0]], [0, 0]);
    let blocks: Arc<[BlockHash]> = block_hashes(&tokens, 4, &Salt::default()).into();
    index.record(HERE.0, HERE.1, &blocks.into(), Instant::now());
    index.flush();
    // H2.5
    assert_eq!(matched(&index, &tokens)[0], 4, "decisions are recorded instead");
}

#[test]
fn h6_a_parent_of_0_that_is_a_block_is_that_block() {
    let (index, tokens) = (live(), (0..12).collect::<Vec<u32>>());
    let store = |parent, hash, tokens: &[u32]| stored(parent, &[hash], tokens, Tier::Device);
    apply(&index, vec![store(None, 0, &tokens[..4]), store(Some(0), 1, &tokens[4..8])]);
    apply(&index, vec![store(Some(1), 2, &tokens[8..])]);
    // H6.24
    assert_eq!(matched(&index, &tokens)[0], 3);
    apply(&index, vec![removed(&[0], Tier::Device), store(Some(0), 3, &[7; 4])]);
    assert_eq!(matched(&index, &[7; 4])[0], 0, "its parent was removed");
}
