use pointsman_routing::RoutingRequest;

use super::*;
use crate::admission_queue::{Leg, ModelBounds, QueueRules};

fn wait(queue: &Arc<AdmissionQueue>, model: &str, priority: f32, bytes: usize) -> Option<Box<WorkerWait>> {
    wait_of(queue, model, RoutingRequest { priority, ..RoutingRequest::default() }, bytes)
}

fn wait_of(
    queue: &Arc<AdmissionQueue>,
    model: &str,
    request: RoutingRequest,
    bytes: usize,
) -> Option<Box<WorkerWait>> {
    let (model, arrived) = (ModelName::new(model), Instant::now());
    queue.wait_for_worker(&AdmissionRequest { model: &model, request: &request, pin: None, arrived, bytes })
}

fn park(queue: &Arc<AdmissionQueue>, model: &str) -> Option<Place> {
    let (model, arrived, request) = (ModelName::new(model), Instant::now(), RoutingRequest::default());
    let asks = AdmissionRequest { model: &model, request: &request, pin: None, arrived, bytes: 1 };
    queue.park(&asks, Leg::Aggregated, &[], None, false)
}

/// The worker that came is busy. Returns whether the request waits in the queue.
fn waits_on(attempts: &mut crate::Attempts, queue: &Arc<AdmissionQueue>) -> bool {
    let (model, request, arrived) = (ModelName::new("a"), RoutingRequest::default(), Instant::now());
    let admission_request =
        AdmissionRequest { model: &model, request: &request, pin: None, arrived, bytes: 1 };
    let timeout = Duration::from_secs(30);
    let parking = crate::Parking { queue, admission_request, timeout };
    let busy = pointsman_routing::RouteError::AllBusy(Leg::Aggregated);
    match attempts.enter(Leg::Aggregated, None, &parking) {
        crate::Entry::Route(place) => {
            let after = attempts.after_refusal(Leg::Aggregated, &busy, place, &parking);
            after == crate::AfterRefusal::Wait
        }
        crate::Entry::Wait => true,
        crate::Entry::Refused | crate::Entry::LostPlace => false,
    }
}

#[tokio::test(start_paused = true)]
async fn f7_worker_waits_take_half_of_the_queue_and_count_for_its_limits() {
    let models = BTreeMap::from([(ModelName::new("a"), ModelBounds { limit: 1, max_inflight: 0 })]);
    let queue = AdmissionQueue::new(QueueRules { bytes: 10, models, ..QueueRules::waiting(6) });
    assert!(wait(&queue, "b", 0.0, 6).is_none(), "more than half of the bytes");
    let a = wait(&queue, "a", 0.0, 1);
    // F7.11
    assert!(a.is_some() && wait(&queue, "a", 0.0, 1).is_none(), "the limit of the model");
    let _b = [wait(&queue, "b", 0.0, 1).unwrap(), wait(&queue, "b", 0.0, 1).unwrap()];
    // F7.11
    assert!(wait(&queue, "b", 0.0, 1).is_none(), "half of the places");
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (0, 3));
    assert!(park(&queue, "a").is_none());
    let others = [park(&queue, "c"), park(&queue, "c"), park(&queue, "c")];
    // F7.11
    assert!(others.iter().all(Option::is_some) && park(&queue, "c").is_none(), "the rest is left");
    drop(others);
    drop(a);
    assert_eq!(queue.worker_waits(), BTreeMap::from([(ModelName::new("b"), 2)]));
    assert!(park(&queue, "a").is_some());
}

#[test]
fn f7_worker_waits_of_each_model_have_their_part_of_the_share() {
    let rules = QueueRules { bytes: 80, waiting_models: 2, ..QueueRules::waiting(9) };
    let queue = AdmissionQueue::new(rules);
    let a = [wait(&queue, "a", 0.0, 1).unwrap(), wait(&queue, "a", 0.0, 1).unwrap()];
    // F7.11
    assert!(wait(&queue, "a", 0.0, 1).is_none(), "two of the four places");
    let large = wait(&queue, "b", 0.0, 30);
    // F7.11
    assert!(large.is_some(), "the first one may be larger than the part of its model");
    assert!(wait(&queue, "b", 0.0, 1).is_none(), "its bytes");
    drop(large);
    let _b = [wait(&queue, "b", 0.0, 1).unwrap(), wait(&queue, "b", 0.0, 1).unwrap()];
    drop(a);
    // With more models than places, each may have one.
    let queue = AdmissionQueue::new(QueueRules { waiting_models: 9, ..QueueRules::waiting(4) });
    let a = wait(&queue, "a", 0.0, 1);
    assert!(a.is_some() && wait(&queue, "a", 0.0, 1).is_none());
    let b = wait(&queue, "b", 0.0, 1);
    assert!(b.is_some() && wait(&queue, "c", 0.0, 1).is_none());
}

#[tokio::test(start_paused = true)]
async fn f7_worker_waits_are_woken_in_their_order_and_leave_nothing() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let waits = [0.0, 2.0, 1.0].map(|priority| wait(&queue, "a", priority, 1).unwrap());
    let other = wait(&queue, "b", 9.0, 1).unwrap();
    let far = Instant::now() + Duration::from_secs(60);
    let [first, second, third] = waits;
    let mut tasks = tokio::task::JoinSet::new();
    for wait in [second, third] {
        tasks.spawn(async move {
            wait.woken(far).await;
            wait
        });
    }
    tokio::task::yield_now().await;
    let before = Instant::now();
    // F7.13
    assert!(first.wake_others(), "the two others come first");
    let order = [tasks.join_next().await.unwrap().unwrap(), tasks.join_next().await.unwrap().unwrap()];
    assert_eq!(order.each_ref().map(|wait| wait.rank.0), [Reverse(2_000), Reverse(1_000)]);
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert!(!order[0].wake_others());
    other.woken(far).await;
    assert!(before.elapsed() > Duration::ZERO, "another model's wakes nothing");
    drop((first, order, other));
    let inner = queue.inner.lock();
    let left = (inner.bytes, inner.tokens, inner.worker_waits.bytes);
    assert_eq!(left, (0, 0, 0));
    assert!(inner.worker_waits.asleep.is_empty() && inner.worker_waits.held.is_empty());
}

