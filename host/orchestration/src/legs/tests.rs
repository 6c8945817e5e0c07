use proptest::prelude::*;

use super::*;

mod local_plan;
mod refusals;

const COMPLETED: PrefillTraits =
    PrefillTraits { handoff: HandoffKind::Completed, cancellable: false, abortable: false };
const BOOTSTRAP: PrefillTraits =
    PrefillTraits { handoff: HandoffKind::Bootstrap, cancellable: false, abortable: true };
const ADDRESSED: PrefillTraits = PrefillTraits { handoff: HandoffKind::Addressed, ..COMPLETED };
const BOOTSTRAP_NO_ABORT: PrefillTraits = PrefillTraits { abortable: false, ..BOOTSTRAP };
const DECODE_FIRST: RetryPolicy =
    RetryPolicy { order: LegOrder::DecodeFirst, retries: 1, local_fallback: false, continuations: 0 };
const RETRYABLE_SENT: Failed =
    Failed { retryable: true, refused: false, began: true, broke: false, continuable: false };
const RETRYABLE_UNSENT: Failed =
    Failed { retryable: true, refused: false, began: false, broke: false, continuable: false };
/// The engine has too much to do, as its status or its answer says.
const OVERLOADED: Failed = RETRYABLE_UNSENT;
const BROKE: Failed =
    Failed { retryable: true, refused: false, began: true, broke: true, continuable: false };
/// The engine refuses the request itself.
const REFUSED: Failed =
    Failed { retryable: false, refused: true, began: false, broke: false, continuable: false };
/// The engine refuses the request, and another one may take it.
const REFUSED_HERE: Failed = Failed { retryable: true, ..REFUSED };
/// An engine that died within an answer, the rest of which may be generated elsewhere.
const DIED: Failed = Failed { continuable: true, ..BROKE };
const FATAL: Failed =
    Failed { retryable: false, refused: false, began: true, broke: false, continuable: false };

use Action as A;
use Event as E;

/// Feeds events and checks the actions of each step.
fn check(shape: Shape, retries: u32, steps: &[(Event, &[Action])]) -> Legs {
    let (mut legs, first) = Legs::new(shape, RetryPolicy { retries, ..RetryPolicy::default() });
    let start = if shape == Shape::Aggregated { Leg::Aggregated } else { Leg::Prefill };
    assert_eq!(first[..], [A::Route(start)]);
    for (place, (event, expected)) in steps.iter().enumerate() {
        assert_eq!(legs.on(*event)[..], **expected, "step {place}: {event:?}");
    }
    legs
}

#[test]
fn single_leg_is_relayed_and_finished() {
    let steps: &[(Event, &[Action])] = &[
        (E::Routed, &[A::Send(Leg::Aggregated)]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
        (E::FinishSeen, &[]),
        (E::Ended, &[A::Finish]),
    ];
    assert!(check(Shape::Aggregated, 2, steps).is_finished());
}

#[test]
fn e2_an_aggregated_leg_is_aborted_where_its_engine_can() {
    let (abort, cancel) = (A::Abort(Leg::Aggregated), A::Cancel(Leg::Aggregated));
    for (abortable, expected) in [(true, vec![abort, cancel, A::Finish]), (false, vec![cancel, A::Finish])] {
        for begun in [false, true] {
            let (mut legs, _) = Legs::new(Shape::Aggregated, RetryPolicy::default());
            legs.note_abortable(abortable);
            legs.on(E::Routed);
            if begun {
                legs.on(E::Head);
                legs.on(E::FirstToken);
            }
            // E2.3
            assert_eq!(legs.on(E::ClientGone)[..], expected, "begun: {begun}");
        }
    }
}

#[test]
fn c7_completed_handoff_sends_decode_after_prefill_answered() {
    let steps: &[(Event, &[Action])] = &[
        (E::PrefillRouted(COMPLETED), &[A::Reserve]),
        (E::Reserved, &[A::Send(Leg::Prefill)]),
        // C7.1
        (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Decode)]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
        (E::FinishSeen, &[]),
        (E::Ended, &[A::Finish]),
    ];
    assert!(!check(Shape::Remote, 2, steps).owes());
}

#[test]
fn c2_c6_bootstrap_routes_decode_after_prefill_is_routed_and_sends_both_together() {
    check(
        Shape::Remote,
        2,
        &[
            // C2.1
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            // C6.8
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::PrefillEnded, &[]),
            (E::FirstToken, &[]),
            (E::Ended, &[A::Finish]),
        ],
    );
}

#[test]
fn c8_an_answer_that_ended_in_prefill_starts_no_decode() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            (E::PrefillWasAll, &[A::AnswerPrefill, A::Finish]),
        ],
    );
}

#[test]
fn c8_a_decode_that_waits_for_an_answer_that_ended_in_prefill_is_stopped() {
    let sent: [(E, &[A]); 2] = [
        (E::PrefillRouted(BOOTSTRAP_NO_ABORT), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
    ];
    let after = |then: &[(E, &[A])]| {
        check(Shape::Remote, 2, &[&sent[..], then].concat());
    };
    // C8.6
    after(&[(E::PrefillWasAll, &[A::Cancel(Leg::Decode), A::AnswerPrefill, A::Finish])]);
    after(&[(E::ClientGone, &[]), (E::PrefillWasAll, &[A::Cancel(Leg::Decode), A::Finish])]);
    after(&[
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
        (E::PrefillWasAll, &[]),
        (E::FinishSeen, &[]),
        (E::Ended, &[A::Finish]),
    ]);
}

#[test]
fn c11_a_successful_end_is_held_until_prefill_ended() {
    check(
        Shape::Remote,
        0,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            // C11.2
            (E::FirstToken, &[]),
            // C11.3, C11.5
            (E::FinishSeen, &[A::Hold]),
            (E::Ended, &[]),
            (E::PrefillEnded, &[A::Release, A::Finish]),
        ],
    );
}

#[test]
fn c11_a_whole_body_is_held_until_prefill_ended() {
    check(
        Shape::Remote,
        0,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            // C11.6
            (E::Ended, &[]),
            (E::PrefillEnded, &[A::Relay, A::Finish]),
        ],
    );
}

#[test]
fn c11_a_late_prefill_failure_ends_the_request_with_an_error() {
    check(
        Shape::Remote,
        3,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            (E::FinishSeen, &[A::Hold]),
            (
                E::Failed(Leg::Prefill, RETRYABLE_SENT),
                &[
                    A::Cancel(Leg::Prefill),
                    A::Abort(Leg::Decode),
                    A::Cancel(Leg::Decode),
                    // C11.1
                    A::Fail(Leg::Prefill),
                    A::Finish,
                ],
            ),
        ],
    );
}

