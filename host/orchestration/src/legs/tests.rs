use proptest::prelude::*;

use super::*;

const COMPLETED: PrefillTraits =
    PrefillTraits { handoff: HandoffKind::Completed, cancellable: false, abortable: false };
const BOOTSTRAP: PrefillTraits =
    PrefillTraits { handoff: HandoffKind::Bootstrap, cancellable: false, abortable: true };
const ADDRESSED: PrefillTraits = PrefillTraits { handoff: HandoffKind::Addressed, ..COMPLETED };
const BOOTSTRAP_NO_ABORT: PrefillTraits = PrefillTraits { abortable: false, ..BOOTSTRAP };
const DECODE_FIRST: RetryPolicy =
    RetryPolicy { order: LegOrder::DecodeFirst, retries: 1, local_fallback: false };
const RETRYABLE_SENT: Failed = Failed { retryable: true, refused: false, sent: true, broke: false };
const RETRYABLE_UNSENT: Failed = Failed { retryable: true, refused: false, sent: false, broke: false };
const BROKE: Failed = Failed { retryable: true, refused: false, sent: true, broke: true };
const FATAL: Failed = Failed { retryable: false, refused: false, sent: true, broke: false };

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
fn c7_completed_handoff_sends_decode_after_prefill_answered() {
    let steps: &[(Event, &[Action])] = &[
        (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
        // C7.1
        (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Decode)]),
        (E::Head, &[A::Relay]),
        (E::FirstToken, &[]),
        (E::FinishSeen, &[]),
        (E::Ended, &[A::Finish]),
    ];
    assert!(!check(Shape::Remote, 2, steps).strands());
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
            (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
            (E::PrefillWasAll, &[A::AnswerPrefill, A::Finish]),
        ],
    );
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
                E::PrefillFailed(RETRYABLE_SENT),
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
            (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
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
            (E::PrefillRouted(traits), &[A::Send(Leg::Prefill)]),
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
            (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
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
            (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
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
            (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
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
            (E::PrefillEnded, &[]),
            (E::Ended, &[A::Finish]),
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
        E::PrefillFailed(FATAL),
        &[
            A::Cancel(Leg::Prefill),
            A::Abort(Leg::Decode),
            A::Cancel(Leg::Decode),
            A::Fail(Leg::Prefill),
            A::Finish,
        ],
    ));
    decode.push((
        E::DecodeFailed(FATAL),
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
        (E::PrefillRouted(COMPLETED), &[A::Send(Leg::Prefill)]),
        (E::PrefillHandoff, &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Decode)]),
    ];
    let (mut unsent, mut sent) = (before.to_vec(), before.to_vec());
    unsent.push((E::DecodeFailed(RETRYABLE_UNSENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Decode)]));
    sent.push((E::DecodeFailed(RETRYABLE_SENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Prefill)]));
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
            (E::DecodeFailed(RETRYABLE_SENT), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (
                E::DecodeFailed(RETRYABLE_SENT),
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
                E::DecodeFailed(RETRYABLE_SENT),
                // I2.2
                &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish],
            ),
        ],
    );
}

#[test]
fn a_request_on_which_two_engines_broke_is_not_sent_to_a_third() {
    check(
        Shape::Aggregated,
        9,
        &[
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::DecodeFailed(BROKE), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]),
            // Engines that refuse it, or were not reached, do not count.
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::DecodeFailed(RETRYABLE_SENT), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::DecodeFailed(RETRYABLE_UNSENT), &[A::Cancel(Leg::Aggregated), A::Route(Leg::Aggregated)]),
            (E::Routed, &[A::Send(Leg::Aggregated)]),
            (E::DecodeFailed(BROKE), &[A::Cancel(Leg::Aggregated), A::Fail(Leg::Aggregated), A::Finish]),
        ],
    );
    // Both legs count, and the local fallback would be a third engine.
    let terms = RetryPolicy { local_fallback: true, retries: 9, ..RetryPolicy::default() };
    let (mut legs, _) = Legs::new(Shape::Remote, terms);
    legs.on(E::PrefillRouted(COMPLETED));
    assert_eq!(legs.on(E::PrefillFailed(BROKE))[..], [A::Cancel(Leg::Prefill), A::Route(Leg::Prefill)]);
    legs.on(E::PrefillRouted(COMPLETED));
    assert_eq!(
        legs.on(E::PrefillFailed(BROKE))[..],
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
        legs.on(E::DecodeFailed(RETRYABLE_UNSENT))[..],
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
    let actions = legs.on(E::PrefillFailed(FATAL));
    assert_eq!(actions[..], [A::Cancel(Leg::Prefill), A::FallBackToLocal, A::Route(Leg::Aggregated)]);
    // B6.2, E5.3
    assert_eq!(legs.on(E::Routed)[..], [A::Send(Leg::Aggregated)]);
    let (mut strict, _) = Legs::new(Shape::Remote, RetryPolicy::default());
    strict.on(E::PrefillRouted(COMPLETED));
    let actions = strict.on(E::PrefillFailed(FATAL));
    assert_eq!(actions[..], [A::Cancel(Leg::Prefill), A::Fail(Leg::Prefill), A::Finish]);
}

