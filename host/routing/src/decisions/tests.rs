use std::sync::atomic::AtomicBool;

use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde_json::{Value, json};

use pointsman_workers::{
    CandidateIds, DpRank, Leg, ModelName, Pool, Registry, Snapshot, WorkerId, WorkerSpec,
};

use super::*;
use crate::{
    ids::Generation,
    policy::{Digest, World},
    slot::{Lane, PolicySummary, ProgramSummary, SlotKind},
};

mod order;

fn summary() -> Arc<ProgramSummary> {
    let wants = Wants::resolve(&["temperature", "session-hash"], &["worker-id", "kv-usage", "dp-rank"]);
    let step = PolicySummary {
        name: "fake".into(),
        version: "1".into(),
        digest: Digest([1; 32]),
        settings_digest: None,
        world: World::Selector,
        wants: wants.unwrap(),
        weight: None,
    };
    Arc::new(ProgramSummary {
        name: "first".into(),
        slot: SlotKind::Prefill,
        model: None,
        generation: Generation(3),
        lane: Lane::Active,
        policies: vec![step],
        picker: None,
    })
}

fn head(summary: &Arc<ProgramSummary>, seed: u64) -> DecisionHeader {
    DecisionHeader {
        model: ModelName::new("m"),
        program: summary.clone(),
        leg: Leg::Prefill,
        attempt: 0,
        by: DecidedBy::Policy,
        result: DecisionResult::Chosen(WorkerId(1), DpRank(0)),
        seed,
        now_us: 5,
        temperature: 0.0,
        cached_blocks: None,
        shadow: None,
        failed_shadow: None,
        took: Duration::ZERO,
        outcome: None,
        inputs_dropped: false,
        eligible: 0,
        stages: 1,
        stateful_stages: 0,
    }
}

/// Records a decision whose facts are numbers from its seed on.
fn put(
    decisions: &Decisions,
    summary: &Arc<ProgramSummary>,
    recorder: &mut Recorder,
    seed: u64,
    rows: usize,
) -> DecisionId {
    recorder.begin(summary);
    recorder.stage(0, &[], |out| out.extend((seed as u32..).take(rows)));
    recorder.end(Pool::empty(), None, &[], [&format!("request-{seed}"), "", ""]);
    decisions.record(head(summary, seed), recorder.recorded()).unwrap()
}

/// Returns whether the record is complete and its facts match its own seed.
fn sound(record: &Record) -> bool {
    let json = serde_json::to_value(record).unwrap();
    let seed = record.header.seed;
    let request = json["request_id"] == format!("request-{seed}");
    let temperature = json.pointer("/stages/0/request/temperature").and_then(Value::as_f64);
    request && temperature.is_none_or(|bits| bits as f32 == f32::from_bits(seed as u32))
}

fn copy(decisions: &Decisions, id: DecisionId) -> Option<Record> {
    decisions.get(id, |_, _| true)
}