#[test]
fn c11_the_deadline_ends_a_held_request() {
    check(
        Shape::Remote,
        0,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::FinishSeen, &[A::Hold]),
            (
                E::Deadline,
                &[
                    A::Abort(Leg::Prefill),
                    A::Cancel(Leg::Prefill),
                    A::Abort(Leg::Decode),
                    A::Cancel(Leg::Decode),
                    // C11.4
                    A::FailDeadline,
                    A::Finish,
                ],
            ),
        ],
    );
}

#[test]
fn e1_client_gone_in_prefill_lets_it_end_and_consumes_the_handoff() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            // E1.2
            (E::ClientGone, &[]),
            (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::SendToConsume]),
            (E::Head, &[]),
            (E::FirstToken, &[A::Cancel(Leg::Decode), A::Finish]),
        ],
    );
}

#[test]
fn e4_a_cancellable_prefill_is_cancelled_at_once() {
    let traits = PrefillTraits { cancellable: true, ..COMPLETED };
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(traits), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            // E1.2, E4.1
            (E::ClientGone, &[A::Cancel(Leg::Prefill), A::Finish]),
        ],
    );
}

#[test]
fn e1_client_gone_with_parameters_in_hand_sends_decode_to_consume() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
            (E::ClientGone, &[]),
            // E1.3
            (E::Routed, &[A::SendToConsume]),
            (E::Ended, &[A::Finish]),
        ],
    );
}

#[test]
fn e1_decode_sent_but_not_consumed_runs_to_its_first_token() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::ClientGone, &[]),
            (E::FirstToken, &[A::Cancel(Leg::Decode), A::Finish]),
        ],
    );
}

#[test]
fn e1_consumed_decode_is_cancelled_at_once() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            // E1.5
            (E::ClientGone, &[A::Cancel(Leg::Decode), A::Finish]),
        ],
    );
}

#[test]
fn e1_an_unconsumed_bootstrap_pair_is_kept_and_aborted_by_id() {
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            // E1.4
            (E::ClientGone, &[A::Abort(Leg::Prefill), A::Abort(Leg::Decode)]),
            // E1.4: the other leg waits for a partner that has left
            (E::PrefillEnded, &[A::Abort(Leg::Decode), A::Cancel(Leg::Decode), A::Finish]),
        ],
    );
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::ClientGone, &[A::Abort(Leg::Prefill), A::Abort(Leg::Decode)]),
            // E1.4
            (E::Ended, &[A::Abort(Leg::Prefill), A::Cancel(Leg::Prefill), A::Finish]),
        ],
    );
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(BOOTSTRAP_NO_ABORT), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            // E1.4: an engine without aborts
            (E::ClientGone, &[]),
            (E::FirstToken, &[A::Cancel(Leg::Prefill), A::Cancel(Leg::Decode), A::Finish]),
        ],
    );
}

#[test]
fn e1_client_gone_while_routing_frees_everything() {
    // E1.1
    check(Shape::Aggregated, 2, &[(E::ClientGone, &[A::Finish])]);
    check(Shape::Remote, 2, &[(E::ClientGone, &[A::Finish])]);
    check(
        Shape::Remote,
        2,
        &[(E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]), (E::ClientGone, &[A::Finish])],
    );
}

#[test]
fn e3_a_failure_of_one_leg_of_a_pair_cancels_the_other_at_once() {
    let pair: &[(Event, &[Action])] = &[
        (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
    ];
    let (mut prefill, mut decode) = (pair.to_vec(), pair.to_vec());
    prefill.push((
        E::Failed(Leg::Prefill, FATAL),
        &[
            A::Cancel(Leg::Prefill),
            A::Abort(Leg::Decode),
            A::Cancel(Leg::Decode),
            A::Fail(Leg::Prefill),
            A::Finish,
        ],
    ));
    decode.push((
        E::Failed(Leg::Decode, FATAL),
        &[
            A::Cancel(Leg::Decode),
            A::Abort(Leg::Prefill),
            A::Cancel(Leg::Prefill),
            A::Fail(Leg::Decode),
            A::Finish,
        ],
    ));
    check(Shape::Remote, 2, &prefill);
    check(Shape::Remote, 2, &decode);
}

#[test]
fn e5_another_decode_worker_may_take_a_handoff_only_if_nothing_was_sent() {
    let before: &[(Event, &[Action])] = &[
        (E::PrefillRouted(COMPLETED), &[A::Reserve]),
        (E::Reserved, &[A::Send(Leg::Prefill)]),
        (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Decode)]),
    ];
    let (mut unsent, mut sent) = (before.to_vec(), before.to_vec());
    unsent.push((E::Failed(Leg::Decode, RETRYABLE_UNSENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]));
    sent.push((E::Failed(Leg::Decode, RETRYABLE_SENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Prefill)]));
    // E5.2
    check(Shape::Remote, 1, &unsent);
    // E5.3
    check(Shape::Remote, 1, &sent);
    // Nothing was done twice: it costs no retry.
    // I2.5
    check(Shape::Remote, 0, &unsent);
}

#[test]
fn retries_end_with_the_budget_and_with_the_first_byte() {
    check(
        Shape::Aggregated,
        1,
        &[
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::Failed(Leg::Decode, RETRYABLE_SENT),
                &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)],
            ),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::Failed(Leg::Decode, RETRYABLE_SENT),
                // I2.3
                &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish],
            ),
        ],
    );
    check(
        Shape::Aggregated,
        5,
        &[
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::Head, &[A::Relay]),
            (
                E::Failed(Leg::Decode, RETRYABLE_SENT),
                // I2.2
                &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish],
            ),
        ],
    );
}

#[test]
fn i2_a_stream_without_an_event_is_retried_as_before_its_head() {
    let died = || E::Failed(Leg::Decode, BROKE);
    let begun = || {
        let (mut legs, _) =
            Legs::new(Shape::Aggregated, RetryPolicy { retries: 2, ..RetryPolicy::default() });
        for event in [E::Routed, E::Head] {
            legs.on(event);
        }
        legs
    };
    let mut legs = begun();
    legs.begin_again();
    // I2.2
    assert_eq!(legs.on(died()).to_vec(), [A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]);
    let mut legs = begun();
    legs.on(E::FirstToken);
    legs.begin_again();
    assert!(legs.on(died()).contains(&A::Fail(Leg::Aggregated)));
}

