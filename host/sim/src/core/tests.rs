use super::*;

fn core(max_num_seqs: u32, max_waiting: u32, blocks: u32) -> EngineCore {
    let limits =
        BatchLimits { max_num_seqs, max_batched_tokens: 8_192, blocks, block_size: 16, prefill_only: false };
    let step_time = StepTime::Latencies { overhead: 30.0, per_token: 0.2, itl: 12.0, slowdown: 0.5 };
    let transfer_per_token = Duration::from_micros(5);
    let (prefix_caching, jitter) = (true, Jitter(0.0));
    EngineCore::new(
        CoreConfig { limits, max_waiting, prefix_caching, step_time, jitter, transfer_per_token },
        1,
    )
}

fn whole(seed: u64, full_blocks: u64, out: u32) -> Job {
    let chain = (0..full_blocks).map(|i| seed * 1000 + i).collect();
    let isl = u32::try_from(full_blocks).unwrap() * 16 + 1;
    Job {
        chain,
        tokens: Arc::default(),
        objects: Arc::default(),
        isl,
        out,
        kv: PromptKv::Computed,
        keeps_blocks: false,
    }
}

/// Returns a prompt of 33 tokens that is computed for another engine.
fn prefill() -> Job {
    Job { keeps_blocks: true, ..whole(1, 2, 1) }
}

fn prompt() -> Prompt {
    Prompt::of_tokens((0..33).collect())
}

fn ask(block_ids: &[u32], fingerprint: u64) -> Ask<'_> {
    Ask { block_ids: Some(block_ids), fingerprint, transfer: Duration::from_millis(10) }
}

/// Runs a step. Returns its duration and the sequences that emitted a token.
fn step(core: &mut EngineCore) -> Option<(Duration, Vec<u64>)> {
    let duration = core.begin_step()?;
    let mut tokens = Vec::new();
    core.end_step(&mut tokens);
    Some((duration, tokens.iter().map(|token| token.tag).collect()))
}

fn admitted(core: &mut EngineCore) -> Vec<JobId> {
    core.take_admitted().into_iter().map(|(id, _)| id).collect()
}

/// Computes a prompt for another engine and pins its blocks.
fn pinned(core: &mut EngineCore, now: Duration) -> Pinned {
    let id = core.submit(&prefill()).unwrap();
    step(core).unwrap();
    let pinned = core.pin(now, id, "h", &prompt(), LEASE).unwrap();
    core.leave(id);
    pinned
}

const LEASE: Duration = Duration::from_secs(30);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn line_is_first_in_first_out_and_bounded() {
    let mut core = core(1, 2, 100);
    let first = core.submit(&whole(1, 1, 4)).unwrap();
    core.begin_step();
    assert_eq!(admitted(&mut core), [first]);
    let second = core.submit(&whole(2, 1, 4)).unwrap();
    let third = core.submit(&whole(3, 1, 4)).unwrap();
    assert_eq!(core.submit(&whole(4, 1, 4)), Err(Refusal::QueueFull { waiting: 2, max: 2 }));
    core.leave(first);
    assert!(core.steps_for_none(), "the step that runs is of no use");
    core.end_step(&mut Vec::new());
    core.begin_step();
    assert_eq!(admitted(&mut core), [second]);
    core.leave(third);
    assert_eq!(core.occupancy().waiting, 0, "a waiting request leaves the queue");
    core.leave(second);
    core.end_step(&mut Vec::new());
    assert_eq!((core.begin_step(), admitted(&mut core)), (None, Vec::new()), "and none starts");
    assert_eq!(core.occupancy(), Occupancy::default());
}

#[test]
fn without_a_queue_a_sequence_is_accepted_that_can_start_and_no_other() {
    let mut core = core(2, 0, 4);
    core.submit(&whole(1, 1, 4)).unwrap();
    core.begin_step();
    core.submit(&whole(2, 1, 4)).unwrap();
    assert_eq!(core.submit(&whole(3, 1, 4)), Err(Refusal::QueueFull { waiting: 1, max: 0 }));
}

#[test]
fn a_sequence_that_can_never_fit_is_refused_and_one_that_must_wait_for_blocks_waits() {
    let mut core = core(8, 8, 4);
    assert_eq!(core.submit(&whole(1, 4, 16)), Err(Refusal::TooLarge { need: 6, capacity: 4 }));
    let first = core.submit(&whole(1, 2, 2)).unwrap();
    let second = core.submit(&whole(2, 1, 1)).unwrap();
    step(&mut core).unwrap();
    assert_eq!(admitted(&mut core), [first], "3 of 4 blocks held, 2 needed");
    core.leave(first);
    step(&mut core).unwrap();
    assert_eq!(admitted(&mut core), [second]);
}

#[test]
fn a_lone_request_has_the_configured_latencies_and_a_batch_is_slower() {
    let mut core = core(3, 0, 100);
    let first = core.submit(&whole(1, 1, 4)).unwrap();
    assert_eq!(core.occupancy().waiting, 1, "not in the batch yet");
    // isl 17: 30 ms + 17 * 0.2 ms = 33.4 ms
    assert_eq!(step(&mut core), Some((Duration::from_micros(33_400), vec![0])));
    assert_eq!(step(&mut core), Some((Duration::from_millis(12), vec![0])));
    core.submit(&whole(2, 1, 4)).unwrap();
    // The step contains the prompt of one sequence and a token of the other: (33.4 ms + 12 ms) * 1.5.
    assert_eq!(step(&mut core), Some((Duration::from_micros(68_100), vec![0, 1])));
    assert_eq!(step(&mut core), Some((Duration::from_millis(18), vec![0, 1])));
    assert_eq!(core.transfer(17), Duration::from_micros(85));
    core.leave(first);
    assert_eq!(core.occupancy().running, 1);
}

