//! The order and the bounds of the queue, and its invariants in random runs.

use pointsman_routing::RoutingRequest;
use pointsman_workers::WorkerId;
use proptest::prelude::*;

use super::*;

const LEG: Leg = Leg::Aggregated;

fn model() -> ModelName {
    ModelName::new("m")
}

/// A request of a tenant with these numbers of input and output tokens.
fn request(tenant: u64, input: u32, output: u32) -> RoutingRequest {
    RoutingRequest {
        n: 1,
        prompt_tokens: input,
        max_tokens: Some(output),
        tenant_hash: Some(tenant),
        ..RoutingRequest::default()
    }
}

fn park_at(
    queue: &Arc<AdmissionQueue>,
    request: &RoutingRequest,
    arrived: Instant,
    bytes: usize,
) -> Option<Place> {
    let asks = AdmissionRequest { model: &model(), request, pin: None, arrived, bytes };
    queue.park(&asks, LEG, &[], None, false)
}

fn park(queue: &Arc<AdmissionQueue>, request: &RoutingRequest) -> Option<Place> {
    park_at(queue, request, Instant::now(), 1)
}

fn admit(queue: &Arc<AdmissionQueue>, request: &RoutingRequest, place: Option<&Place>) -> Admit {
    let arrived = Instant::now();
    queue.admit(&AdmissionRequest { model: &model(), request, pin: None, arrived, bytes: 1 }, LEG, place)
}

fn priority(priority: f32, jump_s: f32) -> RoutingRequest {
    RoutingRequest { priority, priority_jump_s: jump_s, n: 1, ..RoutingRequest::default() }
}

#[tokio::test(start_paused = true)]
async fn f7_order_is_priority_then_arrival_less_jump() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let now = Instant::now();
    let after = |seconds| now + Duration::from_secs(seconds);
    let late = park_at(&queue, &priority(0.0, 0.0), after(2), 0).unwrap();
    let jumped = park_at(&queue, &priority(0.0, 5.0), after(4), 0).unwrap();
    let first = park_at(&queue, &priority(0.0, 0.0), now, 0).unwrap();
    let strict = park_at(&queue, &priority(1.0, 0.0), after(9), 0).unwrap();
    let order = admit_all(&mut queue.inner.lock().order);
    // F7.2
    assert_eq!(order, [&strict, &jumped, &first, &late].map(|place| place.position.key.ticket));
}

#[tokio::test(start_paused = true)]
async fn f7_the_earliest_target_goes_first_while_it_can_be_met() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let now = Instant::now();
    let target = |millis: u32| RoutingRequest { ttft_target_us: Some(millis * 1_000), ..priority(0.0, 0.0) };
    let soon = park_at(&queue, &target(1_000), now, 0).unwrap();
    let none = park_at(&queue, &priority(0.0, 0.0), now, 0).unwrap();
    let later = park_at(&queue, &target(5_000), now, 0).unwrap();
    let sooner = park_at(&queue, &target(100), now, 0).unwrap();
    let tickets = |order: [&Place; 4]| order.map(|place| place.position.key.ticket);
    // F7.7, F7.8
    let called = |queue: &Arc<AdmissionQueue>| {
        queue.inner.lock().call_next();
        [&sooner, &soon, &later, &none].iter().position(|place| place.is_its_turn())
    };
    assert_eq!(called(&queue), Some(0));
    tokio::time::advance(Duration::from_millis(101)).await;
    assert_eq!(called(&queue), Some(1), "the first target has passed");
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(called(&queue), Some(2));
    let order = admit_all(&mut queue.inner.lock().order);
    assert_eq!(order, tickets([&later, &none, &soon, &sooner]), "late ones come last, by their arrival");
    drop((soon, none, later, sooner));
    assert_eq!((queue.waiting(), queue.inner.lock().order.is_empty()), (0, true));
}