/// Its place becomes the next one, so nothing can take it in between.
#[test]
fn f7_requests_that_waited_keep_their_places_when_fewer_may_wait() {
    let queue = AdmissionQueue::new(QueueRules::waiting(4));
    let waited = [wait(&queue, "a", 0.0, 1), wait(&queue, "a", 0.0, 1)];
    queue.set_rules(QueueRules { bytes: 1, ..QueueRules::waiting(1) });
    let mut attempts = waited.map(crate::Attempts::after_wait);
    let wait = attempts.each_mut().map(|attempts| waits_on(attempts, &queue));
    // F7.13
    assert_eq!((wait, queue.waiting()), ([true; 2], 2));
    assert!(queue.worker_waits().is_empty() && park(&queue, "a").is_none());
    drop(attempts);
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (0, 0));
}

/// A request that waited keeps its place until it has another one: nothing takes it meanwhile.
#[tokio::test(start_paused = true)]
async fn f7_a_request_that_waited_for_a_worker_has_room_in_the_queue() {
    let queue = AdmissionQueue::new(QueueRules::waiting(1));
    let waited = wait(&queue, "a", 0.0, 1);
    tokio::time::advance(Duration::from_secs(3)).await;
    let mut attempts = crate::Attempts::after_wait(waited);
    assert!(park(&queue, "a").is_none());
    let waits = waits_on(&mut attempts, &queue);
    // F7.13
    assert_eq!((waits, queue.waiting()), (true, 1));
    assert!(queue.worker_waits().is_empty());
    tokio::time::advance(Duration::from_secs(2)).await;
    attempts.resume().unwrap();
    // F7.13
    assert_eq!(attempts.queued(), Duration::from_secs(5));
}

/// One of a tenant with weight 3 takes three places where another one takes one. Bytes are shared, too.
#[tokio::test(start_paused = true)]
async fn f7_worker_waits_of_tenants_give_way_by_their_weight() {
    let share = |weight| crate::TenantShare { weight, ..crate::TenantShare::default() };
    let tenants = [(1, share(3.0)), (2, share(1.0))].into();
    let rules = QueueRules { bytes: 80, tenants, ..QueueRules::waiting(8) };
    let queue = AdmissionQueue::new(rules);
    let of = |tenant, bytes| {
        let request = RoutingRequest { tenant_hash: Some(tenant), ..RoutingRequest::default() };
        wait_of(&queue, "a", request, bytes)
    };
    let many = [of(2, 10).unwrap(), of(2, 10).unwrap(), of(2, 10).unwrap(), of(2, 10).unwrap()];
    // F7.11
    assert!(of(2, 1).is_none() && of(1, 41).is_none(), "its own, and more than the part of the bytes");
    let gave_way = || many.each_ref().map(|wait| wait.gave_way());
    assert_eq!(gave_way(), [false; 4]);
    let others = [of(1, 10).unwrap(), of(1, 10).unwrap(), of(1, 10).unwrap()];
    // F7.11
    assert_eq!(gave_way(), [false, true, true, true]);
    // F7.11
    assert!(of(1, 10).is_none() && of(2, 10).is_none());
    let before = Instant::now();
    let far = before + Duration::from_secs(60);
    many[3].woken(far).await;
    assert_eq!(before.elapsed(), Duration::ZERO, "it is told at once");
    // Its worker comes at the same moment: there is no place for it.
    let [first, _, _, last] = many;
    let mut attempts = crate::Attempts::after_wait(Some(last));
    queue.set_rules(QueueRules::waiting(4));
    assert!(!waits_on(&mut attempts, &queue));
    drop((attempts, others, first));
    let inner = queue.inner.lock();
    assert_eq!((inner.bytes, inner.worker_waits.bytes, inner.worker_waits.shares.len()), (0, 0, 0));
}

/// Tenants share by number, so the bytes of small requests may not suffice.
#[test]
fn f7_worker_waits_of_other_sizes_give_way_only_if_that_makes_room() {
    let queue = AdmissionQueue::new(QueueRules { bytes: 80, ..QueueRules::waiting(20) });
    let of = |tenant, bytes| {
        let request = RoutingRequest { tenant_hash: Some(tenant), ..RoutingRequest::default() };
        wait_of(&queue, "a", request, bytes)
    };
    let large = of(3, 30).unwrap();
    let small = [1; 4].map(|bytes| of(2, bytes).unwrap());
    let gave_way = || small.each_ref().map(|wait| wait.gave_way());
    // F7.11
    assert!(of(1, 10).is_none(), "three small ones would not suffice");
    assert_eq!((gave_way(), large.gave_way(), queue.waiting_bytes()), ([false; 4], false, 34));
    let other = of(1, 8);
    // F7.11
    assert!(other.is_some(), "two suffice");
    assert_eq!((gave_way(), large.gave_way()), ([false, false, true, true], false));
    assert_eq!(queue.waiting_bytes(), 40);
    drop((large, small, other));
    assert_eq!((queue.waiting_bytes(), queue.worker_waits().len()), (0, 0));
}
