use super::*;

/// Feeds events to a request with a local plan, and checks the actions of each step.
fn planned(policy: RetryPolicy, has_pair: bool, steps: &[(Event, &[Action])]) -> Legs {
    let (mut legs, first) = Legs::of_local_plan(policy);
    assert_eq!(first[..], [A::Route(Leg::Aggregated)]);
    assert!(legs.follows_plan());
    legs.note_pair(has_pair);
    for (place, (event, expected)) in steps.iter().enumerate() {
        assert_eq!(legs.on(*event)[..], **expected, "step {place}: {event:?}");
    }
    legs
}

const NO_RETRY: RetryPolicy =
    RetryPolicy { order: LegOrder::PrefillFirst, retries: 0, local_fallback: false, continuations: 0 };
const ONE_RETRY: RetryPolicy = RetryPolicy { retries: 1, ..NO_RETRY };
const SENT: (Event, &[Action]) = (E::Routed, &[A::Send(Leg::Aggregated)]);

fn fails(failed: Failed) -> Event {
    E::Failed(Leg::Aggregated, failed)
}

#[test]
fn d4_a_plan_that_is_refused_costs_no_retry() {
    // D4.10
    let legs = planned(NO_RETRY, true, &[(E::PlanRefused, &[A::Route(Leg::Prefill)])]);
    assert_eq!((legs.answering(), legs.follows_plan(), legs.attempt()), (Leg::Decode, false, 1));
    // D4.9: without a pair
    let legs = planned(NO_RETRY, false, &[(E::PlanRefused, &[A::Route(Leg::Aggregated)])]);
    assert_eq!((legs.answering(), legs.follows_plan()), (Leg::Aggregated, false));
    let first = RetryPolicy { order: LegOrder::DecodeFirst, ..NO_RETRY };
    planned(first, true, &[(E::PlanRefused, &[A::Route(Leg::Decode)])]);
    // Once only.
    let again: &[(E, &[A])] = &[(E::PlanRefused, &[A::Route(Leg::Aggregated)]), (E::PlanRefused, &[]), SENT];
    planned(NO_RETRY, false, again);
}

#[test]
fn d4_a_planned_worker_that_fails_costs_a_retry() {
    let to_pair: &[A] = &[A::Cancel(Leg::Aggregated), A::Route(Leg::Prefill)];
    let to_others: &[A] = &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)];
    let ends: &[A] = &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish];
    for failed in [RETRYABLE_SENT, RETRYABLE_UNSENT, BROKE] {
        // D4.9
        planned(ONE_RETRY, true, &[SENT, (fails(failed), to_pair)]);
        planned(ONE_RETRY, false, &[SENT, (fails(failed), to_others)]);
        planned(NO_RETRY, true, &[SENT, (fails(failed), ends)]);
    }
    planned(ONE_RETRY, true, &[SENT, (fails(FATAL), ends)]);
}

#[test]
fn d4_no_third_engine_gets_a_request_that_broke_the_planned_worker_and_one_of_the_pair() {
    let policy = RetryPolicy { retries: 9, local_fallback: true, ..NO_RETRY };
    let broken: &[(E, &[A])] = &[
        SENT,
        (fails(BROKE), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Prefill)]),
        (E::PrefillRouted(COMPLETED), &[A::Reserve]),
        (E::Reserved, &[A::Send(Leg::Prefill)]),
        (E::Failed(Leg::Prefill, BROKE), &[A::Cancel(Leg::Prefill), A::Fail(Leg::Prefill), A::Finish]),
    ];
    // D4.9
    planned(policy, true, broken);
}

#[test]
fn d4_a_prompt_that_the_planned_worker_refuses_is_offered_to_the_pair_once() {
    let asked: (E, &[A]) = (fails(REFUSED), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Prefill)]);
    let refused: &[A] = &[A::Cancel(Leg::Prefill), A::Fail(Leg::Prefill), A::Finish];
    // D4.11
    for traits in [COMPLETED, BOOTSTRAP, ADDRESSED] {
        let (mut legs, _) = Legs::of_local_plan(NO_RETRY);
        legs.note_pair(true);
        legs.on(E::Routed);
        assert_eq!(legs.on(asked.0)[..], *asked.1, "{traits:?}");
        legs.on(E::PrefillRouted(traits));
        legs.on(if traits.handoff == HandoffKind::Completed { E::Reserved } else { E::Routed });
        let ended = legs.on(E::Failed(Leg::Prefill, REFUSED));
        assert!(ended.contains(&A::Fail(Leg::Prefill)) && legs.is_finished(), "{traits:?}: {ended:?}");
    }
    let once: &[(E, &[A])] = &[
        SENT,
        asked,
        (E::PrefillRouted(COMPLETED), &[A::Reserve]),
        (E::Reserved, &[A::Send(Leg::Prefill)]),
        (E::Failed(Leg::Prefill, REFUSED), refused),
    ];
    planned(ONE_RETRY, true, once);
    let ends: &[A] = &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish];
    planned(ONE_RETRY, false, &[SENT, (fails(REFUSED), ends)]);
    // Not after the client has a part of the answer.
    let begun: &[(E, &[A])] = &[SENT, (E::Head, &[A::Relay]), (fails(REFUSED), ends)];
    planned(ONE_RETRY, true, begun);
}

#[test]
fn d4_a_client_that_leaves_and_the_deadline_end_a_request_between_plan_and_pair() {
    for (event, last) in [(E::ClientGone, &[A::Finish][..]), (E::Deadline, &[A::FailDeadline, A::Finish][..])]
    {
        // D4.9
        planned(NO_RETRY, true, &[(E::PlanRefused, &[A::Route(Leg::Prefill)]), (event, last)]);
        let asked: (E, &[A]) = (fails(REFUSED), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Prefill)]);
        planned(NO_RETRY, true, &[SENT, asked, (event, last), (E::PrefillRouted(COMPLETED), &[])]);
    }
}

#[test]
fn d4_the_rest_of_a_stream_with_a_local_plan_runs_over_the_pair() {
    let policy = RetryPolicy { continuations: 1, ..NO_RETRY };
    let begun: &[(E, &[A])] = &[SENT, (E::Head, &[A::Relay]), (E::FirstToken, &[])];
    let rest: &[A] = &[A::Cancel(Leg::Aggregated), A::Continue, A::Route(Leg::Prefill)];
    for event in [fails(DIED), E::Move, E::Pause] {
        // D4.12
        planned(policy, true, &[begun, &[(event, rest)]].concat());
    }
    let alone: &[A] = &[A::Cancel(Leg::Aggregated), A::Continue, A::Route(Leg::Aggregated)];
    planned(policy, false, &[begun, &[(E::Move, alone)]].concat());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn d4_a_local_plan_keeps_the_invariants_in_every_interleaving(
        has_pair in any::<bool>(),
        (policy, traits) in policies_and_traits(),
        choices in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        let (mut legs, actions) = Legs::of_local_plan(policy);
        legs.note_pair(has_pair);
        run_legs((legs, actions), Shape::Aggregated, policy, traits, &choices);
    }
}
