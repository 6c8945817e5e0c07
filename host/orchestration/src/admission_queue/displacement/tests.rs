//! Who loses a place in the full queue, and what stays of it.

use std::sync::Arc;

use fair_queue::FairQueue;
use pointsman_routing::RoutingRequest;
use pointsman_workers::{Leg, ModelName};
use tokio::time::{Duration, Instant};

use super::*;
use crate::admission_queue::{AdmissionQueue, ModelBounds, QueueRules, TenantShare};

const LEG: Leg = Leg::Aggregated;

fn of(tenant: u64, priority: f32) -> RoutingRequest {
    RoutingRequest { tenant_hash: Some(tenant), priority, n: 1, ..RoutingRequest::default() }
}

fn park_in(
    queue: &Arc<AdmissionQueue>,
    model: &str,
    request: &RoutingRequest,
    bytes: usize,
    keeps_place: bool,
) -> Option<Place> {
    let (model, arrived) = (ModelName::new(model), Instant::now());
    let asks = AdmissionRequest { model: &model, request, pin: None, arrived, bytes };
    queue.park(&asks, LEG, &[], None, keeps_place)
}

fn park(queue: &Arc<AdmissionQueue>, request: &RoutingRequest, bytes: usize) -> Option<Place> {
    park_in(queue, "m", request, bytes, false)
}

fn fill(queue: &Arc<AdmissionQueue>, request: &RoutingRequest, times: usize) -> Vec<Place> {
    (0..times).map(|_| park(queue, request, 1).unwrap()).collect()
}

fn lost(places: &[Place]) -> Vec<bool> {
    places.iter().map(Place::is_lost).collect()
}

