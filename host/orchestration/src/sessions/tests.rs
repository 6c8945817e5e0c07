use pointsman_workers::{DpRank, WorkerId};

use super::*;

const HERE: CandidateId = (WorkerId(1), DpRank(0));
const THERE: CandidateId = (WorkerId(2), DpRank(0));

/// A request of the session: from its routing to its end.
pub(super) fn turn(sessions: &Sessions, session: u64, leg: Leg, candidate: CandidateId, ttl: Duration) {
    let (mut holds, end) = (SessionHolds::default(), Instant::now() + ttl);
    sessions.hold(session, leg, &mut holds, end);
    sessions.bind(session, leg, &mut holds, candidate, end);
    sessions.release(session, &mut holds, ttl);
}

#[tokio::test(start_paused = true)]
async fn f8_a_binding_is_per_leg_and_ends() {
    let (sessions, ttl) = (Sessions::default(), Duration::from_secs(300));
    let here = (WorkerId(1), DpRank(0));
    turn(&sessions, 7, Leg::Prefill, here, ttl);
    // F8.2
    assert_eq!((sessions.get(7, Leg::Prefill), sessions.get(7, Leg::Decode)), (Some(here), None));
    tokio::time::advance(ttl / 2).await;
    turn(&sessions, 7, Leg::Prefill, here, ttl);
    tokio::time::advance(ttl / 2).await;
    assert_eq!(sessions.get(7, Leg::Prefill), Some(here));
    tokio::time::advance(ttl).await;
    // F8.4
    assert_eq!(sessions.get(7, Leg::Prefill), None);
}