#[tokio::test(start_paused = true)]
async fn f7_a_request_that_would_get_its_first_token_too_late_comes_last() {
    let target = |millis: u32| RoutingRequest { ttft_target_us: Some(millis * 1_000), ..priority(0.0, 0.0) };
    for (first_token_ms, expected) in [(300, 0), (500, 1)] {
        let queue = AdmissionQueue::new(QueueRules::waiting(8));
        let Admit::Now(mut served) = admit(&queue, &target(9_000), None) else { panic!("no request waits") };
        served.confirm(None);
        served.first_token(Instant::now() + Duration::from_millis(first_token_ms));
        drop(served);
        let places = [400, 9_000].map(|millis| park(&queue, &target(millis)).unwrap());
        queue.inner.lock().call_next();
        // F7.8
        assert_eq!(places.iter().position(Place::is_its_turn), Some(expected), "{first_token_ms}");
    }
}

#[tokio::test(start_paused = true)]
async fn f7_the_rest_of_a_stream_is_not_late() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let target = RoutingRequest { ttft_target_us: Some(1_000_000), ..priority(0.0, 0.0) };
    let (name, arrived) = (model(), Instant::now());
    tokio::time::advance(Duration::from_secs(20)).await;
    let _other = park(&queue, &target).unwrap();
    let rest = AdmissionRequest { model: &name, request: &target, pin: None, arrived, bytes: 0 };
    let rest = queue.park_rest(&rest, LEG, &[]);
    queue.inner.lock().call_next();
    // F7.8
    assert!(rest.is_its_turn());
}

#[tokio::test(start_paused = true)]
async fn f7_it_is_bounded_and_a_request_leaves_with_its_place() {
    let queue = AdmissionQueue::new(QueueRules { bytes: 10, ..QueueRules::waiting(2) });
    let place = park_at(&queue, &priority(0.0, 0.0), Instant::now(), 6).unwrap();
    // L3.1
    assert!(park_at(&queue, &priority(0.0, 0.0), Instant::now(), 5).is_none(), "bytes");
    let second = park_at(&queue, &priority(0.0, 0.0), Instant::now(), 4).unwrap();
    // F7.3
    assert!(park_at(&queue, &priority(0.0, 0.0), Instant::now(), 0).is_none());
    drop((place, second));
    // F7.4
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (0, 0));
    assert!(park(&AdmissionQueue::new(QueueRules::default()), &priority(0.0, 0.0)).is_none());
    let bounds = ModelBounds { limit: 1, max_inflight: 0 };
    queue.set_rules(QueueRules { models: [(model(), bounds)].into(), ..QueueRules::waiting(9) });
    let only = park(&queue, &priority(0.0, 0.0)).unwrap();
    // L3.1
    assert!(park(&queue, &priority(0.0, 0.0)).is_none(), "the model's own limit");
    drop(only);
}

#[tokio::test(start_paused = true)]
async fn f7_a_wake_up_reaches_the_first_and_is_passed_on() {
    let queue = AdmissionQueue::new(QueueRules::waiting(4));
    let (free, bound) = (
        priority(0.0, 0.0),
        RoutingRequest { required_taints: vec!["gpu".to_owned()], ..priority(0.0, 0.0) },
    );
    let (first, second) = (park(&queue, &free).unwrap(), park(&queue, &free).unwrap());
    let other_line = park(&queue, &bound).unwrap();
    let started = Instant::now();
    let far = started + Duration::from_secs(9);
    first.turn(far).await;
    assert!(!other_line.is_its_turn(), "one has the turn");
    first.try_later();
    other_line.turn(far).await;
    assert_eq!(started.elapsed(), Duration::ZERO, "the first of a line tries at once");
    other_line.try_later();
    queue.wake();
    first.turn(far).await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    first.try_later();
    // The second request may go to the same workers as the first, so no capacity for one means none for both.
    assert!(!second.is_its_turn() && other_line.is_its_turn());
    other_line.try_later();
    second.turn(far).await;
    assert_eq!(started.elapsed(), RETRY_INTERVAL, "nothing was freed");
    second.try_later();
    assert!(first.is_its_turn() && !second.is_its_turn(), "a retry keeps the order");
    drop(first);
    assert!(second.is_its_turn(), "a turn that came too late goes to the next one");
    let now = Instant::now();
    other_line.turn(now + Duration::from_millis(1)).await;
    assert!(now.elapsed() <= Duration::from_millis(1), "the queue timeout ends it");
}

