//! The worker for which a decode override planned local prefill (D4).

use pointsman_workers::{EngineLoad, Leg};
use tokio::time::Instant;

use super::*;
use crate::{
    busy::{BusyByLeg, BusyRules, BusyThresholds},
    query::CandidateId,
};

const PLANNED: CandidateId = (WorkerId(3), DpRank(0));
const OTHER: CandidateId = (WorkerId(4), DpRank(0));

fn planned(
    fixture: &Fixture,
    change: impl FnOnce(&mut Query<'_>),
) -> Result<(CandidateId, Decider), RouteError> {
    let routed = fixture.route(Leg::Aggregated, |query| {
        query.planned = Some(PLANNED);
        change(query);
    })?;
    Ok(((routed.candidate.worker_id(), routed.candidate.rank), routed.receipt.decider))
}

#[test]
fn d4_a_planned_worker_alone_serves_the_leg_whatever_the_session_says() {
    let fixture = fixture(selector(choose(1)));
    // F8.6
    assert_eq!(planned(&fixture, |query| query.session = Some(OTHER)), Ok((PLANNED, Decider::Plan)));
    let refused = |change: &dyn Fn(&mut Query<'_>)| {
        matches!(planned(&fixture, change), Err(RouteError::NoWorker { leg: Leg::Aggregated, .. }))
    };
    // D4.9, D4.10
    assert!(refused(&|query| query.tried = &[PLANNED]));
    assert!(refused(&|query| query.planned = Some((WorkerId(9), DpRank(0)))));
    // A hint precedes it.
    assert!(matches!(
        planned(&fixture, |query| query.pin = Some((WorkerId(4), None))),
        Ok((OTHER, Decider::Pin))
    ));
    fixture.worker(3).set_draining(true);
    assert!(refused(&|_| {}));
    fixture.worker(3).set_draining(false);
    let _full = fixture.route(Leg::Decode, |query| query.pin = Some((WorkerId(3), None))).unwrap();
    assert!(refused(&|_| {}), "it has as many requests as it may");
}

#[test]
fn d4_a_planned_worker_has_to_be_within_the_limits_of_decode_and_of_the_whole_request() {
    let limit = BusyThresholds { engine_queue: Some(1), ..BusyThresholds::default() };
    for (leg, takes) in [(Leg::Prefill, true), (Leg::Decode, false), (Leg::Aggregated, false)] {
        let Fixture { registry, router, events } = fixture(selector(choose(0)));
        let router = router.with_busy(BusyRules::new(BusyByLeg::from([(leg, limit)]), []));
        let fixture = Fixture { registry, router, events };
        let waiting = |waiting| {
            let load =
                EngineLoad { running: None, waiting: Some(waiting), kv_usage: None, read_at: Instant::now() };
            fixture.worker(3).set_engine_load(Some(load));
            planned(&fixture, |_| {}).is_ok()
        };
        // D4.10
        assert_eq!((waiting(1), waiting(2)), (true, takes), "{leg}");
    }
}

#[test]
fn d4_policies_of_prefill_may_refuse_what_a_decode_worker_would_prefill() {
    let shed = crate::ShedReason { status: 429, reason: "tenant over quota".into() };
    for (answer, refuses) in [(choose(0), false), (Ok(Decision::Shed(shed)), true)] {
        let (fixture, model, request) = (fixture(selector(answer)), ModelName::new("m"), request());
        let snapshot = fixture.registry.snapshot();
        // D4.14
        let query = query(&snapshot, &model, Leg::Decode, &request);
        assert_eq!(fixture.router.prefill_refuses(&query, Purpose::Route), refuses);
    }
}
