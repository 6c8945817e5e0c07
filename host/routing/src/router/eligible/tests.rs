use std::time::Duration;

use pointsman_workers::{
    BookingRequest, DpRank, EngineLoad, Health, Leg, ModelName, Refusal, Registry, Snapshot, WorkerId,
    WorkerSpec,
};
use prefix_index::Prefix;
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::IndexedRandom as _};
use tokio::time::Instant;

use super::*;
use crate::{
    RoutingRequest,
    busy::{BusyByLeg, BusyThresholds},
};

const MODEL: &str = "m";

/// Prefill and decode workers that differ in everything that decides on eligibility.
fn fleet(random: &mut SmallRng) -> Registry {
    let registry = Registry::default();
    // Then there are more groups of descriptions than a word has bits.
    let all_differ = random.random_bool(0.2);
    for id in 1..=random.random_range(2..150_u64) {
        let role = ["prefill", "decode"][random.random_range(0..2)];
        let mut flag = format!("id={id},role={role},engine=vllm,url=http://a:{id},model={MODEL}");
        let mut add = |chance: f64, text: &str| {
            if random.random_bool(chance) {
                flag.push_str(text);
            }
        };
        add(0.2, ",dp_size=3");
        add(0.2, ",max_concurrency=1");
        add(0.5, ",total_blocks=20,block_size=4");
        add(0.1, ",transport=mooncake,bootstrap_port=8998");
        add(0.1, ",kv_compatibility=0.32");
        add(0.3, ",taint=gold");
        add(0.2, ",lora=writer");
        match (role, random.random_range(0..4)) {
            ("prefill", 0) => flag.push_str(",topology.rack=r1,kv_transfer=required:rack"),
            (_, 0 | 1) => flag.push_str(",topology.rack=r1"),
            (_, 2) => flag.push_str(",topology.rack=r2"),
            _ => {}
        }
        if !flag.contains("kv_compatibility") && random.random_bool(0.3) {
            flag.push_str(",kv_compatibility=0.33");
        }
        if all_differ {
            flag.push_str(&format!(",label.host={id}"));
        }
        let worker = registry.upsert(WorkerSpec::parse_flag(&flag).unwrap());
        let health = [Health::Healthy, Health::Healthy, Health::Healthy, Health::Unhealthy, Health::Unknown];
        worker.set_health(*health.choose(random).unwrap());
        worker.set_draining(random.random_bool(0.1));
        if random.random_bool(0.1) {
            (0..20).for_each(|_| worker.note_outcome(false));
        }
        if random.random_bool(0.3) {
            worker.note_outcome(true);
        }
        if random.random_bool(0.1) {
            worker.note_refusal(Refusal { retry_after: None, is_too_many: false }, Instant::now(), 0);
        }
        if random.random_bool(0.1) {
            let long_ago = Refusal { retry_after: Some(Duration::from_nanos(1)), is_too_many: false };
            worker.note_refusal(long_ago, Instant::now(), random.random_range(0..2));
        }
        if random.random_bool(0.4) {
            let waiting = random.random_bool(0.8).then(|| random.random_range(0..4));
            let kv_usage = random.random_bool(0.8).then(|| random.random_range(0.0..1.0));
            worker.set_engine_load(Some(EngineLoad {
                running: Some(1),
                waiting,
                kv_usage,
                read_at: Instant::now(),
            }));
        }
    }
    registry
}

fn booking(tokens: u32) -> BookingRequest {
    BookingRequest::new(Leg::Decode, Prefix::default(), tokens, 4)
}

fn request(random: &mut SmallRng) -> RoutingRequest {
    let allowed = random.random_bool(0.2).then(|| random.random_range(0..8));
    RoutingRequest {
        required_taints: if random.random_bool(0.2) { vec!["gold".into()] } else { vec![] },
        lora: random.random_bool(0.2).then(|| "writer".into()),
        allowed_workers: allowed
            .map(|allowed| (0..allowed).map(|_| WorkerId(random.random_range(1..200))).collect()),
        ..RoutingRequest::default()
    }
}

fn rules(random: &mut SmallRng, leg: Leg) -> BusyRules {
    if random.random_bool(0.5) {
        return BusyRules::default();
    }
    let thresholds = BusyThresholds {
        kv_usage: random.random_bool(0.5).then_some(0.6),
        prefill_tokens: random.random_bool(0.5).then_some(20),
        engine_queue: random.random_bool(0.5).then_some(2),
    };
    BusyRules::new(BusyByLeg::from([(leg, thresholds)]), []).with_queue(random.random_bool(0.3))
}

