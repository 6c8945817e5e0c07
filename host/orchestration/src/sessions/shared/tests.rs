use pointsman_workers::{DpRank, Leg, WorkerId};
use proptest::prelude::*;

use super::{
    super::{SessionHolds, tests::turn},
    *,
};

const TTL: Duration = Duration::from_secs(300);

fn changes(queue: &Receiver<SessionChange>) -> Vec<SessionChange> {
    queue.try_iter().collect()
}

fn gateway(writer: u64) -> (Sessions, Receiver<SessionChange>) {
    let (sessions, queue) = Sessions::shared(1_000);
    sessions.set_writer(writer);
    (sessions, queue)
}

#[test]
fn q6_a_binding_of_another_gateway_holds_here_and_its_end_too() {
    let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
    turn(&one, 7, Leg::Decode, (WorkerId(3), DpRank(1)), TTL);
    changes(&queue).into_iter().for_each(|change| two.apply(change));
    // Q6.1
    assert_eq!(two.get(7, Leg::Decode), Some((WorkerId(3), DpRank(1))));
    let late = SessionChange {
        key: BindingKey::Session(7, Leg::Decode),
        candidate: Some((WorkerId(9), DpRank(0))),
        ttl: TTL,
        stamp: Stamp { at_us: 1, writer: 3 },
    };
    one.close(7);
    changes(&queue).into_iter().for_each(|change| two.apply(change));
    two.apply(late);
    // Q6.2
    assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, None));
}

#[test]
fn q6_the_worker_of_a_response_is_known_to_other_gateways_until_it_is_deleted() {
    let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
    one.stored(7, 0, (WorkerId(3), DpRank(0)));
    changes(&queue).into_iter().for_each(|change| two.apply(change));
    // Q6.5
    assert_eq!((two.storing(7), two.get(7, Leg::Aggregated)), (Some((WorkerId(3), DpRank(0))), None));
    one.deleted(7);
    changes(&queue).into_iter().for_each(|change| two.apply(change));
    // Q6.5
    assert_eq!(two.storing(7), None);
}

#[tokio::test(start_paused = true)]
async fn q6_a_session_stays_bound_elsewhere_while_a_request_of_it_runs() {
    let ((one, queue), (two, _two)) = (gateway(1), gateway(2));
    let tell = || changes(&queue).into_iter().for_each(|change| two.apply(change));
    let (mut holds, here) = (SessionHolds::default(), (WorkerId(3), DpRank(1)));
    let end = Instant::now() + 9 * TTL;
    one.hold(7, Leg::Decode, &mut holds, end);
    one.bind(7, Leg::Decode, &mut holds, here, end);
    tell();
    tokio::time::advance(2 * TTL).await;
    // Q6.9
    assert_eq!(two.get(7, Leg::Decode), Some(here));
    one.release(7, &mut holds, TTL);
    tell();
    tokio::time::advance(TTL / 2).await;
    assert_eq!(two.get(7, Leg::Decode), Some(here));
    tokio::time::advance(TTL / 2).await;
    // Q6.9
    assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, None));
    // What runs here keeps it against an end elsewhere.
    two.hold(7, Leg::Decode, &mut holds, Instant::now() + 9 * TTL);
    turn(&one, 7, Leg::Decode, here, TTL);
    tell();
    tokio::time::advance(2 * TTL).await;
    assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (None, Some(here)));
}

#[test]
fn q6_a_clock_that_is_ahead_wins_for_seconds_only() {
    let (one, _queue) = gateway(1);
    let ahead = Stamp { at_us: u64::MAX, writer: 3 };
    let (key, candidate) = (BindingKey::Session(7, Leg::Decode), Some((WorkerId(9), DpRank(0))));
    one.apply(SessionChange { key, candidate, ttl: TTL * 1_000, stamp: ahead });
    let binding = one.sessions.lock().get(&key).unwrap().clone();
    // Q6.3
    assert!(binding.stamp.at_us <= unix_us() + 10_000_000);
    assert!(binding.end() <= Instant::now() + MAX_TTL);
    // The binding here is newer than the known one.
    turn(&one, 7, Leg::Decode, (WorkerId(2), DpRank(0)), TTL);
    assert_eq!(one.get(7, Leg::Decode), Some((WorkerId(2), DpRank(0))));
}

#[test]
fn q6_a_full_queue_delays_no_request() {
    let (one, _queue) = Sessions::shared(2);
    for session in 0..5 {
        let (mut holds, end) = (SessionHolds::default(), Instant::now() + TTL);
        one.hold(session, Leg::Decode, &mut holds, end);
        one.bind(session, Leg::Decode, &mut holds, (WorkerId(2), DpRank(0)), end);
    }
    // Q6.4
    assert_eq!((one.untold(), one.bindings()), (3, 5));
}

