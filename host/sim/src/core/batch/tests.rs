use super::*;

const LIMITS: BatchLimits =
    BatchLimits { max_num_seqs: 4, max_batched_tokens: 64, blocks: 16, block_size: 16, prefill_only: false };

/// Step time of one millisecond for each new token.
const TIME: StepTime = StepTime::Linear { c0: 0.0, c1: 0.0, c2: 0.0, c3: 1.0, c4: 0.0 };

fn sequence(tag: u64, isl: u32, osl: u32) -> Sequence {
    let prompt = (0..u64::from(isl / 16)).map(|block| tag * 100 + block).collect();
    Sequence { tag, prompt, isl, osl, kv: PromptKv::Computed, keeps_blocks: false }
}

/// Runs steps until the engine is idle. Returns the duration of each and the tags that emitted a token.
fn run(engine: &mut BatchEngine) -> Vec<(f64, Vec<u64>)> {
    let mut steps = Vec::new();
    while let Some(took) = engine.begin_step() {
        let mut tokens = Vec::new();
        engine.end_step(&mut tokens);
        steps.push((took, tokens.iter().map(|token| token.tag).collect()));
        assert!(steps.len() < 1_000, "the engine does not come to an end");
    }
    steps
}

#[test]
fn a_prompt_longer_than_the_budget_is_computed_in_chunks_beside_decodes() {
    let mut engine = BatchEngine::new(LIMITS, TIME);
    engine.submit(sequence(1, 10, 4));
    assert_eq!(engine.begin_step(), Some(10.0));
    engine.submit(sequence(2, 100, 2));
    let mut tokens = Vec::new();
    engine.end_step(&mut tokens);
    assert_eq!(tokens, [Token { tag: 1, number: 1, last: false }]);
    let rest = run(&mut engine);
    // The first step has one token of sequence 1 and a chunk of 63; the next has the remaining 37; then both
    // decode.
    let expected = [(64.0, vec![1]), (38.0, vec![1, 2]), (2.0, vec![1, 2])];
    assert_eq!(rest, expected);
    assert_eq!((engine.sequences(), engine.counts().preemptions), ((0, 0), 0));
}

#[test]
fn a_cached_prefix_is_not_computed_again_and_the_last_token_always_is() {
    let mut engine = BatchEngine::new(LIMITS, TIME);
    engine.submit(sequence(1, 48, 1));
    assert_eq!(run(&mut engine), [(48.0, vec![1])]);
    engine.submit(Sequence { tag: 2, ..sequence(1, 48, 1) });
    assert_eq!(run(&mut engine), [(16.0, vec![2])], "two of three blocks count");
    assert_eq!(engine.take_admitted(), [(1, 0), (2, 32)]);
    assert_eq!(engine.counts().cached_tokens, 32);
}

#[test]
fn the_last_admitted_sequence_is_preempted_and_computed_again() {
    // There are 16 blocks: two sequences of 7 blocks each grow to 9.
    let limits = BatchLimits { max_batched_tokens: 256, ..LIMITS };
    let mut engine = BatchEngine::new(limits, TIME);
    engine.submit(sequence(1, 112, 33));
    engine.submit(sequence(2, 112, 33));
    let steps = run(&mut engine);
    assert_eq!(engine.counts().preemptions, 1);
    let tokens = |tag| steps.iter().flat_map(|(_, tags)| tags).filter(|other| **other == tag).count();
    assert_eq!((tokens(1), tokens(2)), (33, 33), "no token is lost or repeated");
    assert_eq!(engine.take_admitted().len(), 2, "a preempted sequence is admitted once");
    assert!(engine.kv_usage().abs() < 1e-9);
}

#[test]
fn at_most_max_num_seqs_run() {
    let mut engine = BatchEngine::new(BatchLimits { max_num_seqs: 2, ..LIMITS }, TIME);
    (1..=3).for_each(|tag| engine.submit(sequence(tag, 8, 2)));
    engine.begin_step();
    assert_eq!(engine.sequences(), (2, 1));
}

#[test]
fn received_kv_takes_memory_and_no_computation() {
    let mut engine = BatchEngine::new(LIMITS, TIME);
    engine.submit(Sequence { kv: PromptKv::Received, ..sequence(1, 64, 3) });
    assert_eq!(run(&mut engine), [(1.0, vec![1]), (1.0, vec![1]), (1.0, vec![1])]);
}

#[test]
fn a_sequence_that_awaits_kv_holds_its_cached_blocks_and_new_ones_for_the_others() {
    let mut engine = BatchEngine::new(LIMITS, TIME);
    engine.submit(sequence(1, 49, 1));
    run(&mut engine);
    engine.take_admitted();
    engine.submit(Sequence { kv: PromptKv::Awaited, ..sequence(1, 80, 2) });
    assert_eq!(engine.begin_step(), None);
    assert_eq!((engine.take_admitted(), engine.used_blocks()), (vec![(1, 48)], 5));
    // Twelve blocks do not fit beside these five, and evict none of them.
    engine.submit(sequence(2, 192, 1));
    run(&mut engine);
    assert_eq!((engine.sequences(), engine.evicted()), ((0, 2), 0));
    assert_eq!(engine.cached_tokens(&sequence(1, 80, 2).prompt, 80), 48);
    engine.receive(1, false);
    assert_eq!(run(&mut engine)[..2], [(1.0, vec![1]), (1.0, vec![1])]);
}

#[test]
fn the_blocks_of_a_finished_prefill_stay_until_they_were_read() {
    let mut engine = BatchEngine::new(BatchLimits { prefill_only: true, ..LIMITS }, TIME);
    engine.submit(Sequence { keeps_blocks: true, ..sequence(1, 48, 1) });
    run(&mut engine);
    assert!((engine.kv_usage() - 3.0 / 16.0).abs() < 1e-9);
    engine.unpin(1);
    assert!(engine.kv_usage().abs() < 1e-9);
}

#[test]
fn stored_and_removed_blocks_are_told_with_their_place() {
    let mut engine = BatchEngine::new(BatchLimits { blocks: 3, ..LIMITS }, TIME);
    engine.submit(sequence(1, 33, 1));
    run(&mut engine);
    let stored = |hash, parent, position| CacheChange::Stored { hash, parent, tag: 1, position };
    assert_eq!(engine.take_changes(), [stored(100, None, 0), stored(101, Some(100), 1)]);
    engine.submit(sequence(2, 48, 1));
    run(&mut engine);
    let removed =
        engine.take_changes().into_iter().filter(|change| matches!(change, CacheChange::Removed { .. }));
    assert_eq!(removed.count(), 2);
}