#[test]
fn a_request_on_which_two_engines_broke_is_not_sent_to_a_third() {
    check(
        Shape::Aggregated,
        9,
        &[
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::Failed(Leg::Decode, BROKE), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]),
            // Engines that refuse it, or were not reached, do not count.
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::Failed(Leg::Decode, RETRYABLE_SENT),
                &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)],
            ),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::Failed(Leg::Decode, RETRYABLE_UNSENT),
                &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)],
            ),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::Failed(Leg::Decode, BROKE),
                &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish],
            ),
        ],
    );
    // Both legs count, and the local fallback would be a third engine.
    let terms = RetryPolicy { local_fallback: true, retries: 9, ..RetryPolicy::default() };
    let (mut legs, _) = Legs::new(Shape::Remote, terms);
    legs.on(E::PrefillRouted(COMPLETED));
    legs.on(E::Reserved);
    assert_eq!(
        legs.on(E::Failed(Leg::Prefill, BROKE))[..],
        [A::Cancel(Leg::Prefill), A::Route(Leg::Prefill)]
    );
    legs.on(E::PrefillRouted(COMPLETED));
    legs.on(E::Reserved);
    assert_eq!(
        legs.on(E::Failed(Leg::Prefill, BROKE))[..],
        [A::Cancel(Leg::Prefill), A::Fail(Leg::Prefill), A::Finish]
    );
}

#[test]
fn d5_decode_first_routes_decode_then_prefill_and_sends_prefill_alone() {
    let (mut legs, first) = Legs::new(Shape::Remote, DECODE_FIRST);
    // D5.1
    assert_eq!(first[..], [A::Route(Leg::Decode)]);
    assert_eq!(legs.on(E::Routed)[..], [A::Route(Leg::Prefill)]);
    assert_eq!(legs.on(E::PrefillRouted(COMPLETED))[..], [A::Send(Leg::Prefill)]);
    assert_eq!(legs.on(E::PrefillHandoff)[..], [A::Send(Leg::Decode)]);
    // E5: a decode worker that could not be reached is replaced, with the same handoff.
    assert_eq!(
        legs.on(E::Failed(Leg::Decode, RETRYABLE_UNSENT))[..],
        [A::Cancel(Leg::Decode), A::Route(Leg::Decode)]
    );
    assert_eq!(legs.on(E::Routed)[..], [A::Send(Leg::Decode)]);
}

#[test]
fn d5_decode_first_with_a_bootstrap_sends_both_together() {
    let (mut legs, _) = Legs::new(Shape::Remote, DECODE_FIRST);
    assert_eq!(legs.on(E::Routed)[..], [A::Route(Leg::Prefill)]);
    assert_eq!(legs.on(E::PrefillRouted(BOOTSTRAP))[..], [A::Send(Leg::Prefill), A::Send(Leg::Decode)]);
}

#[test]
fn b6_a_failed_prefill_becomes_a_local_one_only_with_the_operator_s_word() {
    let retry_policy = RetryPolicy { local_fallback: true, ..RetryPolicy::default() };
    let (mut legs, _) = Legs::new(Shape::Remote, retry_policy);
    legs.on(E::PrefillRouted(COMPLETED));
    legs.on(E::Reserved);
    let actions = legs.on(E::Failed(Leg::Prefill, FATAL));
    assert_eq!(actions[..], [A::Cancel(Leg::Prefill), A::FallBackToLocal, A::Route(Leg::Aggregated)]);
    // B6.2, E5.3
    assert_eq!(legs.on(E::Routed)[..], [A::Send(Leg::Aggregated)]);
    let (mut strict, _) = Legs::new(Shape::Remote, RetryPolicy::default());
    strict.on(E::PrefillRouted(COMPLETED));
    strict.on(E::Reserved);
    let actions = strict.on(E::Failed(Leg::Prefill, FATAL));
    assert_eq!(actions[..], [A::Cancel(Leg::Prefill), A::Fail(Leg::Prefill), A::Finish]);
}

#[test]
fn e6_a_decode_leg_that_broke_becomes_a_local_prefill_when_the_retries_are_used_up() {
    let retry_policy = RetryPolicy { local_fallback: true, ..RetryPolicy::default() };
    let local = [A::Cancel(Leg::Decode), A::FallBackToLocal, A::Route(Leg::Aggregated)];
    let refused = [A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Finish];
    // E6.13
    for (failed, expected) in [(BROKE, &local[..]), (FATAL, &refused)] {
        let (mut legs, _) = Legs::new(Shape::Remote, retry_policy);
        for event in [E::PrefillRouted(COMPLETED), E::Reserved, E::PrefillHandoff, E::Routed] {
            legs.on(event);
        }
        assert_eq!(legs.on(E::Failed(Leg::Decode, failed))[..], *expected);
    }
}

#[test]
fn b6_a_retry_that_finds_no_prefill_worker_becomes_a_local_prefill() {
    for event in [E::NoPrefill, E::Unroutable] {
        for order in [LegOrder::PrefillFirst, LegOrder::DecodeFirst] {
            let retry_policy = RetryPolicy { order, retries: 2, local_fallback: true, continuations: 0 };
            let (mut legs, _) = Legs::new(Shape::Remote, retry_policy);
            legs.on(E::Routed);
            legs.on(E::PrefillRouted(COMPLETED));
            legs.on(E::Reserved);
            let again = legs.on(E::Failed(Leg::Prefill, BROKE));
            if order == LegOrder::DecodeFirst {
                // The decode worker was booked: its place is free for the next attempt.
                let decode = Leg::Decode;
                assert_eq!(again[..], [A::Cancel(Leg::Prefill), A::Cancel(decode), A::Route(decode)]);
                assert_eq!(legs.on(E::Routed)[..], [A::Route(Leg::Prefill)]);
                let local = [A::Cancel(decode), A::FallBackToLocal, A::Route(Leg::Aggregated)];
                assert_eq!(legs.on(event)[..], local);
            } else {
                assert_eq!(again[..], [A::Cancel(Leg::Prefill), A::Route(Leg::Prefill)]);
                // B6.2
                assert_eq!(legs.on(event)[..], [A::FallBackToLocal, A::Route(Leg::Aggregated)], "{event:?}");
            }
        }
    }
    // A pool that is only busy did not fail.
    let retry_policy = RetryPolicy { retries: 2, local_fallback: true, ..RetryPolicy::default() };
    let (mut legs, _) = Legs::new(Shape::Remote, retry_policy);
    assert_eq!(legs.on(E::Unroutable)[..], [A::Fail(Leg::Prefill), A::Finish]);
}

