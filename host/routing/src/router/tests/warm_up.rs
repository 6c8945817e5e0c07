//! The share of workers that just started (F6.10, F6.11).

use tokio::time::Duration;

use super::*;
use crate::NativeMode;

/// The time in which a share grows.
const WARM_UP: Duration = Duration::from_secs(30);

const TRIED: [crate::query::CandidateId; 2] = [(WorkerId(1), DpRank(0)), (WorkerId(2), DpRank(0))];

/// Two prefill workers with ten requests each, and one that starts now, much later.
async fn late_worker() -> (Fixture, Vec<Routed>) {
    let fixture = fixture(Program::Native(NativeMode::LeastLoaded));
    let pin = |id| fixture.route(Leg::Prefill, |query| query.pin = Some((WorkerId(id), None))).unwrap();
    let busy = (0..20).map(|turn| pin(1 + turn % 2)).collect();
    tokio::time::advance(2 * WARM_UP).await;
    let late = WorkerSpec::parse_flag("id=5,role=prefill,engine=vllm,url=http://a:5,model=m").unwrap();
    fixture.registry.upsert(late).set_health(Health::Healthy);
    (fixture, busy)
}

fn chosen(fixture: &Fixture, change: impl FnOnce(&mut Query<'_>)) -> u64 {
    fixture.route(Leg::Prefill, change).unwrap().receipt.worker.0
}

#[tokio::test(start_paused = true)]
async fn f6_the_share_of_a_worker_that_just_started_grows_to_its_part_of_the_pool() {
    let (fixture, _busy) = late_worker().await;
    let mut shares = Vec::new();
    for _ in 0..5 {
        let mut late = 0;
        for _ in 0..600 {
            tokio::time::advance(WARM_UP / 3_000).await;
            late += u32::from(chosen(&fixture, |_| {}) == 5);
        }
        shares.push(late);
    }
    // F6.10: a tenth, three tenths, ... of its third of 600 decisions, though it is idle and the others are
    // not.
    let expected = [20, 60, 100, 140, 180];
    assert!(shares.iter().zip(expected).all(|(share, expected)| share.abs_diff(expected) <= 2), "{shares:?}");
    assert!((0..10).all(|_| chosen(&fixture, |_| {}) == 5), "then it may get them all");
}

#[tokio::test(start_paused = true)]
async fn f6_a_worker_that_just_started_serves_what_no_other_can() {
    let (fixture, _busy) = late_worker().await;
    assert!((0..10).all(|_| chosen(&fixture, |_| {}) != 5));
    // F6.11
    assert_eq!(chosen(&fixture, |query| query.pin = Some((WorkerId(5), None))), 5, "a pin");
    assert_eq!(chosen(&fixture, |query| query.session = Some((WorkerId(5), DpRank(0)))), 5, "a session");
    assert_eq!(chosen(&fixture, |query| query.tried = &TRIED), 5, "a retry");
    let (snapshot, model, request) = (fixture.registry.snapshot(), ModelName::new("m"), request());
    let query = query(&snapshot, &model, Leg::Prefill, &request);
    let before = fixture.worker(5).has_turn();
    tokio::time::advance(WARM_UP / 2).await;
    for _ in 0..100 {
        let preview = fixture.router.preview(&query, &RouterConfigOverride::default()).unwrap();
        assert_ne!(preview.candidate.worker_id(), WorkerId(5), "previews give no turn");
    }
    assert_eq!(fixture.worker(5).has_turn(), before);
    fixture.worker(1).set_health(Health::Unhealthy);
    fixture.worker(2).set_draining(true);
    assert_eq!(chosen(&fixture, |_| {}), 5, "no other is left");
}