#[tokio::test(start_paused = true)]
async fn f8_bindings_are_bounded_and_those_that_expire_first_are_evicted() {
    let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
    sessions.stored(7, 0, here);
    for session in 0..=MAX_BINDINGS as u64 {
        turn(&sessions, session, Leg::Decode, here, Duration::from_millis(1_000 + session));
    }
    let left = sessions.bindings();
    assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
    assert_eq!(
        (sessions.get(0, Leg::Decode), sessions.get(MAX_BINDINGS as u64, Leg::Decode)),
        (None, Some(here))
    );
    // I12.4: responses have a limit of their own.
    assert_eq!(sessions.storing(7), Some(here));
    for response in 0..=MAX_BINDINGS as u64 {
        if response % 1_000 == 0 {
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        sessions.stored(response, 0, here);
    }
    let left = sessions.responses.lock().len();
    // I12.4
    assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
}

#[tokio::test(start_paused = true)]
async fn i12_the_worker_of_a_response_is_known_for_a_day_or_until_it_is_deleted() {
    let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
    sessions.stored(7, 0, here);
    sessions.stored(8, 0, here);
    sessions.deleted(8);
    assert_eq!((sessions.storing(7), sessions.storing(8)), (Some(here), None));
    // A session of the same hash is another matter.
    assert_eq!(sessions.get(7, Leg::Aggregated), None);
    tokio::time::advance(RESPONSE_TTL).await;
    // I12.4
    assert_eq!(sessions.storing(7), None);
}

#[tokio::test(start_paused = true)]
async fn i12_many_media_make_no_gateway_forget_a_response() {
    let ((sessions, told), here) = (Sessions::shared(10), (WorkerId(1), DpRank(0)));
    sessions.stored(7, 0, here);
    for request in 0..=MAX_BINDINGS as u64 / 64 {
        tokio::time::advance(Duration::from_millis(1)).await;
        let media: Vec<u64> = (0..64).map(|place| request * 64 + place).collect();
        sessions.holds(&media, 0, Leg::Decode, here);
    }
    let left = sessions.media.lock().len();
    // I12.11
    assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
    let last = MAX_BINDINGS as u64;
    assert_eq!(
        [(0, Leg::Decode), (last, Leg::Prefill), (last, Leg::Decode)]
            .map(|(medium, leg)| sessions.holding(medium, leg)),
        [None, None, Some(here)]
    );
    // I12.4: responses have a limit of their own. Q6.5: others are told of the response only.
    assert_eq!((sessions.storing(7), told.try_iter().count(), sessions.untold()), (Some(here), 1, 0));
    tokio::time::advance(MEDIA_TTL).await;
    // I12.11
    assert_eq!((sessions.holding(last, Leg::Decode), sessions.storing(7)), (None, Some(here)));
}

#[tokio::test(start_paused = true)]
async fn i12_media_and_responses_of_one_tenant_evict_none_of_another() {
    let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
    let (few, many) = (0..30, 1_000..1_000 + 2 * MAX_BINDINGS as u64);
    sessions.holds(&few.clone().collect::<Vec<_>>(), 1, Leg::Aggregated, here);
    few.clone().for_each(|response| sessions.stored(response, 1, here));
    tokio::time::advance(Duration::from_millis(1)).await;
    for made_up in many.collect::<Vec<_>>().chunks(64) {
        sessions.holds(made_up, 2, Leg::Aggregated, here);
        made_up.iter().for_each(|response| sessions.stored(*response, 2, here));
    }
    for id in few {
        // I12.15
        assert_eq!((sessions.holding(id, Leg::Aggregated), sessions.storing(id)), (Some(here), Some(here)));
    }
    for left in [sessions.media.lock().len(), sessions.responses.lock().len()] {
        // I12.15
        assert!((30..=MAX_BINDINGS).contains(&left), "{left}");
    }
}

#[tokio::test(start_paused = true)]
async fn f8_sessions_that_one_tenant_makes_up_evict_none_of_another() {
    let (sessions, end) = (Sessions::default(), Instant::now() + Duration::from_secs(300));
    let bind = |session, owner| {
        let mut holds = SessionHolds { owner, ..SessionHolds::default() };
        sessions.hold(session, Leg::Decode, &mut holds, end);
        sessions.bind(session, Leg::Decode, &mut holds, HERE, end);
        sessions.release(session, &mut holds, Duration::from_secs(1 + owner));
    };
    (0..30).for_each(|session| bind(session, 1));
    (1_000..1_000 + 2 * MAX_BINDINGS as u64).for_each(|made_up| bind(made_up, 2));
    for session in 0..30 {
        // F8.8
        assert_eq!(sessions.get(session, Leg::Decode), Some(HERE), "{session}");
    }
    assert!((30..=MAX_BINDINGS).contains(&sessions.bindings()));
}

#[tokio::test(start_paused = true)]
async fn i12_more_tenants_than_bindings_are_bounded_too() {
    let (sessions, here) = (Sessions::default(), (WorkerId(1), DpRank(0)));
    for owner in 1..=MAX_BINDINGS as u64 + 1 {
        if owner % 1_000 == 0 {
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        sessions.stored(owner, owner, here);
    }
    let left = sessions.responses.lock().len();
    // I12.15
    assert!((MAX_BINDINGS / 2..=MAX_BINDINGS).contains(&left), "{left}");
    assert_eq!((sessions.storing(1), sessions.storing(MAX_BINDINGS as u64)), (None, Some(here)));
}

#[tokio::test]
async fn f8_a_closed_session_has_no_binding() {
    let sessions = Sessions::default();
    turn(&sessions, 7, Leg::Decode, HERE, Duration::from_secs(300));
    sessions.close(7);
    assert_eq!((sessions.get(7, Leg::Decode), sessions.bindings()), (None, 0));
}

#[tokio::test(start_paused = true)]
async fn f8_a_session_stays_bound_while_a_request_of_it_runs() {
    let (sessions, ttl) = (Sessions::default(), Duration::from_secs(300));
    turn(&sessions, 7, Leg::Decode, HERE, ttl);
    let (mut first, mut second) = (SessionHolds::default(), SessionHolds::default());
    let end = Instant::now() + 9 * ttl;
    sessions.hold(7, Leg::Decode, &mut first, end);
    tokio::time::advance(ttl * 2).await;
    sessions.hold(7, Leg::Decode, &mut second, end);
    sessions.bind(7, Leg::Decode, &mut second, HERE, end);
    sessions.release(7, &mut second, ttl);
    tokio::time::advance(ttl * 2).await;
    // F8.4: the first one still runs
    assert_eq!(sessions.get(7, Leg::Decode), Some(HERE));
    sessions.release(7, &mut first, ttl);
    tokio::time::advance(ttl - Duration::from_secs(1)).await;
    // F8.4: from its end on
    assert_eq!(sessions.get(7, Leg::Decode), Some(HERE));
    tokio::time::advance(Duration::from_secs(1)).await;
    // F8.4
    assert_eq!(sessions.get(7, Leg::Decode), None);
    // A request does not bring an expired binding back.
    sessions.hold(7, Leg::Decode, &mut first, Instant::now() + ttl);
    assert_eq!(sessions.get(7, Leg::Decode), None);
    sessions.release(7, &mut first, ttl);
    assert_eq!(sessions.bindings(), 0);
}

#[tokio::test]
async fn f8_the_first_dispatch_binds_and_a_late_one_changes_nothing() {
    for (sessions, ttl) in
        [Sessions::default(), Sessions::shared(100).0].map(|all| (all, Duration::from_secs(300)))
    {
        let (mut slow, mut fast, end) =
            (SessionHolds::default(), SessionHolds::default(), Instant::now() + ttl);
        sessions.hold(7, Leg::Prefill, &mut slow, end);
        sessions.hold(7, Leg::Prefill, &mut fast, end);
        sessions.bind(7, Leg::Prefill, &mut fast, HERE, end);
        sessions.bind(7, Leg::Prefill, &mut slow, THERE, end);
        // F8.1
        assert_eq!(sessions.get(7, Leg::Prefill), Some(HERE));
        // It failed, and is routed again: its session's worker is not eligible.
        sessions.hold(7, Leg::Prefill, &mut slow, end);
        sessions.bind(7, Leg::Prefill, &mut slow, THERE, end);
        // F8.3
        assert_eq!(sessions.get(7, Leg::Prefill), Some(THERE));
        sessions.close(7);
        sessions.bind(7, Leg::Prefill, &mut fast, HERE, end);
        sessions.bind(7, Leg::Prefill, &mut slow, THERE, end);
        // F8.7
        assert_eq!(sessions.get(7, Leg::Prefill), None);
        sessions.hold(7, Leg::Decode, &mut slow, end);
        sessions.bind(7, Leg::Decode, &mut slow, THERE, end);
        // F8.7: nor its other leg
        assert_eq!(sessions.get(7, Leg::Decode), None);
        let mut next = SessionHolds::default();
        sessions.hold(7, Leg::Prefill, &mut next, end);
        sessions.bind(7, Leg::Prefill, &mut next, THERE, end);
        // F8.7: a request after the end begins it again
        assert_eq!(sessions.get(7, Leg::Prefill), Some(THERE));
        for holds in [&mut slow, &mut fast, &mut next] {
            sessions.release(7, holds, ttl);
        }
        assert_eq!(sessions.get(7, Leg::Prefill), Some(THERE));
    }
}

#[tokio::test(start_paused = true)]
async fn f8_a_request_that_ends_early_does_not_shorten_what_another_one_holds() {
    let (sessions, ttl) = (Sessions::default(), Duration::from_secs(300));
    let (mut long, mut short) = (SessionHolds::default(), SessionHolds::default());
    let now = Instant::now();
    for (holds, end) in [(&mut long, now + 9 * ttl), (&mut short, now + ttl)] {
        sessions.hold(7, Leg::Decode, holds, end);
        sessions.bind(7, Leg::Decode, holds, HERE, end);
    }
    sessions.release(7, &mut short, ttl);
    tokio::time::advance(2 * ttl).await;
    // F8.4
    assert_eq!(sessions.get(7, Leg::Decode), Some(HERE));
}

#[tokio::test(start_paused = true)]
async fn f8_a_session_of_a_running_request_is_evicted_last() {
    let (sessions, ttl) = (Sessions::default(), Duration::from_secs(300));
    let (mut first, mut second, end) =
        (SessionHolds::default(), SessionHolds::default(), Instant::now() + 9 * ttl);
    sessions.hold(7, Leg::Prefill, &mut first, end);
    sessions.bind(7, Leg::Prefill, &mut first, HERE, end);
    for session in 8..=MAX_BINDINGS as u64 + 8 {
        turn(&sessions, session, Leg::Decode, THERE, 99 * ttl + Duration::from_millis(session));
    }
    // F8.8
    assert_eq!(sessions.get(7, Leg::Prefill), Some(HERE));
    sessions.hold(7, Leg::Prefill, &mut second, end);
    sessions.bind(7, Leg::Prefill, &mut second, HERE, end);
    sessions.release(7, &mut first, ttl);
    tokio::time::advance(2 * ttl).await;
    // F8.4
    assert_eq!(sessions.get(7, Leg::Prefill), Some(HERE));
}