#[test]
fn an_addressed_handoff_routes_both_and_sends_decode_when_prefill_ended() {
    let steps: &[(Event, &[Action])] = &[
        (E::PrefillRouted(ADDRESSED), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill)]),
        (E::PrefillEnded, &[A::Send(Leg::Decode)]),
        // Prefill pushed to this decode worker: another one would wait for ever.
        (
            E::Failed(Leg::Decode, RETRYABLE_UNSENT),
            &[A::Cancel(Leg::Decode), A::Lose(Lost::NoDecodeWorker), A::Route(Leg::Prefill)],
        ),
    ];
    check(Shape::Remote, 1, steps);
}

#[test]
fn e1_a_client_that_leaves_an_addressed_prefill_has_its_handoff_consumed() {
    let steps: &[(Event, &[Action])] = &[
        (E::PrefillRouted(ADDRESSED), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill)]),
        (E::ClientGone, &[]),
        (E::PrefillEnded, &[A::SendToConsume]),
        (E::FirstToken, &[A::Cancel(Leg::Decode), A::Finish]),
    ];
    check(Shape::Remote, 1, steps);
}

#[test]
fn e6_prefill_is_sent_only_when_decode_has_a_place() {
    check(
        Shape::Remote,
        2,
        &[
            // E6.1
            (E::PrefillRouted(COMPLETED), &[A::Reserve]),
            (E::Unroutable, &[A::Fail(Leg::Decode), A::Finish]),
        ],
    );
    check(Shape::Remote, 2, &[(E::PrefillRouted(COMPLETED), &[A::Reserve]), (E::ClientGone, &[A::Finish])]);
}