#[test]
fn a_sequence_holds_blocks_while_it_awaits_its_kv_and_decodes_then() {
    for (first_token, steps) in [(false, 3), (true, 2)] {
        let mut core = core(2, 0, 8);
        let id = core.submit(&Job { kv: PromptKv::Awaited, ..whole(1, 2, 3) }).unwrap();
        assert_eq!((core.begin_step(), admitted(&mut core)), (None, vec![id]));
        let load = core.occupancy();
        assert_eq!((load.running, load.waiting, load.used_blocks), (0, 1, 3));
        assert_eq!(core.receive(id, first_token).is_some(), first_token);
        for _ in 0..steps {
            assert_eq!(step(&mut core), Some((Duration::from_millis(12), vec![0])), "{first_token}");
        }
        assert_eq!((step(&mut core), core.occupancy()), (None, Occupancy::default()));
    }
}

#[test]
fn pinned_blocks_outlive_their_sequence_until_they_are_pulled() {
    let mut core = core(1, 0, 8);
    let pinned = pinned(&mut core, at(0));
    let fingerprint = prompt().fingerprint();
    assert_eq!(pinned.block_ids, [1, 2, 3], "33 tokens in blocks of 16");
    assert_eq!((core.occupancy().used_blocks, core.occupancy().pinned_blocks), (3, 3));

    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2], fingerprint)), Pull::Wrong("block ids"));
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], 8)), Pull::Wrong("prompt"));
    assert_eq!(core.pull(at(1), "other", &ask(&[1, 2, 3], fingerprint)), Pull::Unknown);
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], fingerprint)), Pull::Pulled);
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], fingerprint)), Pull::Reused);
    assert_eq!(core.occupancy().pinned_blocks, 3, "the transfer still reads them");
    core.advance(core.next_deadline().unwrap());
    assert_eq!((core.occupancy().used_blocks, core.occupancy().pinned_blocks), (0, 0));
    assert_eq!(core.pull(at(2), "h", &ask(&[1, 2, 3], fingerprint)), Pull::Reused);
    assert_eq!(core.counts().stranded, 0);
}

#[test]
fn a_lease_that_ends_strands_the_handoff_and_frees_its_blocks_for_who_waits() {
    let mut core = core(4, 4, 4);
    pinned(&mut core, at(0));
    core.take_admitted();
    let waiting = core.submit(&whole(2, 2, 1)).unwrap();
    assert_eq!((core.begin_step(), admitted(&mut core)), (None, Vec::new()));
    assert_eq!(core.next_deadline(), Some(LEASE));
    core.advance(at(29));
    assert_eq!((core.begin_step(), admitted(&mut core)), (None, Vec::new()));
    let fingerprint = prompt().fingerprint();
    let late = core.pull(at(30), "h", &ask(&[1, 2, 3], fingerprint));
    assert_eq!(late, Pull::Expired, "late, even before the sweep");
    core.advance(at(30));
    assert!(core.begin_step().is_some());
    assert_eq!(admitted(&mut core), [waiting]);
    assert_eq!(core.counts().stranded, 1);
    assert_eq!(core.pull(at(31), "h", &ask(&[1, 2, 3], fingerprint)), Pull::Expired);
}

#[test]
fn a_finished_prefill_that_nobody_pins_is_released_when_it_leaves() {
    let mut core = core(4, 4, 8);
    let id = core.submit(&prefill()).unwrap();
    step(&mut core).unwrap();
    assert_eq!((core.occupancy().held, core.occupancy().used_blocks), (1, 3));
    core.leave(id);
    assert_eq!(core.occupancy(), Occupancy::default());
}

#[test]
fn a_second_equal_prompt_is_credited_and_counted() {
    let mut core = core(4, 4, 100);
    let first = core.submit(&whole(1, 4, 1)).unwrap();
    let second = core.submit(&whole(1, 4, 1)).unwrap();
    step(&mut core).unwrap();
    assert_eq!(core.take_admitted(), [(first, 0), (second, 64)]);
    let counts = core.counts();
    assert_eq!((counts.prefix_queries, counts.prefix_hits), (130, 64));
}

#[test]
fn without_prefix_caching_an_equal_prompt_is_computed_again() {
    let mut core = core(4, 4, 100);
    core.config.prefix_caching = false;
    for _ in 0..2 {
        let id = core.submit(&whole(1, 4, 1)).unwrap();
        step(&mut core).unwrap();
        assert_eq!(core.take_admitted(), [(id, 0)]);
    }
}

#[test]
fn blocks_that_the_output_fills_are_found_by_the_next_turn_and_told_with_their_tokens() {
    let mut core = core(4, 4, 8);
    core.collect_events();
    let prompt = Prompt::of_tokens((0..20).collect());
    let tokens = prompt.with_answer(0, 30);
    let chain: Arc<[u64]> = prompt.chain_with_answer(16, &tokens).into();
    let told = |position: usize| CacheEvent::Stored {
        hash: chain[position],
        parent: position.checked_sub(1).map(|before| chain[before]),
        tokens: tokens[position * 16..(position + 1) * 16].to_vec(),
        objects: Vec::new(),
    };
    let turn = Job {
        chain: Arc::clone(&chain),
        tokens: tokens.clone().into(),
        objects: prompt.objects(),
        isl: 20,
        out: 30,
        kv: PromptKv::Computed,
        keeps_blocks: false,
    };
    core.submit(&turn).unwrap();
    while step(&mut core).is_some() {}
    assert_eq!(core.take_events(), [told(0), told(1), told(2)]);
    core.submit(&Job { isl: 50, out: 1, ..turn }).unwrap();
    step(&mut core).unwrap();
    assert_eq!(core.take_admitted().last().map(|(_, cached)| *cached), Some(48));
}