#[tokio::test(start_paused = true)]
async fn l3_a_tenant_that_fills_the_queue_gives_the_last_half_of_it_to_another() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let flood = fill(&queue, &of(1, 0.0), 8);
    // L3.15
    assert!(park(&queue, &of(1, 0.0), 1).is_none(), "an equal one");
    // L3.14
    assert!(park(&queue, &of(2, -1.0), 1).is_none(), "one that comes later");
    let others = fill(&queue, &of(2, 0.0), 4);
    assert!(park(&queue, &of(2, 0.0), 1).is_none(), "each has half");
    assert_eq!(lost(&flood), [false, false, false, false, true, true, true, true]);
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (8, 8));
    let (before, far) = (Instant::now(), Instant::now() + Duration::from_secs(60));
    flood[7].turn(far).await;
    assert_eq!(before.elapsed(), Duration::ZERO, "it is told at once");
    assert!(!flood[7].is_its_turn());
    drop((flood, others));
    // L3.10
    let inner = queue.inner.lock();
    assert_eq!((inner.order.is_empty(), inner.bytes, inner.tokens), (true, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn l3_a_client_that_takes_places_and_leaves_a_thousand_times_leaves_others_their_part() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    for (tenant, priority, most) in [(2, 0.0, 7), (1, 9.0, 24), (2, 9.0, 24)] {
        let mut waiting = fill(&queue, &of(1, 0.0), 8);
        let mut taken = 0;
        for _ in 0..1_000 {
            drop(park(&queue, &of(tenant, priority), 1));
            let before = waiting.len();
            waiting.retain(|place| !place.is_lost());
            taken += before - waiting.len();
            // L3.19
            assert!(waiting.len() >= 2, "a quarter");
            // Those that lost their places come back.
            waiting.extend(fill(&queue, &of(1, 0.0), 8 - waiting.len()));
        }
        assert_eq!(taken, most, "{tenant} {priority}");
        drop(waiting);
        // L3.10
        assert!(queue.inner.lock().order.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn l3_a_higher_priority_has_room_but_not_beyond_the_one_that_a_tenant_may_have() {
    let share = |max_priority| TenantShare { weight: 1.0, max_priority };
    let tenants = [(1, share(Some(0.0))), (2, share(None))].into();
    let queue = AdmissionQueue::new(QueueRules { tenants, ..QueueRules::waiting(8) });
    let batch = fill(&queue, &of(2, 0.0), 8);
    // L3.16
    let first = park(&queue, &of(2, 1.0), 1);
    assert!(first.is_some() && lost(&batch)[7], "of one tenant");
    let _high = fill(&queue, &of(2, 1.0), 5);
    assert!(park(&queue, &of(2, 1.0), 1).is_none(), "a quarter is left");
    assert_eq!(lost(&batch), [false, false, true, true, true, true, true, true]);
    // L3.7
    let queue = AdmissionQueue::new(queue.inner.lock().rules.clone());
    let own = fill(&queue, &of(1, 0.0), 8);
    assert!(park(&queue, &of(1, 9.0), 1).is_none(), "the priority is clamped");
    assert!(!lost(&own).contains(&true));
}

#[tokio::test(start_paused = true)]
async fn l3_as_many_lose_their_places_as_make_room_and_otherwise_none() {
    let queue = AdmissionQueue::new(QueueRules { bytes: 10, ..QueueRules::waiting(99) });
    let flood = fill(&queue, &of(1, 0.0), 10);
    // L3.14, L3.15
    assert!(park(&queue, &of(2, 0.0), 11).is_none() && park(&queue, &of(2, 0.0), 9).is_none());
    assert!(!lost(&flood).contains(&true), "they would not make room");
    let large = park(&queue, &of(2, 0.0), 3);
    assert!(large.is_some());
    assert_eq!(lost(&flood).iter().filter(|lost| **lost).count(), 3);
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (8, 10));
    // L3.14
    let bounds = ModelBounds { limit: 2, max_inflight: 0 };
    let models = [(ModelName::new("a"), bounds)].into();
    let queue = AdmissionQueue::new(QueueRules { models, ..QueueRules::waiting(4) });
    let _b = [1, 1].map(|tenant| park_in(&queue, "b", &of(tenant, 0.0), 1, false).unwrap());
    let a = [1, 1].map(|tenant| park_in(&queue, "a", &of(tenant, 0.0), 1, false).unwrap());
    let other = park_in(&queue, "a", &of(2, 0.0), 1, false);
    assert_eq!((other.is_some(), lost(&a)), (true, vec![false, true]), "the bound of the model");
    assert!(park_in(&queue, "c", &of(3, 9.0), 1, false).is_none(), "no one of another model");
    queue.set_rules(QueueRules::default());
    assert!(park_in(&queue, "b", &of(2, 9.0), 1, false).is_none(), "no request may wait");
}

#[tokio::test(start_paused = true)]
async fn l3_what_has_its_turn_or_did_work_or_paused_keeps_its_place() {
    let queue = AdmissionQueue::new(QueueRules::waiting(3));
    let flood = fill(&queue, &of(1, 0.0), 1);
    let model = ModelName::new("m");
    let (low, arrived) = (of(1, -5.0), Instant::now());
    let rest = AdmissionRequest { model: &model, request: &low, pin: None, arrived, bytes: 1 };
    let rest = queue.park_rest(&rest, LEG, &[]);
    let after_work = park_in(&queue, "m", &of(1, -1.0), 1, true).unwrap();
    // L3.17
    assert!(flood[0].is_its_turn() && park(&queue, &of(1, 5.0), 1).is_none());
    flood[0].try_later();
    assert!(park(&queue, &of(1, 5.0), 1).is_some(), "its turn is over");
    assert!(flood[0].is_lost() && !rest.is_lost() && !after_work.is_lost());
}

#[tokio::test(start_paused = true)]
async fn l3_a_request_that_lost_its_place_is_refused_with_the_time_that_it_waited() {
    let queue = AdmissionQueue::new(QueueRules::waiting(2));
    let (model, own, arrived) = (ModelName::new("m"), of(1, 0.0), Instant::now());
    let admission_request = AdmissionRequest { model: &model, request: &own, pin: None, arrived, bytes: 1 };
    let parking = crate::Parking { queue: &queue, admission_request, timeout: Duration::from_secs(30) };
    let _first = fill(&queue, &own, 1);
    let mut attempts = crate::Attempts::default();
    assert!(matches!(attempts.enter(LEG, None, &parking), crate::Entry::Wait));
    tokio::time::advance(Duration::from_secs(3)).await;
    let other = park(&queue, &of(2, 0.0), 1);
    let (leg, place) = attempts.resume().unwrap();
    // L3.14
    assert!(other.is_some() && matches!(attempts.enter(leg, place, &parking), crate::Entry::LostPlace));
    assert_eq!((attempts.queued(), queue.waiting()), (Duration::from_secs(3), 2));
    assert_eq!(attempts.leave_queue(), Some(Duration::from_secs(3)));
}

/// A flood that the full queue refuses must not cost the more, the more wait.
#[test]
fn l3_a_refused_flood_from_many_names_keeps_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    let queue = AdmissionQueue::new(QueueRules::waiting(3_000));
    let flood: Vec<Place> = (0..3_000).map(|name| park(&queue, &of(name, 0.0), 1).unwrap()).collect();
    let got = (10_000..110_000).filter(|name| park(&queue, &of(*name, 0.0), 1).is_some()).count();
    // L3.8, L3.11, L3.18: each name has its one place, and those beyond 1,024 share one.
    assert_eq!(got, 0);
    assert!(!lost(&flood).contains(&true) && queue.inner.lock().order.tenants() <= 1_025);
    drop(flood);
    assert!(FairQueue::is_empty(&queue.inner.lock().order));
}