/// A request at a gateway that took a leg of session 7.
fn running(sessions: &Sessions, candidate: CandidateId, end: Instant) -> SessionHolds {
    let mut holds = SessionHolds::default();
    sessions.hold(7, Leg::Decode, &mut holds, end);
    sessions.bind(7, Leg::Decode, &mut holds, candidate, end);
    holds
}

const W1: CandidateId = (WorkerId(1), DpRank(0));
const W2: CandidateId = (WorkerId(2), DpRank(0));

#[test]
fn q6_the_end_of_a_request_neither_reopens_a_session_nor_undoes_a_newer_binding() {
    for (closes, is_late) in [(true, true), (true, false), (false, true), (false, false)] {
        let ((one, of_one), (two, of_two)) = (gateway(1), gateway(2));
        let mut holds = running(&one, W1, Instant::now() + 9 * TTL);
        changes(&of_one).into_iter().for_each(|change| two.apply(change));
        if closes {
            two.close(7);
        } else {
            turn(&two, 7, Leg::Decode, W2, TTL);
        }
        if !is_late {
            changes(&of_two).into_iter().for_each(|change| one.apply(change));
        }
        one.release(7, &mut holds, TTL);
        changes(&of_two).into_iter().for_each(|change| one.apply(change));
        changes(&of_one).into_iter().for_each(|change| two.apply(change));
        let bound = (!closes).then_some(W2);
        // Q6.2
        assert_eq!((one.get(7, Leg::Decode), two.get(7, Leg::Decode)), (bound, bound), "{closes} {is_late}");
    }
}

#[tokio::test(start_paused = true)]
async fn q6_a_short_request_elsewhere_does_not_shorten_the_binding_of_a_long_one() {
    let ((one, of_one), (two, of_two), (three, _of_three)) = (gateway(1), gateway(2), gateway(3));
    let tell = || {
        for change in changes(&of_one) {
            two.apply(change);
            three.apply(change);
        }
        for change in changes(&of_two) {
            one.apply(change);
            three.apply(change);
        }
    };
    let bound = || [&one, &two, &three].map(|sessions| sessions.get(7, Leg::Decode));
    let mut long = running(&one, W1, Instant::now() + 9 * TTL);
    tell();
    turn(&two, 7, Leg::Decode, W1, TTL);
    tell();
    tokio::time::advance(2 * TTL).await;
    // Q6.9
    assert_eq!(bound(), [Some(W1); 3]);
    one.release(7, &mut long, TTL);
    tell();
    tokio::time::advance(TTL - Duration::from_secs(1)).await;
    assert_eq!(bound(), [Some(W1); 3]);
    tokio::time::advance(Duration::from_secs(1)).await;
    // Q6.9: also after the request of the other one, the time begins with the end of this one
    assert_eq!(bound(), [None; 3]);
}

#[test]
fn q6_requests_that_no_worker_accepts_tell_nothing() {
    let (one, queue) = gateway(1);
    turn(&one, 7, Leg::Decode, W1, TTL);
    assert_eq!(changes(&queue).len(), 1);
    for _ in 0..5 {
        let mut holds = SessionHolds::default();
        one.hold(7, Leg::Decode, &mut holds, Instant::now() + TTL);
        one.release(7, &mut holds, TTL);
    }
    // Q6.10
    assert_eq!(changes(&queue), []);
}

proptest! {
    #[test]
    fn q6_gateways_agree_whatever_the_order_of_changes(
        steps in proptest::collection::vec((0_usize..2, 0_u64..3, 0_u64..4), 1..30),
        order in proptest::collection::vec(any::<prop::sample::Index>(), 100),
    ) {
        let gateways = [gateway(1), gateway(2)];
        for (which, session, worker) in steps {
            match worker {
                0 => gateways[which].0.close(session),
                worker => {
                    let candidate = (WorkerId(worker), DpRank(0));
                    turn(&gateways[which].0, session, Leg::Prefill, candidate, TTL);
                }
            }
        }
        let told = [changes(&gateways[0].1), changes(&gateways[1].1)];
        for (which, mut told) in [(0, told[1].clone()), (1, told[0].clone())] {
            for place in &order {
                if told.is_empty() {
                    break;
                }
                gateways[which].0.apply(told.swap_remove(place.index(told.len())));
            }
            told.into_iter().for_each(|change| gateways[which].0.apply(change));
        }
        for session in 0..3 {
            let bound = |which: usize| gateways[which].0.get(session, Leg::Prefill);
            // Q6.2
            prop_assert_eq!(bound(0), bound(1));
        }
    }
}
