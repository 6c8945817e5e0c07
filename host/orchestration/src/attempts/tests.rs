use pointsman_routing::RoutingRequest;
use pointsman_workers::{DpRank, ModelName, WorkerId};

use super::{handoff::MAX_HANDOFF_ROUNDS, *};
use crate::admission_queue::QueueRules;

const LEASE: Duration = Duration::from_secs(8);

/// Asks what follows when no decode worker takes the handoff.
fn refused(attempts: &mut Attempts, error: &RouteError) -> AfterRefusal {
    refused_leg(attempts, Leg::Decode, error)
}

/// Asks what follows when no worker takes a leg.
fn refused_leg(attempts: &mut Attempts, leg: Leg, error: &RouteError) -> AfterRefusal {
    let (model, request) = (ModelName::new("m"), RoutingRequest::default());
    let queue = AdmissionQueue::new(QueueRules::default());
    let admission_request =
        AdmissionRequest { model: &model, request: &request, pin: None, arrived: Instant::now(), bytes: 0 };
    let parking = Parking { queue: &queue, admission_request, timeout: Duration::from_secs(1) };
    attempts.after_refusal(leg, error, None, &parking)
}

fn nobody() -> RouteError {
    RouteError::NoWorker { leg: Leg::Decode, text: "none".to_owned() }
}

fn is_beyond(attempts: &Attempts) -> bool {
    attempts.committed(false).is_some_and(|committed| committed.beyond_limits)
}

#[tokio::test(start_paused = true)]
async fn e6_limits_hold_a_handoff_up_for_a_quarter_of_its_lease() {
    let mut attempts = Attempts::default();
    let busy = RouteError::AllBusy(Leg::Decode);
    assert_eq!(refused(&mut attempts, &busy), AfterRefusal::GiveUp, "without a handoff, and without a queue");
    attempts.commit(LEASE);
    let began = Instant::now();
    while refused(&mut attempts, &busy) == AfterRefusal::Wait {
        attempts.waiting().unwrap().over().await;
        assert_eq!(attempts.resume().map(|(leg, _)| leg), Some(Leg::Decode));
        assert!(began.elapsed() <= LEASE / 4);
    }
    // E6.5
    assert_eq!((began.elapsed(), is_beyond(&attempts)), (LEASE / 4, true));
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
}

#[tokio::test(start_paused = true)]
async fn e6_an_overloaded_worker_is_asked_again_at_its_time_within_a_quarter_of_the_lease() {
    let worker = (WorkerId(1), DpRank(0));
    let mut attempts = Attempts::default();
    attempts.commit(LEASE);
    let began = Instant::now();
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::RouteAgain);
    attempts.note_failure(Some(worker));
    attempts.note_refused_handoff(Duration::from_secs(5));
    attempts.note_refused_handoff(Duration::from_secs(1));
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::Wait);
    attempts.waiting().unwrap().over().await;
    attempts.resume();
    // E6.9
    assert_eq!(began.elapsed(), Duration::from_secs(1));
    attempts.note_failure(Some(worker));
    attempts.note_refused_handoff(Duration::from_secs(2));
    // E6.9: beyond a quarter of the lease the client has its answer, and the handoff waits on
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
    attempts.note_client(false);
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::Wait);
    attempts.waiting().unwrap().over().await;
    assert_eq!(began.elapsed(), Duration::from_secs(3));
    attempts.resume();
    attempts.note_failure(Some(worker));
    attempts.note_refused_handoff(LEASE);
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
}

#[tokio::test(start_paused = true)]
async fn e6_a_handoff_without_a_client_is_offered_to_an_overloaded_worker_until_its_lease_ends() {
    let mut attempts = Attempts::default();
    attempts.commit(LEASE);
    attempts.note_client(false);
    let (began, mut offers) = (Instant::now(), 0);
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::RouteAgain);
    loop {
        attempts.note_failure(Some((WorkerId(1), DpRank(0))));
        attempts.note_refused_handoff(LEASE / 10);
        offers += 1;
        if refused(&mut attempts, &nobody()) != AfterRefusal::Wait {
            break;
        }
        attempts.waiting().unwrap().over().await;
        attempts.resume();
    }
    // E6.9
    assert!(
        offers > MAX_HANDOFF_ROUNDS && began.elapsed() >= LEASE * 8 / 10,
        "{offers} {:?}",
        began.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn e6_load_limits_hold_up_a_handoff_whose_client_left_for_a_quarter_of_the_lease_only() {
    let mut attempts = Attempts::default();
    attempts.commit(LEASE);
    attempts.note_client(false);
    let began = Instant::now();
    while refused(&mut attempts, &RouteError::AllBusy(Leg::Decode)) == AfterRefusal::Wait {
        attempts.waiting().unwrap().over().await;
        attempts.resume();
    }
    // E6.5
    assert_eq!((began.elapsed(), is_beyond(&attempts)), (LEASE / 4, true));
    for _ in 0..MAX_HANDOFF_ROUNDS {
        attempts.note_failure(Some((WorkerId(1), DpRank(0))));
        // Each refusal tells this again, and the rounds stay bounded.
        attempts.note_client(false);
        assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::Wait);
    }
    attempts.note_failure(Some((WorkerId(1), DpRank(0))));
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
}