#[test]
fn c7b_a_prefill_that_pinned_nothing_is_followed_by_a_decode_that_nobody_has_to_await() {
    let begin: [(Event, &[Action]); 2] =
        [(E::PrefillRouted(COMPLETED), &[A::Reserve]), (E::Reserved, &[A::Send(Leg::Prefill)])];
    let nothing: (Event, &[Action]) = (E::PrefillEnded, &[A::Route(Leg::Decode)]);
    let steps = |more: &[(Event, &'static [Action])]| [&begin[..], more].concat();
    // C7b.3
    let fails =
        (E::Failed(Leg::Decode, RETRYABLE_UNSENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Prefill)][..]);
    check(Shape::Remote, 1, &steps(&[nothing, (E::Routed, &[A::Send(Leg::Decode)]), fails]));
    check(Shape::Remote, 1, &steps(&[nothing, (E::ClientGone, &[A::Finish])]));
    check(Shape::Remote, 1, &steps(&[(E::ClientGone, &[]), (E::PrefillEnded, &[A::Finish])]));
}

/// Steps to a completed handoff that decode has to consume.
const HANDED_OVER: [(Event, &[Action]); 3] = [
    (E::PrefillRouted(COMPLETED), &[A::Reserve]),
    (E::Reserved, &[A::Send(Leg::Prefill)]),
    (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
];

#[test]
fn e6_a_handoff_that_the_client_s_terms_exclude_is_consumed_elsewhere() {
    let mut steps = HANDED_OVER.to_vec();
    steps.extend([
        // E6.5
        (E::Unroutable, &[A::Fail(Leg::Decode), A::Route(Leg::Decode)][..]),
        (E::Routed, &[A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    check(Shape::Remote, 2, &steps);
}

#[test]
fn e6_a_request_that_decode_refuses_is_consumed_with_one_token() {
    let mut steps = HANDED_OVER.to_vec();
    steps.extend([
        (E::Routed, &[A::Send(Leg::Decode)][..]),
        // E6.6
        (E::Failed(Leg::Decode, REFUSED), &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::SendToConsume]),
    ]);
    let (mut taken, mut refused) = (steps.clone(), steps);
    taken.push((E::Ended, &[A::Finish]));
    check(Shape::Remote, 2, &taken);
    refused.extend([
        // E6.6: one that refuses even one token leaves it to another one
        (E::Failed(Leg::Decode, REFUSED), &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)][..]),
        (E::Routed, &[A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    check(Shape::Remote, 2, &refused);
}

#[test]
fn e6_a_request_that_decode_refuses_within_its_answer_is_consumed_with_one_token() {
    let mut sent = HANDED_OVER.to_vec();
    sent.push((E::Routed, &[A::Send(Leg::Decode)]));
    let refuses: &[Action] = &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::SendToConsume];
    let begins: &[(Event, &[Action])] = &[(E::Head, &[A::Relay])];
    for begun in [&[], begins] {
        // E6.16
        let end = [(E::Failed(Leg::Decode, REFUSED), refuses), (E::Ended, &[A::Finish])];
        check(Shape::Remote, 2, &[&sent[..], begun, &end].concat());
        // The refused answer began, and this one did not: another worker consumes the handoff.
        let goes_on: &[Action] = &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)];
        let end = [end[0], (E::Failed(Leg::Decode, RETRYABLE_UNSENT), goes_on)];
        check(Shape::Remote, 2, &[&sent[..], begun, &end].concat());
    }
}

#[test]
fn e6_a_bootstrap_handoff_whose_prefill_ended_and_cannot_be_aborted_is_settled() {
    let ended: [(Event, &[Action]); 3] = [
        (E::PrefillRouted(BOOTSTRAP_NO_ABORT), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
        (E::PrefillEnded, &[]),
    ];
    let after = |then: &[(Event, &[Action])]| {
        check(Shape::Remote, 0, &[&ended[..], then].concat());
    };
    let moves: &[Action] = &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)];
    // E5.2
    after(&[
        (E::Failed(Leg::Decode, RETRYABLE_UNSENT), moves),
        (E::Routed, &[A::Send(Leg::Decode)]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
        (E::Ended, &[A::Finish]),
    ]);
    // E6.6
    after(&[
        (E::Failed(Leg::Decode, REFUSED), &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    after(&[
        (E::ClientGone, &[]),
        (E::Failed(Leg::Decode, RETRYABLE_UNSENT), moves),
        (E::Routed, &[A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    // E6.7
    after(&[
        (E::Failed(Leg::Decode, RETRYABLE_UNSENT), moves),
        (
            E::HandoffLost(Lost::NoDecodeWorker),
            &[A::Lose(Lost::NoDecodeWorker), A::Fail(Leg::Decode), A::Finish],
        ),
    ]);
    // E5.2, E6.16: it refuses within an answer
    after(&[
        (E::Head, &[A::Relay]),
        (
            E::Failed(Leg::Decode, OVERLOADED),
            &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Route(Leg::Decode)],
        ),
        (E::Routed, &[A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    // E5.1: an engine that began with it has it
    after(&[(E::Failed(Leg::Decode, BROKE), &[A::Cancel(Leg::Decode), A::Fail(Leg::Decode), A::Finish])]);
}

#[test]
fn e6_a_handoff_is_lost_only_with_its_engine_or_without_a_decode_worker() {
    let mut died = HANDED_OVER.to_vec();
    // E6.7
    died.push((E::HandoffLost(Lost::PrefillDied), &[A::Lose(Lost::PrefillDied), A::Route(Leg::Prefill)]));
    check(Shape::Remote, 1, &died);
    let mut alone = HANDED_OVER.to_vec();
    let lost: &[Action] = &[A::Lose(Lost::NoDecodeWorker), A::Fail(Leg::Decode), A::Finish];
    alone.push((E::HandoffLost(Lost::NoDecodeWorker), lost));
    check(Shape::Remote, 1, &alone);
}

#[test]
fn e4_the_deadline_drains_a_prefill_in_flight_and_consumes_its_handoff() {
    let sent: &[(Event, &[Action])] =
        &[(E::PrefillRouted(COMPLETED), &[A::Reserve]), (E::Reserved, &[A::Send(Leg::Prefill)])];
    let mut drained = sent.to_vec();
    drained.extend([
        // E4.2
        (E::Deadline, &[A::FailDeadline][..]),
        (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::SendToConsume]),
        (E::Ended, &[A::Finish]),
    ]);
    check(Shape::Remote, 2, &drained);
    let mut late = sent.to_vec();
    late.extend([
        (E::Deadline, &[A::FailDeadline][..]),
        // E4.3
        (E::Deadline, &[A::Cancel(Leg::Prefill), A::Finish]),
    ]);
    check(Shape::Remote, 2, &late);
    let cancellable = PrefillTraits { cancellable: true, ..COMPLETED };
    check(
        Shape::Remote,
        2,
        &[
            (E::PrefillRouted(cancellable), &[A::Reserve]),
            (E::Reserved, &[A::Send(Leg::Prefill)]),
            // E4.1
            (E::Deadline, &[A::Cancel(Leg::Prefill), A::FailDeadline, A::Finish]),
        ],
    );
    let (mut answers, _) = Legs::new(Shape::Remote, RetryPolicy::default());
    answers.on(E::PrefillRouted(cancellable));
    answers.on(E::Reserved);
    answers.note_prefill_answers();
    for (event, expected) in &drained[2..] {
        // E4.2
        assert_eq!(answers.on(*event)[..], **expected, "{event:?}");
    }
}

/// A request whose stream may be continued, and what it did for each event.
fn continued(shape: Shape, continuations: u32, steps: &[(Event, &[Action])]) {
    let policy = RetryPolicy { retries: 1, continuations, ..RetryPolicy::default() };
    let (mut legs, _) = Legs::new(shape, policy);
    for (place, (event, expected)) in steps.iter().enumerate() {
        assert_eq!(legs.on(*event)[..], **expected, "step {place}: {event:?}");
    }
}

#[test]
fn i14_a_stream_is_continued_as_often_as_the_policy_says_and_only_after_its_first_token() {
    let single = Leg::Aggregated;
    let fails = E::Failed(single, Failed { broke: false, ..DIED });
    let begins: &[(Event, &[Action])] = &[(E::Routed, &[A::Send(single)]), (E::Head, &[A::Relay])];
    let before_token: &[(Event, &[Action])] = &[(fails, &[A::Cancel(single), A::Fail(single), A::Finish])];
    // I14.1
    continued(Shape::Aggregated, 9, &[begins, before_token].concat());
    let rest: &[(Event, &[Action])] = &[
        (E::FirstToken, &[]),
        (fails, &[A::Cancel(single), A::Continue, A::Route(single)]),
        (E::Routed, &[A::Send(single)]),
        // The head was passed on before.
        (E::Head, &[]),
        (E::FirstToken, &[]),
        // I14.3
        (fails, &[A::Cancel(single), A::Fail(single), A::Finish]),
    ];
    continued(Shape::Aggregated, 1, &[begins, rest].concat());
    let held: &[(Event, &[Action])] =
        &[(E::FirstToken, &[]), (fails, &[A::Cancel(single), A::Fail(single), A::Finish])];
    continued(Shape::Aggregated, 0, &[begins, held].concat());
}

#[test]
fn i14_the_legs_of_a_continuation_are_retried_until_a_token_of_them_came() {
    let single = Leg::Aggregated;
    continued(
        Shape::Aggregated,
        1,
        &[
            (E::Routed, &[A::Send(single)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            (E::Failed(single, DIED), &[A::Cancel(single), A::Continue, A::Route(single)]),
            (E::Routed, &[A::Send(single)]),
            // I14.4
            (E::Failed(single, RETRYABLE_UNSENT), &[A::Cancel(single), A::Route(single)]),
            (E::Routed, &[A::Send(single)]),
            (E::Failed(single, RETRYABLE_UNSENT), &[A::Cancel(single), A::Fail(single), A::Finish]),
        ],
    );
}

#[test]
fn i14_both_legs_of_a_pair_end_before_they_are_routed_anew() {
    continued(
        Shape::Remote,
        1,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            (
                E::Failed(Leg::Decode, DIED),
                // I14.7
                &[
                    A::Abort(Leg::Decode),
                    A::Cancel(Leg::Decode),
                    A::Abort(Leg::Prefill),
                    A::Cancel(Leg::Prefill),
                    A::Continue,
                    A::Route(Leg::Prefill),
                ],
            ),
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            // I14.3: two engines broke on the request
            (
                E::Failed(Leg::Decode, DIED),
                &[
                    A::Cancel(Leg::Decode),
                    A::Abort(Leg::Prefill),
                    A::Cancel(Leg::Prefill),
                    A::Fail(Leg::Decode),
                    A::Finish,
                ],
            ),
        ],
    );
}

#[test]
fn i15_a_stream_leaves_a_worker_that_drains_twice_and_can_still_be_continued() {
    let single = Leg::Aggregated;
    let rest: &[(Event, &[Action])] =
        &[(E::Routed, &[A::Send(single)]), (E::Head, &[]), (E::Move, &[]), (E::FirstToken, &[])];
    let moves: &[(Event, &[Action])] = &[(E::Move, &[A::Cancel(single), A::Continue, A::Route(single)])];
    let begins: &[(Event, &[Action])] = &[
        (E::Routed, &[A::Send(single)]),
        // I15.1
        (E::Move, &[]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
    ];
    let third: &[(Event, &[Action])] = &[
        // I15.5
        (E::Move, &[]),
    ];
    let dies: &[(Event, &[Action])] =
        &[(E::Failed(single, DIED), &[A::Cancel(single), A::Continue, A::Route(single)])];
    continued(Shape::Aggregated, 1, &[begins, moves, rest, moves, rest, third, dies].concat());
}

#[test]
fn l5_a_stream_pauses_twice_and_can_still_move_and_be_continued() {
    let single = Leg::Aggregated;
    let leaves: &[Action] = &[A::Cancel(single), A::Continue, A::Route(single)];
    let rest: &[(Event, &[Action])] =
        &[(E::Routed, &[A::Send(single)]), (E::Head, &[]), (E::Pause, &[]), (E::FirstToken, &[])];
    let begins: &[(Event, &[Action])] = &[
        (E::Routed, &[A::Send(single)]),
        // L5.1
        (E::Pause, &[]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
    ];
    let pauses: &[(Event, &[Action])] = &[(E::Pause, leaves)];
    // L5.4
    let third: &[(Event, &[Action])] = &[(E::Pause, &[])];
    // L5.6
    let moves: &[(Event, &[Action])] = &[(E::Move, leaves)];
    let dies: &[(Event, &[Action])] = &[(E::Failed(single, DIED), leaves)];
    let all = [begins, pauses, rest, pauses, rest, third, moves, rest, dies].concat();
    continued(Shape::Aggregated, 1, &all);
}

#[test]
fn i15_the_legs_of_a_stream_that_moves_are_retried_until_a_token_of_them_came() {
    let single = Leg::Aggregated;
    continued(
        Shape::Aggregated,
        0,
        &[
            (E::Routed, &[A::Send(single)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            (E::Move, &[A::Cancel(single), A::Continue, A::Route(single)]),
            (E::Routed, &[A::Send(single)]),
            (E::Head, &[]),
            // I15.8
            (E::Failed(single, BROKE), &[A::Cancel(single), A::Route(single)]),
            (E::Routed, &[A::Send(single)]),
            (E::Failed(single, BROKE), &[A::Cancel(single), A::Fail(single), A::Finish]),
        ],
    );
}

#[test]
fn i15_a_pair_leaves_when_its_prefill_ended_and_decode_is_aborted_first() {
    continued(
        Shape::Remote,
        1,
        &[
            (E::PrefillRouted(BOOTSTRAP), &[A::Route(Leg::Decode)]),
            (E::Routed, &[A::Send(Leg::Prefill), A::Send(Leg::Decode)]),
            (E::Head, &[A::Relay]),
            (E::FirstToken, &[]),
            (E::Move, &[]),
            (E::PrefillEnded, &[]),
            (
                E::Move,
                // I15.2
                &[A::Abort(Leg::Decode), A::Cancel(Leg::Decode), A::Continue, A::Route(Leg::Prefill)],
            ),
        ],
    );
}

/// Next event outside the state machine.
#[derive(Clone, Copy, Debug)]
enum Happening {
    /// Gives an event to the state machine.
    Reported(Event),
    /// No decode worker is alive any more.
    DecodeWorkersDie,
    /// The prefill engine dies after its answer.
    PrefillDies,
    /// An event without a token arrived, such as one that tells the role.
    StreamBegins,
    /// A leg fails while the client has the head of the answer, and no event.
    FailsWithoutEvent(Leg, Failed),
}

/// State outside the state machine: legs in flight, and what each may do next.
#[derive(Debug)]
struct World {
    traits: PrefillTraits,
    routing: Option<Leg>,
    reserving: bool,
    /// Whether decode has a place or a worker.
    placed: bool,
    prefill: bool,
    decode: bool,
    /// The decode request that was sent last generates one token.
    consuming: bool,
    head: bool,
    token: bool,
    finish: bool,
    relayed: bool,
    /// An event of the answer arrived, or the answer is the rest of one.
    begun: bool,
    /// The rest of an answer is generated elsewhere, and no token of it arrived; or the client has no event.
    resumes: bool,
    continuations: u32,
    moves: u32,
    pauses: u32,
    answers: u32,
    gone: bool,
    /// Decode requests that carried the present handoff and that an engine took.
    dispatched: u32,
    /// A handoff holds blocks of the prefill engine, and no decode engine took it.
    owed: bool,
    decode_lives: bool,
    prefill_lives: bool,
    /// The decode worker that alone could take the handoff, refused even one token or was not reached.
    nobody_takes: bool,
    /// Whether the time that engines get after the deadline is over.
    lease_over: bool,
    finished: bool,
    /// Engines that broke on the request.
    broken: u32,
    /// Whether the aggregated leg is for a planned worker.
    is_planned: bool,
}

impl World {
    fn new(traits: PrefillTraits) -> Self {
        Self {
            traits,
            routing: None,
            reserving: false,
            placed: false,
            prefill: false,
            decode: false,
            consuming: false,
            head: false,
            token: false,
            finish: false,
            relayed: false,
            begun: false,
            resumes: false,
            continuations: 0,
            moves: 0,
            pauses: 0,
            answers: 0,
            gone: false,
            dispatched: 0,
            owed: false,
            decode_lives: true,
            prefill_lives: true,
            nobody_takes: false,
            lease_over: false,
            finished: false,
            broken: 0,
            is_planned: false,
        }
    }

    fn perform(&mut self, action: Action) {
        assert!(!self.finished, "{action:?} after finish");
        let sends = matches!(action, A::Send(_) | A::FallBackToLocal);
        assert!(!sends || self.broken < 2, "{action:?} after two engines broke on the request");
        match action {
            A::Reserve => {
                assert!(
                    !self.prefill && !self.decode && self.routing.is_none(),
                    "a place after a leg was sent"
                );
                self.reserving = true;
            }
            A::Route(leg) => {
                // I2.2, E6.16: what is routed after the first byte only consumes the handoff.
                let consumes = leg == Leg::Decode && self.owed && (self.gone || self.answers > 0);
                let is_free = !self.relayed || self.resumes || consumes;
                assert!(is_free, "invariant 7: routed again after the first byte");
                assert_eq!(self.routing, None);
                self.routing = Some(leg);
                if leg != Leg::Decode {
                    assert!(!self.owed, "a new attempt drops a handoff");
                    (self.dispatched, self.prefill_lives, self.nobody_takes) = (0, true, false);
                }
            }
            A::Send(Leg::Prefill) => {
                assert!(!self.prefill && !self.owed);
                // E6.1
                assert!(self.placed, "prefill runs before decode has a place");
                (self.prefill, self.dispatched) = (true, 0);
            }
            A::Send(_) | A::SendToConsume => self.send_decode(action == A::SendToConsume),
            A::Cancel(Leg::Prefill) => self.prefill = false,
            A::Cancel(_) => {
                // The decode engine has had the handoff for the whole lease.
                self.owed &= !(self.decode && self.lease_over);
                self.decode = false;
            }
            A::Relay => {
                assert!(!self.relayed && !self.gone && self.answers == 0);
                self.relayed = true;
            }
            A::Fail(_) | A::FailDeadline | A::AnswerPrefill => {
                assert!(!self.gone, "an answer after the client disconnected");
                self.answers += 1;
            }
            A::Continue => {
                // I14.7
                assert!(!self.prefill && !self.decode, "the old legs run: {self:?}");
                // I14.1
                assert!(self.relayed && self.token && !self.gone && self.answers == 0, "{self:?}");
                assert!(!self.owed && self.routing.is_none());
                (self.resumes, self.begun, self.token) = (true, true, false);
                self.continuations += 1;
            }
            A::Lose(lost) => self.give_up_handoff(lost),
            A::Finish => {
                self.finished = true;
                assert!(!self.prefill && !self.decode, "invariant 8: a leg is left running");
                assert!(!self.owed, "a committed handoff was dropped");
            }
            A::Abort(_) | A::Hold | A::Release | A::FallBackToLocal => {}
        }
    }

    fn send_decode(&mut self, consuming: bool) {
        assert!(!self.decode);
        // E5.1
        assert!(self.dispatched == 0, "E5: a handoff was dispatched twice");
        assert!(consuming || !self.gone || self.prefill, "a whole answer after the client disconnected");
        assert!(!consuming || self.gone || self.answers > 0, "one token for a client that waits");
        assert!(consuming || self.answers == 0, "a whole answer after the client got its error");
        (self.decode, self.consuming) = (true, consuming);
        (self.head, self.token, self.finish) = (false, false, false);
        self.dispatched += 1;
    }

    fn give_up_handoff(&mut self, lost: Lost) {
        assert!(self.owed, "{lost:?} is counted without a handoff");
        let excused = match lost {
            Lost::NoDecodeWorker => !self.decode_lives || self.nobody_takes || self.lease_over,
            Lost::PrefillDied => !self.prefill_lives,
        };
        // E6.7
        assert!(excused, "{lost:?}: a handoff was dropped that could be consumed: {self:?}");
        self.owed = false;
    }

    /// Returns the events that are possible now.
    fn possible(&self) -> Vec<Happening> {
        let mut events = Vec::new();
        let waits = !self.gone && self.answers == 0;
        let failures = [RETRYABLE_SENT, RETRYABLE_UNSENT, FATAL, BROKE, REFUSED, REFUSED_HERE];
        if self.reserving {
            events.extend(self.decode_lives.then_some(E::Reserved));
            events.push(E::Unroutable);
        }
        match self.routing {
            Some(Leg::Prefill) => {
                events.extend([E::PrefillRouted(self.traits), E::Unroutable, E::NoPrefill]);
            }
            Some(Leg::Decode) => {
                events.extend(self.decode_lives.then_some(E::Routed));
                events.extend((waits || !self.owed).then_some(E::Unroutable));
                let lost =
                    [(Lost::NoDecodeWorker, self.decode_lives), (Lost::PrefillDied, self.prefill_lives)];
                let lost = lost.into_iter().filter(|(_, lives)| self.owed && !lives);
                events.extend(lost.map(|(lost, _)| E::HandoffLost(lost)));
            }
            Some(_) => {
                events.extend([E::Routed, E::Unroutable]);
                events.extend(self.is_planned.then_some(E::PlanRefused));
            }
            None => {}
        }
        if self.prefill {
            let kind = self.traits.handoff;
            events.extend((kind == HandoffKind::Completed).then_some(E::PrefillHandoff));
            events.push(E::PrefillEnded);
            events.extend((kind != HandoffKind::Addressed).then_some(E::PrefillWasAll));
            events.extend(failures.map(|failed| E::Failed(Leg::Prefill, failed)));
        }
        if self.decode {
            match (self.head, self.token, self.finish) {
                (false, ..) if self.consuming => events.extend([E::Ended, E::Head]),
                (false, ..) => events.push(E::Head),
                (true, false, _) => events.push(E::FirstToken),
                (true, true, false) => events.push(E::FinishSeen),
                (true, true, true) => events.push(E::Ended),
            }
            events.extend(failures.map(|failed| E::Failed(Leg::Decode, failed)));
            events.extend(self.head.then_some(E::Failed(Leg::Decode, DIED)));
        }
        if self.decode && self.token && !self.finish && !self.prefill && self.relayed && waits {
            events.extend([E::Move, E::Pause]);
        }
        if waits {
            events.push(E::ClientGone);
        }
        let mut happenings: Vec<_> = events.into_iter().map(Happening::Reported).collect();
        if self.decode && self.head && self.relayed && waits && !self.begun {
            let of = |leg| move |failed| Happening::FailsWithoutEvent(leg, failed);
            happenings.extend(failures.map(of(Leg::Decode)));
            happenings.extend(failures.map(of(Leg::Prefill)).into_iter().filter(|_| self.prefill));
            happenings.push(Happening::StreamBegins);
        }
        happenings.extend(self.decode_lives.then_some(Happening::DecodeWorkersDie));
        happenings.extend((self.prefill_lives && self.owed).then_some(Happening::PrefillDies));
        happenings
    }

    /// Changes the world. Returns the event that the driver reports.
    fn happen(&mut self, legs: &mut Legs, happening: Happening) -> Option<Event> {
        let event = match happening {
            Happening::Reported(event) => event,
            Happening::StreamBegins => {
                (self.begun, self.resumes) = (true, false);
                legs.stream_began();
                return None;
            }
            Happening::FailsWithoutEvent(leg, failed) => {
                self.resumes = true;
                legs.begin_again();
                E::Failed(leg, failed)
            }
            Happening::DecodeWorkersDie => {
                self.decode_lives = false;
                return None;
            }
            Happening::PrefillDies => {
                self.prefill_lives = false;
                return None;
            }
        };
        if let E::Failed(_, failed) = event {
            self.broken += u32::from(failed.broke);
        }
        match event {
            E::Reserved => (self.reserving, self.placed) = (false, true),
            E::PrefillRouted(_) | E::Routed | E::Unroutable | E::NoPrefill | E::HandoffLost(_) => {
                self.placed |= event == E::Routed;
                (self.routing, self.reserving) = (None, false);
            }
            E::PrefillHandoff => (self.prefill, self.owed) = (false, true),
            E::PrefillEnded => {
                self.prefill = false;
                // Its engine keeps the blocks until a decode engine that answers has taken them.
                let waits = self.traits.handoff == HandoffKind::Bootstrap && self.decode && !self.token;
                self.owed |= self.traits.handoff == HandoffKind::Addressed;
                self.owed |= waits && !self.traits.abortable;
            }
            E::PrefillWasAll | E::Failed(Leg::Prefill, _) => self.prefill = false,
            E::Head => self.head = true,
            E::FirstToken => {
                (self.token, self.owed, self.resumes, self.begun) = (true, false, false, true);
            }
            E::FinishSeen => self.finish = true,
            E::Ended => (self.decode, self.owed) = (false, false),
            E::Failed(_, failed) => {
                self.decode = false;
                if failed.began || self.token {
                    // The decode engine took the handoff, and answers for it.
                    self.owed = false;
                } else {
                    self.dispatched = 0;
                    // Prefill pushed to this worker, and to no other one.
                    let addressed = self.traits.handoff == HandoffKind::Addressed;
                    self.nobody_takes |= addressed && (self.consuming || failed.retryable || !failed.refused);
                }
            }
            E::ClientGone => self.gone = true,
            E::Move => self.moves += u32::from(self.moves < 2),
            E::Pause => self.pauses += u32::from(self.pauses < 2),
            E::PlanRefused | E::Deadline => {}
        }
        Some(event)
    }

    /// Applies an event, and performs the actions that the state machine returns.
    fn step(&mut self, legs: &mut Legs, choice: u8) -> Option<Event> {
        self.is_planned = legs.follows_plan();
        let possible = self.possible();
        assert!(!possible.is_empty(), "nothing can happen any more: {legs:?} {self:?}");
        let event = self.happen(legs, possible[choice as usize % possible.len()])?;
        self.routing = self.routing.filter(|_| event != E::PlanRefused);
        legs.on(event).into_iter().for_each(|action| self.perform(action));
        Some(event)
    }
}

fn run(shape: Shape, retry_policy: RetryPolicy, traits: PrefillTraits, choices: &[u8]) {
    run_legs(Legs::new(shape, retry_policy), shape, retry_policy, traits, choices);
}

fn run_legs(
    (mut legs, actions): (Legs, Actions),
    shape: Shape,
    retry_policy: RetryPolicy,
    traits: PrefillTraits,
    choices: &[u8],
) {
    let mut world = World::new(traits);
    actions.into_iter().for_each(|action| world.perform(action));
    let mut choices = choices.iter().copied().chain(std::iter::repeat(0));
    let mut steps = 0;
    while !world.finished {
        let running = (world.prefill, world.decode);
        let event = world.step(&mut legs, choices.next().unwrap_or(0));
        let failed = matches!(event, Some(E::Failed(..)));
        if failed
            && traits.handoff == HandoffKind::Bootstrap
            && shape == Shape::Remote
            && running != (false, false)
        {
            assert!(
                !world.prefill && (!world.decode || (world.consuming && !traits.abortable)),
                "E3: the other leg was left running"
            );
        }
        steps += 1;
        assert!(steps < 200, "no end");
    }
    assert_eq!(legs.is_finished(), world.finished);
    // I14.3
    assert!(world.continuations - world.moves - world.pauses <= retry_policy.continuations);
    let departures = world.moves + world.pauses;
    // A plan that ends and a fallback begin one attempt each, and a departure one retry.
    let most = 3 + retry_policy.retries + world.continuations + departures;
    assert!(legs.attempt() <= most, "{} attempts", legs.attempt());
    let served = world.answers + u32::from(world.relayed && world.answers == 0);
    assert!(world.gone || served == 1, "the client got {served} answers");
    assert!(legs.on(E::ClientGone).is_empty() && legs.on(E::Ended).is_empty());
}

prop_compose! {
    /// Every policy for retries, and every kind of prefill engine.
    fn policies_and_traits()(
        decode_first in any::<bool>(),
        handoff in prop_oneof![
            Just(HandoffKind::Completed),
            Just(HandoffKind::Bootstrap),
            Just(HandoffKind::Addressed),
        ],
        local_fallback in any::<bool>(),
        cancellable in any::<bool>(),
        abortable in any::<bool>(),
        retries in 0_u32..4,
        continuations in 0_u32..3,
    ) -> (RetryPolicy, PrefillTraits) {
        let order = if decode_first { LegOrder::DecodeFirst } else { LegOrder::PrefillFirst };
        let abortable = abortable && handoff == HandoffKind::Bootstrap;
        let retry_policy = RetryPolicy { order, retries, local_fallback, continuations };
        (retry_policy, PrefillTraits { handoff, cancellable, abortable })
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn invariants_7_and_8_and_e1_to_e5_hold_in_every_interleaving(
        remote in any::<bool>(),
        (retry_policy, traits) in policies_and_traits(),
        choices in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        let shape = if remote { Shape::Remote } else { Shape::Aggregated };
        run(shape, retry_policy, traits, &choices);
    }

    #[test]
    fn e6_a_handoff_between_engines_that_cannot_abort_is_settled_in_every_interleaving(
        retries in 0_u32..3,
        continuations in 0_u32..2,
        choices in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let retry_policy = RetryPolicy { retries, continuations, ..RetryPolicy::default() };
        // E6.10
        run(Shape::Remote, retry_policy, BOOTSTRAP_NO_ABORT, &choices);
    }

    #[test]
    fn the_deadline_answers_the_client_and_the_second_one_ends_the_request(
        traits in prop_oneof![
            Just(COMPLETED), Just(BOOTSTRAP), Just(ADDRESSED), Just(BOOTSTRAP_NO_ABORT),
            Just(PrefillTraits { cancellable: true, ..COMPLETED }),
        ],
        decode_first in any::<bool>(),
        before in proptest::collection::vec(any::<u8>(), 0..12),
        after in proptest::collection::vec(any::<u8>(), 0..12),
    ) {
        let order = if decode_first { LegOrder::DecodeFirst } else { LegOrder::PrefillFirst };
        let policy = RetryPolicy { order, retries: 1, continuations: 1, ..RetryPolicy::default() };
        let (mut legs, actions) = Legs::new(Shape::Remote, policy);
        let mut world = World::new(traits);
        actions.into_iter().for_each(|action| world.perform(action));
        for (is_second, choices) in [(false, before), (true, after)] {
            for choice in choices {
                if !world.finished {
                    world.step(&mut legs, choice);
                }
            }
            world.lease_over = is_second;
            legs.on(E::Deadline).into_iter().for_each(|action| world.perform(action));
            prop_assert!(world.gone || world.answers > 0 || world.relayed, "the client waits");
        }
        prop_assert!(world.finished);
    }
}
