use super::*;

fn model() -> TimeModel {
    TimeModel {
        overhead: Duration::from_millis(30),
        prefill_per_token: Duration::from_micros(200),
        itl: Duration::from_millis(12),
        transfer_per_token: Duration::from_micros(5),
        load_factor: 2.0,
        max_num_seqs: 3,
        jitter: 0.0,
        interference: 0.0,
    }
}

fn core(max_num_seqs: u32, max_waiting: u32, blocks: u32) -> EngineCore {
    EngineCore::new(Limits { max_num_seqs, max_waiting, blocks, block_size: 16 }, model(), 1)
}

fn job(seed: u64, full_blocks: u64, out: u32) -> Job {
    let chain = (0..full_blocks).map(|i| seed * 1000 + i).collect();
    Job { chain, isl: u32::try_from(full_blocks).unwrap() * 16 + 1, out }
}

fn ask(block_ids: &[u32], fingerprint: u64) -> Ask<'_> {
    Ask { block_ids: Some(block_ids), fingerprint, transfer: Duration::from_millis(10) }
}

const LEASE: Duration = Duration::from_secs(30);

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn line_is_first_in_first_out_and_bounded() {
    let mut core = core(1, 2, 100);
    let first = core.submit(job(1, 1, 4)).unwrap();
    assert!(first.started.is_some());
    let second = core.submit(job(2, 1, 4)).unwrap();
    let third = core.submit(job(3, 1, 4)).unwrap();
    assert_eq!((second.started, third.started), (None, None));
    assert_eq!(core.submit(job(4, 1, 4)), Err(Refusal::QueueFull { waiting: 2, max: 2 }));
    assert_eq!(core.leave(first.id).iter().map(|(id, _)| *id).collect::<Vec<_>>(), [second.id]);
    assert_eq!(core.leave(third.id), [], "a waiting one leaves the line, nobody starts");
    assert_eq!(core.leave(second.id), []);
    assert_eq!(core.occupancy(), Occupancy::default());
}

#[test]
fn a_sequence_that_can_never_fit_is_refused_and_one_that_must_wait_for_blocks_waits() {
    let mut core = core(8, 8, 4);
    assert_eq!(core.submit(job(1, 4, 16)), Err(Refusal::TooLarge { need: 6, capacity: 4 }));
    let first = core.submit(job(1, 2, 1)).unwrap();
    let second = core.submit(job(2, 1, 1)).unwrap();
    assert!(first.started.is_some() && second.started.is_none(), "3 of 4 blocks held, 2 needed");
    assert_eq!(core.leave(first.id)[0].0, second.id);
}

#[test]
fn load_counts_those_in_the_batch_only() {
    let mut core = core(3, 0, 100);
    let ids: Vec<JobId> = (0..3).map(|i| core.submit(job(i, 1, 4)).unwrap().id).collect();
    assert_eq!(core.occupancy().waiting, 3, "admitted, not in the batch yet");
    // isl 17: 30 ms + 17 * 0.2 ms = 33.4 ms
    assert_eq!(core.begin_prefill(ids[0]), Duration::from_micros(33_400));
    assert_eq!(core.begin_prefill(ids[1]), Duration::from_micros(33_400).mul_f64(1.5));
    assert_eq!(core.decode_step(ids[0]), Duration::from_millis(18));
    assert_eq!(core.decode_step(ids[2]), Duration::from_millis(24));
    assert_eq!(core.transfer(ids[2]), Duration::from_micros(85));
    core.leave(ids[0]);
    assert_eq!(core.occupancy().running, 2);
}

#[test]
fn pinned_blocks_outlive_their_sequence_until_they_are_pulled() {
    let mut core = core(1, 0, 8);
    let id = core.submit(job(1, 2, 1)).unwrap().id;
    let pinned = core.pin(at(0), id, "h", 7, LEASE).unwrap();
    assert_eq!(pinned.block_ids, [1, 2, 3], "33 tokens in blocks of 16");
    core.leave(id);
    assert_eq!((core.occupancy().used_blocks, core.occupancy().pinned_blocks), (3, 3));

    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2], 7)), Pull::Wrong("block ids"));
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], 8)), Pull::Wrong("prompt"));
    assert_eq!(core.pull(at(1), "other", &ask(&[1, 2, 3], 7)), Pull::Unknown);
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], 7)), Pull::Pulled);
    assert_eq!(core.pull(at(1), "h", &ask(&[1, 2, 3], 7)), Pull::Reused);
    assert_eq!(core.occupancy().pinned_blocks, 3, "the transfer still reads them");
    core.advance(core.next_deadline().unwrap());
    assert_eq!((core.occupancy().used_blocks, core.occupancy().pinned_blocks), (0, 0));
    assert_eq!(core.pull(at(2), "h", &ask(&[1, 2, 3], 7)), Pull::Reused);
    assert_eq!(core.counts().stranded, 0);
}

#[test]
fn a_lease_that_ends_strands_the_handoff_and_frees_its_blocks_for_who_waits() {
    let mut core = core(4, 4, 4);
    let id = core.submit(job(1, 2, 1)).unwrap().id;
    core.pin(at(0), id, "h", 7, LEASE).unwrap();
    core.leave(id);
    let waiting = core.submit(job(2, 2, 1)).unwrap();
    assert_eq!(waiting.started, None);
    assert_eq!(core.next_deadline(), Some(LEASE));
    assert_eq!(core.advance(at(29)), []);
    assert_eq!(core.pull(at(30), "h", &ask(&[1, 2, 3], 7)), Pull::Expired, "late, even before the sweep");
    assert_eq!(core.advance(at(30))[0].0, waiting.id);
    assert_eq!(core.counts().stranded, 1);
    assert_eq!(core.pull(at(31), "h", &ask(&[1, 2, 3], 7)), Pull::Expired);
}

#[test]
fn a_second_equal_prompt_is_credited_and_counted() {
    let mut core = core(4, 4, 100);
    let first = core.submit(job(1, 4, 1)).unwrap();
    assert_eq!(first.started.unwrap().cached, 0);
    let second = core.submit(job(1, 4, 1)).unwrap();
    assert_eq!(second.started.unwrap().cached, 64);
    let counts = core.counts();
    assert_eq!((counts.prefix_queries, counts.prefix_hits), (130, 64));
}