/// Workers with these ids, which all serve the model `m`.
fn fleet(ids: impl Iterator<Item = u64>) -> Arc<Snapshot> {
    let registry = Registry::default();
    for id in ids {
        let flag = format!("id={id},role=prefill,engine=vllm,model=m,url=http://h{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
    }
    registry.snapshot()
}

/// Records a decision among these rows of a pool.
fn put_among(decisions: &Decisions, summary: &Arc<ProgramSummary>, pool: &Pool, rows: &[u32]) -> DecisionId {
    let mut recorder = Recorder::default();
    recorder.begin(summary);
    recorder.set_candidates(rows);
    recorder.stage(0, rows, |_| {});
    recorder.end(pool, None, &[], ["r", "", ""]);
    decisions.record(head(summary, 1), recorder.recorded()).unwrap()
}

#[test]
fn candidates_are_those_of_the_pool_however_they_are_kept() {
    let summary = summary();
    // Ids of more than 32 bits, and one ring without room for shared ids.
    let snapshot = fleet((0..300).map(|id| id * 0x1_0000_0001));
    let pool = snapshot.pool(&ModelName::new("m"), Leg::Prefill);
    let all: Vec<u32> = (0..300).collect();
    let rows: [Vec<u32>; 6] = [
        all.clone(),
        all.iter().copied().filter(|row| *row != 7).collect(),
        all.iter().copied().filter(|row| row % 100 > 1).collect(),
        // So many ranges that a list is shorter.
        all.iter().copied().filter(|row| row % 3 > 0).collect(),
        vec![3, 299],
        Vec::new(),
    ];
    for bytes in [1_000_000, 2 * 4_096] {
        let decisions = Decisions::new(4, bytes, Wants::default());
        for rows in &rows {
            let id = put_among(&decisions, &summary, pool, rows);
            let record = copy(&decisions, id).unwrap();
            assert!(!record.header.inputs_dropped);
            let candidates = rows.iter().map(|row| &pool[*row as usize]);
            let wanted: Vec<_> = candidates.map(|one| json!([one.worker.id().0, one.rank.0])).collect();
            let json = serde_json::to_value(&record).unwrap();
            assert_eq!(json["candidates"], Value::from(wanted), "{bytes} bytes, {} rows", rows.len());
        }
    }
}

#[test]
fn a_record_of_a_large_pool_has_its_candidates_after_the_pool_is_gone() {
    let summary = summary();
    let decisions = Decisions::new(1, 1_000_000, Wants::default());
    let snapshot = fleet(0..100);
    let pool = snapshot.pool(&ModelName::new("m"), Leg::Prefill);
    let ids: std::sync::Weak<CandidateIds> = Arc::downgrade(pool.ids());
    let rows: Vec<u32> = (0..100).collect();
    let id = put_among(&decisions, &summary, pool, &rows);
    drop(snapshot);
    let json = serde_json::to_value(copy(&decisions, id).unwrap()).unwrap();
    assert_eq!(json["candidates"].as_array().unwrap().len(), 100);
    // Another decision takes its place, and the ids go with it.
    put(&decisions, &summary, &mut Recorder::default(), 2, 1);
    assert!(ids.upgrade().is_none());
}

#[test]
fn the_ring_keeps_the_newest_decisions_within_both_bounds() {
    let summary = summary();
    let mut random = SmallRng::seed_from_u64(7);
    let mut recorder = Recorder::default();
    for (keep, bytes) in [(1, 4_096), (3, 8_192), (10, 20_000), (100, 65_536), (1_000, 1_000_000)] {
        let decisions = Decisions::new(keep, bytes, Wants::default());
        let mut ids = Vec::new();
        for seed in 0..5_000 {
            let rows = random.random_range(0..if seed % 50 == 0 { 2_000 } else { 60 });
            ids.push(put(&decisions, &summary, &mut recorder, seed, rows));
            if seed % 97 == 0 || seed > 4_990 {
                let kept = decisions.ids();
                assert!(kept.len() <= keep, "{} of {keep}", kept.len());
                assert!(kept.iter().all(|id| copy(&decisions, *id).is_some_and(|record| sound(&record))));
                assert_eq!(kept.first(), ids.last(), "the newest is always kept");
                let rising = kept.windows(2).all(|pair| pair[0] > pair[1]);
                assert!(rising, "no id twice");
            }
        }
        // Ids of consecutive decisions rise.
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        if (keep, bytes) == (1_000, 1_000_000) {
            assert_eq!(decisions.ids(), ids.iter().rev().take(1_000).copied().collect::<Vec<_>>());
        }
    }
}

#[test]
fn inputs_that_exceed_a_shard_are_dropped_and_the_rest_is_recorded() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(4, 4_096, Wants::default());
    let id = put(&decisions, &summary, &mut recorder, 1, 5_000);
    let json = serde_json::to_value(copy(&decisions, id).unwrap()).unwrap();
    assert_eq!((&json["inputs_dropped"], &json["request_id"]), (&json!(true), &json!("request-1")));
    assert_eq!(json["choice"], json!({ "worker": 1, "dp_rank": 0 }));
    let id = put(&decisions, &summary, &mut recorder, 2, 10);
    assert!(!copy(&decisions, id).unwrap().header.inputs_dropped);
}