#[test]
fn an_addressed_handoff_routes_both_and_sends_decode_when_prefill_ended() {
    let steps: &[(Event, &[Action])] = &[
        (E::PrefillRouted(ADDRESSED), &[A::Route(Leg::Decode)]),
        (E::Routed, &[A::Send(Leg::Prefill)]),
        (E::PrefillEnded, &[A::Send(Leg::Decode)]),
        // Prefill pushed to this decode worker: another one would wait for ever.
        (E::DecodeFailed(RETRYABLE_UNSENT), &[A::Cancel(Leg::Decode), A::Route(Leg::Prefill)]),
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

/// What the world outside the machine holds: legs in flight, and what each may do next.
#[derive(Debug, Default)]
struct World {
    routing: Option<Leg>,
    prefill: bool,
    decode: bool,
    head: bool,
    token: bool,
    finish: bool,
    relayed: bool,
    answers: u32,
    gone: bool,
    /// Decode requests that carried the present handoff and reached an engine.
    dispatched: u32,
    /// A completed handoff that exists and was neither consumed nor lost to a failure of decode.
    owed: bool,
    finished: bool,
    /// Engines that broke on the request.
    broken: u32,
}

impl World {
    fn perform(&mut self, action: Action) {
        assert!(!self.finished, "{action:?} after finish");
        let sends = matches!(action, A::Send(_) | A::SendToConsume | A::FallBackToLocal);
        assert!(!sends || self.broken < 2, "{action:?} after two engines broke on the request");
        match action {
            A::Route(leg) => {
                // I2.2
                assert!(!self.relayed, "invariant 7: routed again after the first byte");
                assert_eq!(self.routing, None);
                self.routing = Some(leg);
                if leg != Leg::Decode {
                    self.dispatched = 0;
                    self.owed = false;
                }
            }
            A::Send(Leg::Prefill) => {
                assert!(!self.prefill);
                self.prefill = true;
                // A new prefill is a new handoff.
                (self.dispatched, self.owed) = (0, false);
            }
            A::Send(_) | A::SendToConsume => {
                assert!(!self.decode);
                // E5.1
                assert!(self.dispatched == 0, "E5: a handoff was dispatched twice");
                assert!(
                    action == A::SendToConsume || !self.gone || self.prefill,
                    "a whole answer after the client disconnected"
                );
                (self.decode, self.head, self.token, self.finish) = (true, false, false, false);
                self.dispatched += 1;
            }
            A::Cancel(Leg::Prefill) => self.prefill = false,
            A::Cancel(_) => self.decode = false,
            A::Relay => {
                assert!(!self.relayed && !self.gone && self.answers == 0);
                self.relayed = true;
            }
            A::Fail(_) | A::FailDeadline | A::AnswerPrefill => {
                assert!(!self.gone, "an answer after the client disconnected");
                self.answers += 1;
            }
            A::Finish => {
                self.finished = true;
                assert!(!self.prefill && !self.decode, "invariant 8: a leg is left running");
            }
            A::Abort(_) | A::Hold | A::Release | A::FallBackToLocal => {}
        }
    }

    /// Events that the world may bring forth now.
    fn possible(&self, traits: PrefillTraits) -> Vec<Event> {
        let mut events = Vec::new();
        let failures = [RETRYABLE_SENT, RETRYABLE_UNSENT, FATAL, BROKE];
        match self.routing {
            Some(Leg::Prefill) => events.extend([E::PrefillRouted(traits), E::Unroutable]),
            Some(_) => events.extend([E::Routed, E::Unroutable]),
            None => {}
        }
        if self.prefill {
            if traits.handoff == HandoffKind::Completed {
                events.extend([E::PrefillHandoff, E::PrefillWasAll]);
            } else {
                events.push(E::PrefillEnded);
            }
            events.extend(failures.map(E::PrefillFailed));
        }
        if self.decode {
            match (self.head, self.token, self.finish) {
                (false, ..) => events.push(E::Head),
                (true, false, _) => events.push(E::FirstToken),
                (true, true, false) => events.push(E::FinishSeen),
                (true, true, true) => events.push(E::Ended),
            }
            let sent = if self.head { vec![RETRYABLE_SENT, FATAL, BROKE] } else { failures.to_vec() };
            events.extend(sent.into_iter().map(E::DecodeFailed));
        }
        if !self.gone && self.answers == 0 {
            events.push(E::ClientGone);
        }
        events
    }

    fn happen(&mut self, event: Event, traits: PrefillTraits) {
        if let E::PrefillFailed(failed) | E::DecodeFailed(failed) = event {
            self.broken += u32::from(failed.broke);
        }
        match event {
            E::PrefillRouted(_) | E::Routed | E::Unroutable => {
                if event == E::Unroutable {
                    self.owed = false;
                }
                self.routing = None;
            }
            E::PrefillHandoff => (self.prefill, self.owed) = (false, true),
            E::PrefillEnded => {
                self.prefill = false;
                self.owed |= traits.handoff == HandoffKind::Addressed;
            }
            E::PrefillWasAll | E::PrefillFailed(_) => self.prefill = false,
            E::Head => self.head = true,
            E::FirstToken => (self.token, self.owed) = (true, false),
            E::FinishSeen => self.finish = true,
            E::Ended => self.decode = false,
            E::DecodeFailed(failed) => {
                self.decode = false;
                if !failed.sent && traits.handoff == HandoffKind::Completed {
                    self.dispatched = 0;
                }
                // A failed decode is not a handoff that was dropped.
                self.owed = false;
            }
            E::ClientGone => self.gone = true,
            E::Deadline => {}
        }
    }
}

fn run(shape: Shape, retry_policy: RetryPolicy, traits: PrefillTraits, choices: &[u8]) {
    let (mut legs, actions) = Legs::new(shape, retry_policy);
    let mut world = World::default();
    actions.into_iter().for_each(|action| world.perform(action));
    let mut choices = choices.iter().copied().chain(std::iter::repeat(0));
    let mut steps = 0;
    while !world.finished {
        let possible = world.possible(traits);
        assert!(
            !possible.is_empty(),
            "nothing can happen any more, but the request is not over: {legs:?} {world:?}"
        );
        let choice = choices.next().unwrap_or(0) as usize % possible.len();
        let event = possible[choice];
        world.happen(event, traits);
        let running = (world.prefill, world.decode);
        let actions = legs.on(event);
        actions.iter().for_each(|action| world.perform(*action));
        let failed = matches!(event, E::PrefillFailed(_) | E::DecodeFailed(_));
        if failed
            && traits.handoff == HandoffKind::Bootstrap
            && shape == Shape::Remote
            && running != (false, false)
        {
            assert!(!world.prefill && !world.decode, "E3: the other leg was left running");
        }
        steps += 1;
        assert!(steps < 200, "no end");
    }
    assert_eq!(legs.is_finished(), world.finished);
    assert!(!world.owed, "a committed handoff was dropped: {legs:?}");
    let served = world.answers + u32::from(world.relayed && world.answers == 0);
    assert!(world.gone || served == 1, "the client got {served} answers");
    assert!(legs.on(E::ClientGone).is_empty() && legs.on(E::Ended).is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn invariants_7_and_8_and_e1_to_e5_hold_in_every_interleaving(
        remote in any::<bool>(),
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
        choices in proptest::collection::vec(any::<u8>(), 0..60),
    ) {
        let shape = if remote { Shape::Remote } else { Shape::Aggregated };
        let order = if decode_first { LegOrder::DecodeFirst } else { LegOrder::PrefillFirst };
        let abortable = abortable && handoff == HandoffKind::Bootstrap;
        let retry_policy = RetryPolicy { order, retries, local_fallback };
        run(shape, retry_policy, PrefillTraits { handoff, cancellable, abortable }, &choices);
    }

    #[test]
    fn the_deadline_always_ends_it(
        traits in prop_oneof![Just(COMPLETED), Just(BOOTSTRAP), Just(ADDRESSED)],
        decode_first in any::<bool>(),
        choices in proptest::collection::vec(any::<u8>(), 0..12),
    ) {
        let order = if decode_first { LegOrder::DecodeFirst } else { LegOrder::PrefillFirst };
        let policy = RetryPolicy { order, retries: 1, ..RetryPolicy::default() };
        let (mut legs, actions) = Legs::new(Shape::Remote, policy);
        let mut world = World::default();
        actions.into_iter().for_each(|action| world.perform(action));
        for choice in choices {
            let possible = world.possible(traits);
            if world.finished || possible.is_empty() {
                break;
            }
            let event = possible[choice as usize % possible.len()];
            world.happen(event, traits);
            legs.on(event).into_iter().for_each(|action| world.perform(action));
        }
        legs.on(E::Deadline).into_iter().for_each(|action| world.perform(action));
        prop_assert!(world.finished);
    }
}