#[tokio::test(start_paused = true)]
async fn f7_capacity_that_is_released_during_an_attempt_is_not_lost() {
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let request = request(1, 10, 10);
    let place = park(&queue, &request).unwrap();
    let is_woken_at_once = async || tokio::time::timeout(Duration::ZERO, place.woken()).await.is_ok();
    assert!(is_woken_at_once().await, "the first attempt");
    let attempt = admit(&queue, &request, Some(&place));
    // The attempt finds every worker busy. Before it says so, another thread releases one.
    queue.wake();
    let Admit::Now(attempt) = attempt else { panic!("it was its turn") };
    attempt.withdraw();
    place.try_later();
    // F7.5
    assert!(is_woken_at_once().await && place.is_its_turn());
    // The second attempt is in vain, too, and nothing was released: it waits.
    let Admit::Now(attempt) = admit(&queue, &request, Some(&place)) else { panic!("its turn") };
    attempt.withdraw();
    place.try_later();
    assert!(!is_woken_at_once().await && !place.is_its_turn());
}

#[tokio::test(start_paused = true)]
async fn l3_requests_in_flight_are_bounded_and_their_end_wakes_the_next() {
    let bounds = ModelBounds { limit: 0, max_inflight: 1 };
    let rules = QueueRules { models: [(model(), bounds)].into(), ..QueueRules::waiting(4) };
    let queue = AdmissionQueue::new(rules);
    let one = request(1, 10, 10);
    let Admit::Now(mut admission) = admit(&queue, &one, None) else { panic!("the gateway is idle") };
    admission.confirm(None);
    // L3.2
    assert!(matches!(admit(&queue, &one, None), Admit::Wait));
    let place = park(&queue, &one).unwrap();
    assert!(matches!(admit(&queue, &one, Some(&place)), Admit::Wait), "it looks once at once");
    place.try_later();
    drop(admission);
    assert!(place.is_its_turn());
    let Admit::Now(mut next) = admit(&queue, &one, Some(&place)) else { panic!("it is its turn") };
    next.confirm(Some(&place));
    drop(place);
    assert_eq!((queue.waiting(), queue.inflight()), (0, 1));
    drop(next);
    assert_eq!(queue.inflight(), 0);
}

#[tokio::test(start_paused = true)]
async fn l3_a_request_that_arrives_does_not_pass_those_that_wait() {
    let queue = AdmissionQueue::new(QueueRules::waiting(4));
    let one = request(1, 10, 10);
    let place = park(&queue, &one).unwrap();
    // L3.3
    assert!(matches!(admit(&queue, &one, None), Admit::Wait));
    let bound = RoutingRequest { required_taints: vec!["gpu".to_owned()], ..one.clone() };
    assert!(matches!(admit(&queue, &bound, None), Admit::Now(_)), "other workers may serve it");
    drop(place);
    assert!(matches!(admit(&queue, &one, None), Admit::Now(_)));
    assert_eq!(queue.inflight(), 0, "what was not kept is given back");
}

#[tokio::test(start_paused = true)]
async fn l3_no_band_starves_and_a_tenant_s_priority_is_clamped() {
    let queue = AdmissionQueue::new(QueueRules::waiting(1_000));
    let low = park(&queue, &RoutingRequest { priority: -5.0, ..request(1, 10, 10) }).unwrap();
    let high = RoutingRequest { priority: 5.0, ..request(2, 10, 10) };
    let _others: Vec<_> = (0..100).map(|_| park(&queue, &high).unwrap()).collect();
    let order = admit_all(&mut queue.inner.lock().order);
    // L3.6
    assert!(order.iter().position(|ticket| *ticket == low.position.key.ticket).unwrap() < 4, "{order:?}");
    let share = TenantShare { weight: 1.0, max_priority: Some(0.0) };
    let queue = AdmissionQueue::new(QueueRules { others: share, ..QueueRules::waiting(9) });
    let (first, second) = (park(&queue, &request(1, 1, 1)).unwrap(), park(&queue, &high).unwrap());
    // L3.7
    assert_eq!(first.position.key.priority, second.position.key.priority);
}