#[test]
fn t1_without_inputs_the_called_policies_are_told() {
    let step = |name: &str, world| PolicySummary {
        name: name.into(),
        version: "1".into(),
        digest: Digest([7; 32]),
        settings_digest: None,
        world,
        wants: Wants::default(),
        weight: None,
    };
    let policies = vec![step("near", World::Filter), step("last", World::Selector)];
    let summary = Arc::new(ProgramSummary {
        name: "first".into(),
        slot: SlotKind::Prefill,
        model: None,
        generation: Generation(3),
        lane: Lane::Active,
        policies,
        picker: None,
    });
    let always = Wants::resolve(&["prompt-tokens"], &[""; 0]).unwrap();
    for (always, stages, called) in [
        (Wants::default(), 1, &["near"][..]),
        (Wants::default(), 2, &["near", "last"]),
        (always.clone(), 2, &["near"]),
        (always, 3, &["near", "last"]),
    ] {
        let (decisions, mut recorder) = (Decisions::new(4, 4_096, always), Recorder::default());
        recorder.begin(&summary);
        recorder.stage(0, &[], |out| out.extend(0..5_000));
        recorder.end(Pool::empty(), None, &[], ["request-1", "", ""]);
        let head = DecisionHeader { stages, ..head(&summary, 1) };
        let id = decisions.record(head, recorder.recorded()).unwrap();
        let json = serde_json::to_value(copy(&decisions, id).unwrap()).unwrap();
        let names: Vec<_> = json["called"].as_array().unwrap().iter().map(|one| &one["policy"]).collect();
        // T1.1
        assert_eq!(names, called, "{stages}");
        assert_eq!(json["called"][0]["world"], "filter");
    }
}

#[test]
fn a_ring_without_capacity_records_nothing() {
    for decisions in [Decisions::off(), Decisions::new(0, 1 << 20, Wants::default())] {
        assert!(!decisions.is_on() && decisions.ids().is_empty());
        assert!(copy(&decisions, "12".parse().unwrap()).is_none());
    }
}

#[test]
fn facts_are_serialized_by_name_and_type() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(4, 65_536, Wants::default());
    recorder.begin(&summary);
    recorder.set_candidates(&[4, 7]);
    let worker_ids = [0xffff_fff0, 2, 1, 0];
    let rest = [0.25_f32.to_bits(), f32::NAN.to_bits(), 0, 1];
    recorder.stage(0, &[4, 7], |out| {
        out.extend([0.1_f32.to_bits(), 9, 1].into_iter().chain(worker_ids).chain(rest));
    });
    recorder.end(Pool::empty(), None, &[2.5, 1.5], ["r", "why not", ""]);
    let id = decisions.record(head(&summary, 8), recorder.recorded()).unwrap();
    let json = serde_json::to_value(copy(&decisions, id).unwrap()).unwrap();
    let stage = &json["stages"][0];
    assert_eq!(stage["request"]["session-hash"], json!(9 + (1_u64 << 32)));
    assert_eq!(stage["request"]["temperature"].to_string(), "0.10000000149011612");
    let expected = json!({
        "worker-id": [0x1_ffff_fff0_u64, 2], "kv-usage": [0.25, "0x7fc00000"], "dp-rank": [0, 1],
    });
    assert_eq!(stage["workers"], expected);
    assert_eq!((&json["reason"], &json["policy"]), (&json!("why not"), &json!("fake")));
    assert_eq!(json["id"], id.to_string());
    assert_eq!(id.to_string().parse(), Ok(id));
}

#[test]
fn rows_left_by_filters_are_serialized_by_position() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(4, 65_536, Wants::default());
    recorder.begin(&summary);
    recorder.set_candidates(&[2, 5, 9]);
    recorder.stage(0, &[2, 5, 9], |_| {});
    recorder.stage(0, &[2, 9], |_| {});
    recorder.end(Pool::empty(), Some(&[9]), &[1.0], ["r", "", ""]);
    let id =
        decisions.record(DecisionHeader { stages: 2, ..head(&summary, 1) }, recorder.recorded()).unwrap();
    let json = serde_json::to_value(copy(&decisions, id).unwrap()).unwrap();
    let kept = |stage: usize| json["stages"][stage]["kept"].clone();
    assert_eq!((kept(0), kept(1), &json["left"]), (Value::Null, json!([0, 2]), &json!([2])));
}

fn outcome(output_tokens: u32) -> Outcome {
    Outcome {
        status: 200,
        code: "ok",
        retried: false,
        moved: false,
        ttft: None,
        itl: None,
        output_tokens,
        output_source: Some("usage"),
        ended_at_ms: 7,
        duration: Duration::from_millis(9),
        cached_predicted: None,
        cached_reported: None,
        prompt_tokens: 3,
        times: LegTimes { queued: Some(1_500), ..LegTimes::default() },
        run: None,
        stream_failed: None,
        continues: None,
    }
}