fn some_candidates(random: &mut SmallRng, pool: &Pool, chance: f64) -> Vec<CandidateId> {
    let chosen = pool.iter().filter(|_| random.random_bool(chance));
    chosen.map(|candidate| (candidate.worker_id(), candidate.rank)).collect()
}

/// Returns the rows that are eligible when each candidate is asked alone.
fn expected(query: &Query<'_>, busy: &BusyRules, pool: &Pool) -> Result<Vec<u32>, bool> {
    let limits = busy.limits_of(query, query.leg);
    let tried = |candidate: &Candidate| query.tried.contains(&(candidate.worker_id(), candidate.rank));
    let untried = || (0_u32..).zip(pool).filter(|(_, candidate)| !tried(candidate));
    let answers: Vec<_> =
        untried().map(|(row, candidate)| (row, ineligible(query, &limits, candidate))).collect();
    let rows = |wanted: fn(&Option<Refused>) -> bool| -> Vec<u32> {
        answers.iter().filter(|(_, answer)| wanted(answer)).map(|(row, _)| *row).collect()
    };
    let eligible = rows(|answer| answer.is_none());
    let failing = rows(|answer| matches!(answer, Some(Refused::Failing)));
    let trial = rows(|answer| matches!(answer, Some(Refused::Paused(pause)) if pause.may_be_tried));
    let trial = if busy.requests_wait() { vec![] } else { trial };
    let in_turn = [eligible, trial, failing];
    let rows_left = in_turn.into_iter().find(|rows| !rows.is_empty()).unwrap_or_default();
    let is_busy =
        || !rows(|answer| matches!(answer, Some(Refused::Busy(_) | Refused::AtLearnedLimit))).is_empty();
    if rows_left.is_empty() { Err(is_busy()) } else { Ok(rows_left) }
}

fn check(random: &mut SmallRng, snapshot: &Snapshot) -> Result<usize, bool> {
    let model = ModelName::new(MODEL);
    let leg = [Leg::Prefill, Leg::Decode][random.random_range(0..2)];
    let (pool, others) = match leg {
        Leg::Prefill => (snapshot.pool(&model, leg), snapshot.pool(&model, Leg::Decode)),
        _ => (snapshot.pool(&model, leg), snapshot.pool(&model, Leg::Prefill)),
    };
    let request = request(random);
    let tried = if random.random_bool(0.3) { some_candidates(random, pool, 0.3) } else { vec![] };
    let peer = others.choose(random).filter(|_| random.random_bool(0.5));
    let busy = rules(random, leg);
    let other_pin = others.choose(random).filter(|_| random.random_bool(0.3));
    let reserved = pool.iter().collect::<Vec<_>>().choose(random).map(|candidate| candidate.worker_id());
    let pairing = Pairing {
        is_first: random.random_bool(0.5),
        other_pin: other_pin.map(|other| (other.worker_id(), None)),
        reserved: reserved.filter(|_| random.random_bool(0.5)),
        committed: None,
    };
    let query = Query {
        tried: &tried,
        other_leg: peer.map(|peer| (peer.worker_id(), DpRank(0))),
        pairing,
        probe: random.random_bool(0.1),
        continues: random.random_bool(0.1),
        seed: 1,
        ..Query::new(snapshot, &model, leg, &request)
    };
    let mut rows = vec![7];
    let found = match eligible_rows(&query, &busy, pool, &mut rows) {
        Ok(()) => Ok(rows),
        Err(error) => Err(matches!(error, RouteError::AllBusy(_))),
    };
    assert_eq!(found, expected(&query, &busy, pool), "{leg} {request:?} {busy:?}");
    found.map(|rows| rows.len())
}

#[test]
fn f6_the_columns_leave_the_candidates_that_say_they_are_eligible_when_asked() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    let (mut some, mut none, mut all_busy) = (0, 0, 0);
    for seed in 0..200 {
        let mut random = SmallRng::seed_from_u64(seed);
        let registry = fleet(&mut random);
        let snapshot = registry.snapshot();
        let workers = snapshot.workers();
        let candidates: Vec<_> = workers.iter().flat_map(|worker| worker.candidates()).collect();
        let booked: Vec<_> = candidates.iter().filter(|_| random.random_bool(0.4)).collect();
        let tokens = random.random_range(1..60);
        let _bookings: Vec<_> =
            booked.into_iter().map(|candidate| candidate.book(&booking(tokens))).collect();
        for _ in 0..20 {
            match check(&mut random, &snapshot) {
                Ok(_) => some += 1,
                Err(true) => all_busy += 1,
                Err(false) => none += 1,
            }
        }
    }
    // The comparison means something only when each outcome occurs.
    assert!(some > 1_000 && none > 100 && all_busy > 20, "{some}, {none}, {all_busy}");
}
