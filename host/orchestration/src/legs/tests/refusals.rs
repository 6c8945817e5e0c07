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
        (refused, &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::SendToConsume]),
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