#[test]
fn an_outcome_reaches_its_decision_also_beside_numbers_that_other_shards_took() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(4, 4_096, Wants::default());
    recorder.begin(&summary);
    recorder.end(Pool::empty(), None, &[], ["", "", ""]);
    // The ring keeps the last four of these.
    let numbers = [0_u32, 1, 2, 5, 9, 10];
    for number in numbers {
        let mut ring = decisions.shards[0].ring.lock();
        assert_eq!(ring.push(number.into(), head(&summary, 1), recorder.recorded()), u64::from(number));
    }
    for number in 0..12 {
        decisions.outcome(decisions.id(number.into(), 0), outcome(number));
    }
    for number in 0..12 {
        let kept = numbers[2..].contains(&number);
        let record = copy(&decisions, decisions.id(number.into(), 0));
        let told = record.map(|record| record.header.outcome.unwrap().output_tokens);
        assert_eq!(told, kept.then_some(number), "{number}");
    }
}

#[test]
fn an_outcome_is_added_while_a_reader_holds_the_lock() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let outcome = outcome(3);
    let decisions = Decisions::new(4, 4_096, Wants::default());
    let id = put(&decisions, &summary, &mut recorder, 1, 0);
    let held = decisions.get(id, |_, _| {
        // The reader holds the lock now.
        decisions.outcome(id, outcome);
        true
    });
    assert_eq!(held.unwrap().header.outcome, None);
    assert_eq!(copy(&decisions, id).unwrap().header.outcome, Some(outcome));
    assert_eq!(
        decisions.get(id, |head, request| head.outcome.is_none() && request == "request-1").map(drop),
        None
    );
}

#[test]
fn concurrent_writers_and_readers_lose_and_mix_nothing() {
    let decisions = Decisions::new(500, 200_000, Wants::default());
    let stop = AtomicBool::new(false);
    let (written, read) = std::thread::scope(|scope| {
        let writer = |first: u64| {
            let (decisions, stop) = (&decisions, &stop);
            scope.spawn(move || {
                let (summary, mut recorder) = (summary(), Recorder::default());
                let mut ids = Vec::new();
                for seed in (first..).step_by(2).take(30_000) {
                    ids.push(put(decisions, &summary, &mut recorder, seed, (seed % 90) as usize));
                }
                stop.store(true, Ordering::Relaxed);
                ids
            })
        };
        let writers = [writer(0), writer(1)];
        let reader = scope.spawn(|| {
            let mut read = 0;
            while !stop.load(Ordering::Relaxed) {
                for record in decisions.ids().into_iter().filter_map(|id| copy(&decisions, id)) {
                    assert!(sound(&record), "{record:?}");
                    read += 1;
                }
            }
            read
        });
        (writers.map(|writer| writer.join().unwrap()), reader.join().unwrap())
    });
    let mut ids: Vec<_> = written.into_iter().flatten().collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), decisions.lost()), (60_000, 0), "every decision has an id of its own");
    assert!(read > 0 && decisions.ids().len() <= 500);
}

#[test]
fn newest_is_a_prefix_of_all_ids_and_a_summary_agrees_with_its_record() {
    let (summary, mut recorder) = (summary(), Recorder::default());
    let decisions = Decisions::new(100, 1 << 20, Wants::default());
    let ids: Vec<_> = (0..70).map(|seed| put(&decisions, &summary, &mut recorder, seed, 5)).collect();
    assert_eq!(decisions.newest(9), decisions.ids()[..9]);
    assert_eq!(decisions.newest(500), decisions.ids());
    let record = copy(&decisions, ids[3]).unwrap();
    let (whole, brief) =
        (serde_json::to_value(&record).unwrap(), serde_json::to_value(record.summary()).unwrap());
    for field in ["id", "request_id", "leg", "slot", "decider", "choice", "runner_up", "plan", "outcome"] {
        assert_eq!(brief[field], whole[field], "{field}");
    }
    assert!(brief.get("stages").is_none() && brief.get("candidates").is_none());
}
