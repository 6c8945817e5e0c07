//! `max_rows` of a slot (F9).

use std::collections::BTreeSet;

use pointsman_workers::BookingRequest;
use serde_json::Value;

use super::*;

const WORKERS: u64 = 200;
/// Workers that hold the whole prompt, and those that hold its first block.
const WHOLE: std::ops::RangeInclusive<u64> = 101..=106;
const FIRST: std::ops::RangeInclusive<u64> = 120..=139;
/// Workers without any booking.
const IDLE: std::ops::RangeInclusive<u64> = 31..=34;

/// Keeps one worker.
#[derive(Debug)]
struct Only(PolicyInfo, u32);

impl Policy for Only {
    fn info(&self) -> &PolicyInfo {
        &self.0
    }

    fn keep(
        &self,
        _: &mut DecisionContext<'_>,
        call: &Call,
        facts: &[u32],
        kept: &mut Vec<u32>,
    ) -> Result<(), Failure> {
        kept.clear();
        kept.extend((0..call.rows).filter(|row| facts[*row as usize] == self.1));
        Ok(())
    }
}

fn only(worker: u32) -> Arc<dyn Policy> {
    let info = fake(World::Filter, (&[], &["worker-id"]), Answer::Keep(vec![])).info().clone();
    Arc::new(Only(info, worker))
}

/// A large fleet whose aggregated slot shows its policies `max_rows` candidates, and the bookings on it.
fn large(program: Program, max_rows: Option<u32>) -> (Fixture, Vec<pointsman_workers::Booking>) {
    let fixture = recording(fixture(program), &[]);
    let spec = |id: u64| {
        let flag = format!("id={id},role=aggregated,engine=vllm,url=http://l:{id},model=m");
        WorkerSpec::parse_flag(&flag).unwrap()
    };
    fixture.registry.apply((1..=WORKERS).map(spec).collect(), &[]);
    let (snapshot, request) = (fixture.registry.snapshot(), request());
    let mut bookings = Vec::new();
    for worker in (1..=WORKERS).filter_map(|id| snapshot.get(WorkerId(id))) {
        worker.set_health(Health::Healthy);
        let id = worker.id().0;
        let blocks = match id {
            id if WHOLE.contains(&id) => 4,
            id if FIRST.contains(&id) => 1,
            _ => 0,
        };
        let held: Vec<BlockHash> = request.prefix.hashes().iter().copied().take(blocks).collect();
        fixture.router.index().record(worker.id(), DpRank(0), &held.into(), Instant::now());
        if !IDLE.contains(&id) {
            let candidate = worker.candidates().remove(0);
            bookings.push(candidate.book(&BookingRequest {
                total_prompt_blocks: 10,
                ..BookingRequest::new(Leg::Aggregated, Default::default(), 160 + id as u32, 16)
            }));
        }
    }
    fixture.router.index().flush();
    fixture.router.slots().get(&ModelName::new("m"), SlotKind::Aggregated).set_max_rows(max_rows);
    (fixture, bookings)
}

fn ids(record: &Value) -> BTreeSet<u64> {
    record["candidates"].as_array().unwrap().iter().map(|id| id[0].as_u64().unwrap()).collect()
}

fn route(fixture: &Fixture, seed: u64) -> (Routed, Value) {
    let routed = fixture.route(Leg::Aggregated, |query| query.seed = seed).unwrap();
    let record = recorded(fixture).remove(0);
    (routed, record)
}

fn least_requests() -> Program {
    scorer(&["active-requests"], 0)
}

#[test]
fn f9_policies_see_the_best_matches_the_least_loaded_and_a_sample() {
    let (fixture, _bookings) = large(least_requests(), Some(16));
    let (routed, record) = route(&fixture, 7);
    let listed = ids(&record);
    // F9.1, F9.6
    assert_eq!(
        (listed.len(), &record["eligible"], &record["stages"][0]["rows"]),
        (16, &200.into(), &16.into())
    );
    assert_eq!(routed.receipt.candidates, 200);
    // F9.2: half of the list
    assert!(WHOLE.chain(FIRST).filter(|id| listed.contains(id)).count() >= 8);
    // F9.2: those that hold more come first
    assert!(WHOLE.chain(IDLE).all(|id| listed.contains(&id)), "{listed:?}");
    assert!(IDLE.contains(&routed.receipt.worker.0), "the policy chooses among them");
}

#[test]
fn f9_the_seed_decides_on_the_sample() {
    let (fixture, _bookings) = large(least_requests(), Some(16));
    let mut lists = Vec::new();
    for seed in [7, 8, 7] {
        let (routed, record) = route(&fixture, seed);
        drop(routed);
        lists.push(ids(&record));
    }
    // The first choices are recorded in the index, and hold as much as the best.
    let preview = |seed: u64| {
        let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
        let mut query = query(&snapshot, &model, Leg::Aggregated, &request);
        (query.seed, query.explain) = (seed, true);
        let over = RouterConfigOverride::default();
        let preview = fixture.router.preview(&query, &over).unwrap();
        preview.terms.iter().map(|((worker, _), _)| worker.0).collect::<BTreeSet<_>>()
    };
    fixture.router.index().flush();
    // F9.3
    assert_eq!(preview(3), preview(3));
    assert_ne!(preview(3), preview(4));
    assert_ne!(lists[0], lists[1]);
}

#[test]
fn f9_pins_sessions_and_plans_reach_every_eligible_candidate() {
    let (fixture, _bookings) = large(least_requests(), Some(8));
    let wanted = (WorkerId(190), DpRank(0));
    let by = |change: &dyn Fn(&mut Query<'_>)| {
        let routed = fixture.route(Leg::Aggregated, |query| change(query)).unwrap();
        (routed.receipt.worker, routed.receipt.decider)
    };
    // F9.4
    assert_eq!(by(&|query| query.session = Some(wanted)), (wanted.0, Decider::Session));
    assert_eq!(by(&|query| query.planned = Some(wanted)), (wanted.0, Decider::Plan));
    assert_eq!(by(&|query| query.pin = Some((wanted.0, None))), (wanted.0, Decider::Pin));
}

#[test]
fn f9_a_list_that_the_filters_drop_is_replaced_by_all_candidates() {
    let program = |worker| match least_requests() {
        Program::Scorers { scorers, picker, .. } => {
            Program::Scorers { filters: vec![only(worker)], scorers, picker }
        }
        other => other,
    };
    let (fixture, _bookings) = large(program(190), Some(8));
    for seed in 0..20 {
        let (routed, record) = route(&fixture, seed);
        // F9.5
        assert_eq!((routed.receipt.worker, &routed.receipt.decider), (WorkerId(190), &Decider::Policy));
        let whole = ids(&record).len() == 200;
        assert!(whole || ids(&record).contains(&190), "{record}");
    }
    let (fixture, _bookings) = large(program(9_999), Some(8));
    let refused = fixture.route(Leg::Aggregated, |_| {}).unwrap_err();
    // F9.5: there may be none
    assert!(matches!(refused, RouteError::NoWorker { .. }), "{refused:?}");
}

#[test]
fn f9_without_max_rows_and_natively_all_candidates_are_seen() {
    let (fixture, _bookings) = large(least_requests(), None);
    // F9.1: only with `max_rows`
    assert_eq!(ids(&route(&fixture, 1).1).len(), 200);
    let (fixture, _bookings) = large(Program::Native(NativeMode::LeastLoaded), Some(8));
    // F9.1: only policies
    assert_eq!(ids(&route(&fixture, 1).1).len(), 200);
}