type Order = FairQueue<LineId, Weak<Turn>>;

/// Returns the tickets of all requests in the order in which they would be admitted.
fn admit_all(order: &mut Order) -> Vec<u64> {
    let mut tickets = Vec::new();
    while let Some((position, _)) = order.next(|_| true) {
        order.charge(&position, 1.0, 1.0);
        order.remove(&position);
        tickets.push(position.key.ticket);
    }
    tickets
}

/// Adds a request of a tenant, for tests of the order alone.
fn add(order: &mut Order, ticket: u64, tenant: u64) {
    let key = Key::in_turn(ticket);
    let (name, one) = (model(), request(tenant, 1, 1));
    let admission_request =
        AdmissionRequest { model: &name, request: &one, pin: None, arrived: Instant::now(), bytes: 0 };
    order.insert(admission_request.line(LEG, &[]), tenant, 1.0, key, Weak::new());
}

/// Admits the next request at a cost of 100, and returns its tenant.
fn take(order: &mut Order) -> u64 {
    let position = order.next(|_| true).unwrap().0;
    order.charge(&position, 1.0, 100.0);
    order.remove(&position);
    position.tenant
}

#[tokio::test(start_paused = true)]
async fn l3_a_new_tenant_has_no_credit_and_new_names_hold_nobody_back() {
    let queue = AdmissionQueue::new(QueueRules::waiting(10_000));
    let order = &mut queue.inner.lock().order;
    for ticket in 0..100 {
        add(order, ticket, 1 + ticket % 2);
    }
    for _ in 0..60 {
        take(order);
    }
    // Tenant 3 is new after the others were served 30 requests each.
    (100..130).for_each(|ticket| add(order, ticket, 3));
    let mut served = HashMap::<u64, u32>::new();
    (0..30).for_each(|_| *served.entry(take(order)).or_default() += 1);
    // L3.5
    assert!(served.values().all(|count| (9..=11).contains(count)), "{served:?}");
    // New names arrive faster than requests are served. Tenant 1 still gets its turns.
    let waited = (0..3_000_u64).filter(|name| {
        add(order, 200 + 2 * name, 1_000 + 2 * name);
        add(order, 201 + 2 * name, 1_001 + 2 * name);
        take(order) == 1
    });
    // L3.8
    assert!(waited.count() >= 3);
}

#[tokio::test(start_paused = true)]
async fn l3_a_tenant_that_comes_back_passes_others_twice_and_then_shares() {
    let queue = AdmissionQueue::new(QueueRules::waiting(10_000));
    let order = &mut queue.inner.lock().order;
    add(order, 0, 2);
    (1..100).for_each(|ticket| add(order, ticket, 1));
    // Tenant 2 is served once, then only tenant 1, which always waits.
    assert_eq!(take(order), 2);
    (0..20).for_each(|_| assert_eq!(take(order), 1));
    (100..130).for_each(|ticket| add(order, ticket, 2));
    let served: Vec<u64> = (0..30).map(|_| take(order)).collect();
    // L3.5
    assert_eq!(served[..2], [2, 2], "{served:?}");
    let of_two = served[2..].iter().filter(|tenant| **tenant == 2).count();
    assert!((13..=15).contains(&of_two), "{served:?}");
}