#[tokio::test(start_paused = true)]
async fn e6_a_handoff_is_given_up_after_rounds_over_all_workers_and_at_the_end_of_its_lease() {
    let mut attempts = Attempts::default();
    attempts.commit(LEASE);
    assert_eq!((refused(&mut attempts, &nobody()), is_beyond(&attempts)), (AfterRefusal::RouteAgain, true));
    for _ in 0..MAX_HANDOFF_ROUNDS {
        attempts.note_failure(Some((WorkerId(1), DpRank(0))));
        assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::Wait);
        assert!(attempts.tried().is_empty(), "the worker may have recovered");
    }
    attempts.note_failure(Some((WorkerId(1), DpRank(0))));
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
    attempts.commit(LEASE);
    assert!(!attempts.lease_is_over());
    tokio::time::advance(LEASE).await;
    // E6.5: it is not sent after the lease
    assert!(attempts.lease_is_over());
    assert_eq!(refused(&mut attempts, &RouteError::AllBusy(Leg::Decode)), AfterRefusal::GiveUp);
    // A new attempt has a handoff of its own.
    assert!(attempts.begin(2) && !attempts.lease_is_over() && attempts.committed(false).is_none());
}

#[tokio::test(start_paused = true)]
async fn e6_a_worker_that_refuses_one_token_is_not_asked_again_with_those_that_may_recover() {
    let mut attempts = Attempts::default();
    attempts.commit(LEASE);
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::RouteAgain);
    let declines = [0, 1].map(|rank| (WorkerId(1), DpRank(rank)));
    attempts.note_failure(Some(declines[0]));
    attempts.note_declined_handoff(declines);
    attempts.note_failure(Some((WorkerId(2), DpRank(0))));
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::Wait);
    // E6.6
    assert_eq!(attempts.tried(), declines);
    assert_eq!(refused(&mut attempts, &nobody()), AfterRefusal::GiveUp);
}

/// Returns which workers of a pair with two ranks each are tried again when both legs find no other.
fn forgiven(suspects: PerLeg<Option<WorkerId>>, legs: [Leg; 2]) -> Vec<AfterRefusal> {
    let mut attempts = Attempts::default();
    attempts.note_failure(Some((WorkerId(2), DpRank(0))));
    let pair = [suspects.prefill, suspects.answering].into_iter().flatten();
    attempts.suspect(suspects, pair.flat_map(|worker| [0, 1].map(|rank| (worker, DpRank(rank)))));
    assert_eq!(attempts.tried().len(), if suspects.prefill.is_some() { 4 } else { 2 });
    legs.map(|leg| {
        let before = attempts.tried().len();
        let after = refused_leg(&mut attempts, leg, &RouteError::AllBusy(leg));
        // E6.11
        assert_eq!(before - attempts.tried().len(), if after == AfterRefusal::RouteAgain { 2 } else { 0 });
        after
    })
    .into()
}

#[test]
fn e6_one_worker_of_a_pair_that_failed_is_tried_again_if_its_leg_has_no_other() {
    use AfterRefusal::{GiveUp, RouteAgain};
    let pair = PerLeg { prefill: Some(WorkerId(1)), answering: Some(WorkerId(2)) };
    // E6.11
    assert_eq!(forgiven(pair, [Leg::Prefill, Leg::Decode]), [RouteAgain, GiveUp]);
    assert_eq!(forgiven(pair, [Leg::Decode, Leg::Prefill]), [RouteAgain, GiveUp]);
    let local = PerLeg { prefill: None, answering: Some(WorkerId(2)) };
    // E6.13
    assert_eq!(forgiven(local, [Leg::Prefill, Leg::Aggregated]), [GiveUp, RouteAgain]);
}

#[test]
fn i2_a_worker_is_spared_for_the_leg_that_it_did_not_read_only() {
    let mut attempts = Attempts::default();
    attempts.note_unread((Leg::Prefill, WorkerId(7)));
    // I2.14
    assert_eq!((attempts.spared(Leg::Prefill), attempts.spared(Leg::Decode)), (Some(WorkerId(7)), None));
}

#[tokio::test(start_paused = true)]
async fn d4_a_plan_that_is_refused_gives_its_admission_and_its_place_back_before_the_pair_asks() {
    let (model, request) = (ModelName::new("m"), RoutingRequest::default());
    // One request in flight, and one in the queue.
    let queue =
        AdmissionQueue::new(QueueRules { limit: 1, bytes: 1, max_inflight: 1, ..QueueRules::default() });
    let admission_request =
        AdmissionRequest { model: &model, request: &request, pin: None, arrived: Instant::now(), bytes: 0 };
    let parking = Parking { queue: &queue, admission_request, timeout: Duration::from_secs(1) };
    let mut attempts = Attempts::default();
    assert!(matches!(attempts.enter(Leg::Aggregated, None, &parking), Entry::Route(None)));
    assert_eq!(queue.inflight(), 1);
    attempts.leave_plan(None);
    assert_eq!(queue.inflight(), 0);
    // D4.10
    assert!(matches!(attempts.enter(Leg::Prefill, None, &parking), Entry::Route(None)));
    // It waited for its planned worker, and the queue is full.
    let mut other = Attempts::default();
    assert!(matches!(other.enter(Leg::Aggregated, None, &parking), Entry::Wait));
    let Some((leg, place)) = other.resume() else { panic!("it waits") };
    assert_eq!((leg, queue.waiting()), (Leg::Aggregated, 1));
    let until = place.as_ref().map(|(_, until)| *until);
    tokio::time::advance(Duration::from_millis(600)).await;
    other.leave_plan(place);
    // D4.10
    assert!(matches!(other.enter(Leg::Prefill, None, &parking), Entry::Wait));
    assert_eq!((queue.waiting(), queue.inflight()), (1, 1));
    // The time in the queue counts from its first place.
    assert_eq!(other.resume().and_then(|(_, place)| place).map(|(_, until)| until), until);
}
