//! Decode engines that refuse what others may take (E5, I2.4, I17).

use super::*;

/// A completed or an addressed handoff that decode got.
fn sent(traits: PrefillTraits) -> Vec<(Event, &'static [Action])> {
    let decode: [(Event, &[Action]); 2] = match traits.handoff {
        HandoffKind::Completed => {
            [(E::PrefillHandoff, &[A::Route(Leg::Decode)]), (E::Routed, &[A::Send(Leg::Decode)])]
        }
        _ => [(E::Routed, &[A::Send(Leg::Prefill)]), (E::PrefillEnded, &[A::Send(Leg::Decode)])],
    };
    let prefill: Vec<(Event, &[Action])> = match traits.handoff {
        HandoffKind::Completed => {
            vec![(E::PrefillRouted(traits), &[A::Reserve]), (E::Reserved, &[A::Send(Leg::Prefill)])]
        }
        _ => vec![(E::PrefillRouted(traits), &[A::Route(Leg::Decode)])],
    };
    [prefill, decode.to_vec()].concat()
}

#[test]
fn e5_a_handoff_that_a_worker_refuses_for_a_reason_of_its_own_costs_a_retry() {
    let refused = E::Failed(Leg::Decode, REFUSED_HERE);
    let elsewhere: &[(Event, &[Action])] = &[
        // E5.2
        (refused, &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Decode)]),
    ];
    let no_more: &[(Event, &[Action])] = &[
        // I2.3, E6.6
        (refused, &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Route(Leg::Decode)]),
        (E::Routed, &[A::SendToConsume]),
        (refused, &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]),
        (E::Routed, &[A::SendToConsume]),
    ];
    check(Shape::Remote, 2, &[&sent(COMPLETED)[..], elsewhere, elsewhere, no_more].concat());
    check(Shape::Remote, 0, &[&sent(COMPLETED)[..], no_more].concat());
}

#[test]
fn e5_an_addressed_handoff_that_its_worker_refuses_is_lost_and_the_retry_has_another_one() {
    let refused = E::Failed(Leg::Decode, REFUSED_HERE);
    let lost: &[(Event, &[Action])] =
        // E5.3
        &[(refused, &[A::Cancel(Leg::Decode), A::Lose(Lost::NoDecodeWorker), A::Route(Leg::Prefill)])];
    check(Shape::Remote, 1, &[&sent(ADDRESSED)[..], lost, &sent(ADDRESSED)].concat());
    let consumed: &[(Event, &[Action])] =
        // E6.6
        &[(refused, &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::SendToConsume])];
    check(Shape::Remote, 0, &[&sent(ADDRESSED)[..], consumed].concat());
}

#[test]
fn e6_a_handoff_that_a_worker_refuses_within_its_answer_is_offered_to_another_one() {
    let begins: &[(Event, &[Action])] = &[(E::Head, &[A::Relay])];
    for failed in [OVERLOADED, REFUSED_HERE] {
        let mut legs = check(Shape::Remote, 1, &[&sent(COMPLETED)[..], begins].concat());
        // The client has no event.
        legs.begin_again();
        let elsewhere = legs.on(E::Failed(Leg::Decode, failed));
        // E6.16, E5.2
        assert_eq!(elsewhere[..], [A::Cancel(Leg::Decode), A::Route(Leg::Decode)]);
        assert_eq!(legs.on(E::Routed)[..], [A::Send(Leg::Decode)]);
        assert!(legs.on(E::Head).is_empty() && legs.on(E::FirstToken).is_empty());
        assert_eq!(legs.on(E::Ended)[..], [A::Finish]);
    }
    let overloaded = E::Failed(Leg::Decode, OVERLOADED);
    let anew: &[Action] = &[A::Cancel(Leg::Decode), A::Lose(Lost::NoDecodeWorker), A::Route(Leg::Prefill)];
    // E5.3
    check(Shape::Remote, 1, &[&sent(ADDRESSED)[..], &[(overloaded, anew)]].concat());
}

#[test]
fn e6_a_handoff_that_is_refused_after_an_event_for_the_client_is_consumed_without_the_client() {
    let steps: &[(Event, &[Action])] = &[
        (E::Head, &[A::Relay]),
        // I2.2, E6.16
        (
            E::Failed(Leg::Decode, OVERLOADED),
            &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Route(Leg::Decode)],
        ),
        (E::Routed, &[A::SendToConsume]),
        (E::Head, &[]),
        // E6.9
        (E::Failed(Leg::Decode, OVERLOADED), &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]),
        (E::HandoffLost(Lost::NoDecodeWorker), &[A::Lose(Lost::NoDecodeWorker), A::Finish]),
    ];
    check(Shape::Remote, 2, &[&sent(COMPLETED)[..], steps].concat());
    let gone: &[(Event, &[Action])] = &[
        (E::Head, &[A::Relay]),
        (E::ClientGone, &[]),
        (E::Failed(Leg::Decode, OVERLOADED), &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]),
        (E::Routed, &[A::SendToConsume]),
        (E::FirstToken, &[A::Cancel(Leg::Decode), A::Finish]),
    ];
    check(Shape::Remote, 2, &[&sent(COMPLETED)[..], gone].concat());
}

#[test]
fn e6_a_handoff_that_is_refused_after_output_is_not_offered_again() {
    let begins: &[(Event, &[Action])] = &[(E::Head, &[A::Relay])];
    for failed in [OVERLOADED, REFUSED_HERE] {
        let refused = E::Failed(Leg::Decode, Failed { began: true, ..failed });
        let mut legs = check(Shape::Remote, 1, &[&sent(COMPLETED)[..], begins].concat());
        // The client has no event.
        legs.begin_again();
        // E6.16, E5.3
        assert_eq!(legs.on(refused)[..], [A::Cancel(Leg::Decode), A::Route(Leg::Prefill)]);
        let ends: &[(Event, &[Action])] =
            &[(refused, &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Finish])];
        // E6.16, I2.2
        check(Shape::Remote, 1, &[&sent(COMPLETED)[..], begins, ends].concat());
    }
}

#[test]
fn e3_a_pair_whose_decode_refuses_within_its_answer_is_started_anew() {
    for traits in [BOOTSTRAP, BOOTSTRAP_NO_ABORT] {
        let (mut legs, _) = Legs::new(Shape::Remote, RetryPolicy { retries: 1, ..RetryPolicy::default() });
        for event in [E::PrefillRouted(traits), E::Routed, E::Head] {
            legs.on(event);
        }
        legs.begin_again();
        let actions = legs.on(E::Failed(Leg::Decode, OVERLOADED));
        let abort = traits.abortable.then_some(A::Abort(Leg::Prefill));
        let first = std::iter::once(A::Cancel(Leg::Decode)).chain(abort);
        // E3.2
        let expected: Vec<_> = first.chain([A::Cancel(Leg::Prefill), A::Route(Leg::Prefill)]).collect();
        assert_eq!(actions[..], expected);
    }
}