/// One step of a random run.
#[derive(Clone, Debug)]
enum Step {
    Arrive { tenant: u64, input: u32, output: u32, priority: f32 },
    Leave(usize),
    Serve,
    End(usize),
    Reload { limit: usize, max_inflight: usize, weight: f64 },
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = prop_oneof![Just(0), 1..2_000_u32, Just(u32::MAX)];
    prop_oneof![
        4 => (0..5_u64, tokens.clone(), tokens, -3.0_f32..3.0).prop_map(
            |(tenant, input, output, priority)| Step::Arrive { tenant, input, output, priority }
        ),
        1 => any::<usize>().prop_map(Step::Leave),
        4 => Just(Step::Serve),
        3 => any::<usize>().prop_map(Step::End),
        1 => (1..40_usize, 0..4_usize, 0.1..9.0_f64)
            .prop_map(|(limit, max_inflight, weight)| Step::Reload { limit, max_inflight, weight }),
    ]
}

proptest! {
    /// Whatever arrives, leaves, is served or reloaded: nothing is left behind, and whenever a request waits
    /// and may run, one of them has its turn after capacity was released (work conservation).
    #[test]
    fn l3_nothing_leaks_and_no_turn_is_lost(steps in prop::collection::vec(step(), 1..200)) {
        let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).build().unwrap();
        let _guard = runtime.enter();
        let queue = AdmissionQueue::new(QueueRules::waiting(16));
        let (mut places, mut running) = (Vec::<(RoutingRequest, Place)>::new(), Vec::<Admission>::new());
        for step in steps {
            match step {
                Step::Arrive { tenant, input, output, priority } => {
                    let one = RoutingRequest { priority, ..request(tenant, input, output) };
                    let place = park(&queue, &one);
                    // L3.14
                    prop_assert!(places.iter().all(|(_, place)| !place.is_lost() || !place.is_its_turn()));
                    places.retain(|(_, place)| !place.is_lost());
                    places.extend(place.map(|place| (one, place)));
                }
                Step::Leave(which) if !places.is_empty() => {
                    places.swap_remove(which % places.len());
                }
                Step::Serve => {
                    queue.wake();
                    let turn = places.iter().position(|(_, place)| place.is_its_turn());
                    // L3.12
                    prop_assert_eq!(turn.is_none(), places.is_empty(), "a turn was lost");
                    let Some(turn) = turn else { continue };
                    let (one, place) = places.swap_remove(turn);
                    match admit(&queue, &one, Some(&place)) {
                        Admit::Now(mut admission) => {
                            admission.confirm(Some(&place));
                            admission.used(3, 4);
                            running.push(admission);
                        }
                        _ => {
                            place.try_later();
                            places.push((one, place));
                        }
                    }
                }
                Step::End(which) if !running.is_empty() => {
                    running.swap_remove(which % running.len());
                }
                Step::Reload { limit, max_inflight, weight } => {
                    let others = TenantShare { weight, max_priority: Some(1.0) };
                    queue.set_rules(QueueRules { max_inflight, others, ..QueueRules::waiting(limit) });
                }
                Step::Leave(_) | Step::End(_) => {}
            }
            prop_assert_eq!((queue.waiting(), queue.inflight()), (places.len(), running.len()));
        }
        places.clear();
        running.clear();
        // L3.10
        prop_assert_eq!((queue.waiting(), queue.waiting_bytes(), queue.inflight()), (0, 0, 0));
        prop_assert!(queue.inner.lock().order.is_empty() && queue.inner.lock().inflight_of.is_empty());
    }

    /// Of two tenants that wait all the time, the served weighted tokens divided by the weights never differ
    /// by more than the largest request of either, divided by its weight.
    #[test]
    fn l3_the_unfairness_between_two_backlogged_tenants_is_bounded(
        costs in prop::collection::vec((1..5_000_u32, 1..5_000_u32), 50..300),
        weights in (0.2..8.0_f64, 0.2..8.0_f64),
        others in 0..4_u64,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).build().unwrap();
        let _guard = runtime.enter();
        let share = |weight| TenantShare { weight, max_priority: None };
        let tenants = [(1, share(weights.0)), (2, share(weights.1))].into();
        let rules = QueueRules { tenants, ..QueueRules::waiting(10_000) };
        let queue = AdmissionQueue::new(rules.clone());
        let mut places = Vec::new();
        let mut served = HashMap::<u64, f64>::new();
        for (one, two) in &costs {
            // The first tenant sends much more than it is served; others come and go.
            let mut arrive = |tenant, tokens| {
                let one = request(tenant, tokens, 0);
                places.push((tenant, one.clone(), park(&queue, &one).unwrap()));
            };
            (0..4).for_each(|_| arrive(1, *one));
            (0..2).for_each(|_| arrive(2, *two));
            (0..others).for_each(|other| arrive(10 + other, 100));
            for _ in 0..2 {
                queue.wake();
                let turn = places.iter().position(|(_, _, place)| place.is_its_turn()).unwrap();
                let (tenant, one, place) = places.swap_remove(turn);
                let Admit::Now(mut admission) = admit(&queue, &one, Some(&place)) else { panic!("no limit") };
                admission.confirm(Some(&place));
                admission.used(u64::from(one.prompt_tokens), 0);
                let weight = rules.share(Some(tenant)).weight;
                *served.entry(tenant).or_default() += f64::from(one.prompt_tokens) / weight;
            }
            let of = |tenant| served.get(&tenant).copied().unwrap_or(0.0);
            let bound = 5_000.0 / weights.0.min(weights.1);
            // L3.4
            let (one, two) = (of(1), of(2));
            prop_assert!((one - two).abs() <= bound, "{one} and {two} differ by more than {bound}");
        }
    }
}

#[test]
fn l3_a_tenant_that_comes_and_leaves_a_million_times_leaves_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).build().unwrap();
    let _guard = runtime.enter();
    let queue = AdmissionQueue::new(QueueRules::waiting(8));
    let _waits = park(&queue, &request(1, 1, 1)).unwrap();
    for name in 0..1_000_000_u64 {
        drop(park(&queue, &request(name, 1, 1)).unwrap());
    }
    let inner = queue.inner.lock();
    // L3.11
    assert!(inner.order.tenants() <= 1_024 && inner.order.len() == 1, "{}", inner.order.tenants());
}

fn running(queue: &Arc<AdmissionQueue>, class: f32) -> PausableStream {
    let (request, arrived) = (priority(class, 0.0), Instant::now());
    let admission_request =
        AdmissionRequest { model: &model(), request: &request, pin: None, arrived, bytes: 1 };
    queue.may_pause(&admission_request, LEG).unwrap()
}

fn asked(streams: &[PausableStream]) -> Vec<usize> {
    let places = streams.iter().enumerate().filter(|(_, stream)| stream.is_asked());
    places.map(|(place, _)| place).collect()
}

fn preempting(limit: usize) -> Arc<AdmissionQueue> {
    AdmissionQueue::new(QueueRules { preempt: true, ..QueueRules::waiting(limit) })
}

#[tokio::test(start_paused = true)]
async fn l5_the_newest_streams_of_the_lowest_class_pause_within_share_and_rate() {
    let queue = preempting(100);
    let mut streams: Vec<PausableStream> =
        [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 0.0].map(|class| running(&queue, class)).into();
    let mut equal = park(&queue, &priority(0.0, 0.0)).unwrap();
    equal.ask_for_room();
    // L5.3
    assert_eq!(asked(&streams), [0_usize; 0]);
    let mut high: Vec<Place> = (0..4).map(|_| park(&queue, &priority(2.0, 0.0)).unwrap()).collect();
    for expected in [&[7][..], &[7], &[1, 7], &[1, 7], &[0, 1, 7]] {
        high.iter_mut().for_each(Place::ask_for_room);
        // L5.3, L5.4: the newest first, one in 100 ms
        assert_eq!(asked(&streams), expected);
        tokio::time::advance(Duration::from_millis(60)).await;
    }
    // L5.4: two of eight
    assert!(streams[7].begin() && streams[1].begin() && !streams[0].begin());
    assert_eq!(queue.paused(), 2);
    tokio::time::advance(Duration::from_secs(2)).await;
    high.iter_mut().for_each(Place::ask_for_room);
    // L5.4
    assert_eq!(asked(&streams), [0_usize; 0]);
    streams[1].end();
    tokio::time::advance(Duration::from_secs(2)).await;
    high.iter_mut().for_each(Place::ask_for_room);
    assert_eq!(asked(&streams), [1]);
    drop(high);
    // L5.1: the request that asked waits no longer
    assert!(asked(&streams).is_empty() && !streams[1].begin());
    assert_eq!(queue.paused(), 1);
    drop(streams);
    // L5.7
    assert!(queue.paused() == 0 && queue.inner.lock().preemption.is_empty());
}

#[tokio::test(start_paused = true)]
async fn l5_a_request_asks_another_stream_when_the_first_one_does_not_answer() {
    let queue = preempting(100);
    let streams: Vec<PausableStream> = [0.0; 3].map(|class| running(&queue, class)).into();
    let mut high = park(&queue, &priority(1.0, 0.0)).unwrap();
    for expected in [&[2][..], &[2], &[2], &[1, 2]] {
        high.ask_for_room();
        // L5.3: a slow engine, or a client that does not read
        assert_eq!(asked(&streams), expected);
        tokio::time::advance(Duration::from_millis(400)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn l5_no_stream_pauses_for_a_request_that_its_place_does_not_help() {
    let queue = AdmissionQueue::new(QueueRules { preempt: true, max_inflight: 1, ..QueueRules::waiting(9) });
    let (name, one, arrived) = (model(), priority(1.0, 0.0), Instant::now());
    let request = AdmissionRequest { model: &name, request: &one, pin: None, arrived, bytes: 1 };
    let streams = [queue.may_pause(&request_of_low(&name), Leg::Decode).unwrap()];
    let pinned = AdmissionRequest { pin: Some(WorkerId(1)), ..request };
    for (request, leg, room, expected) in [
        (&pinned, Leg::Decode, 0, 0),
        (&request, Leg::Aggregated, 0, 0),
        // Any stream of the model that ends lets another request be in flight.
        (&request, Leg::Aggregated, 1, 1),
        // Prefill workers are busy, and another request may be in flight.
        (&request, Leg::Prefill, 0, 0),
        (&request, Leg::Prefill, 1, 1),
        (&request, Leg::Decode, 0, 1),
    ] {
        let _inflight: Vec<Admit> = (0..room).map(|_| admit(&queue, &one, None)).collect();
        let mut place = queue.park(request, leg, &[], None, false).unwrap();
        place.ask_for_room();
        // L5.1
        assert_eq!(asked(&streams).len(), expected, "{leg:?} {room}");
        drop(place);
        tokio::time::advance(Duration::from_secs(1)).await;
    }
}

fn request_of_low(name: &ModelName) -> AdmissionRequest<'_> {
    static LOW: std::sync::LazyLock<RoutingRequest> = std::sync::LazyLock::new(RoutingRequest::default);
    AdmissionRequest { model: name, request: &LOW, pin: None, arrived: Instant::now(), bytes: 1 }
}

#[tokio::test(start_paused = true)]
async fn l5_a_rest_always_has_a_place_and_takes_none_from_others() {
    let queue = AdmissionQueue::new(QueueRules { preempt: true, bytes: 1, ..QueueRules::waiting(1) });
    let mut stream = running(&queue, 0.0);
    let mut high = park(&queue, &priority(1.0, 0.0)).unwrap();
    assert!(park(&queue, &priority(1.0, 0.0)).is_none());
    high.ask_for_room();
    assert!(stream.begin());
    let name = model();
    let rest = queue.park_rest(&request_of_low(&name), LEG, &[]);
    // L5.5
    assert!(!rest.is_its_turn() && park(&queue, &priority(1.0, 0.0)).is_none());
    drop(high);
    let other = park(&queue, &priority(1.0, 0.0)).unwrap();
    // L3.1, L5.5
    assert_eq!((queue.waiting(), queue.waiting_bytes()), (2, 1));
    drop(other);
    // L5.5
    assert!(rest.is_its_turn());
}
