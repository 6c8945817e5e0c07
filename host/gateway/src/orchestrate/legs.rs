//! The legs of one request as a pure state machine: events in, actions out, no I/O, no clock.
//!
//! Owns the order of the legs, what a failure of one means for the other, when a handoff is committed and consumed, and
//! what still has to happen after the client left (spec C and E). Knows neither bytes nor sockets: the driver performs
//! the actions and reports what came of them, so every interleaving can be tested without a network.
//!
//! A *single* request runs one leg. A *remote* request runs prefill and decode, tied by a handoff whose kind is known
//! once prefill is routed: *completed* (prefill first, its answer carries parameters), *bootstrap* (both together), or
//! *addressed* (both workers are named in the request id, decode is sent when prefill ended).

use pointsman_workers::Leg;

mod failures;

/// What ties the two legs of a remote request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandoffKind {
    /// Known before prefill; the legs run together.
    Bootstrap,
    /// Comes back in the prefill answer.
    Completed,
    /// Both workers are known before prefill, which pushes to decode; decode is sent when prefill ended.
    Addressed,
}

pub use crate::config::LegOrder as Order;

/// What the operator allows a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Which leg is routed first.
    pub order: Order,
    /// Further tries, all legs together.
    pub retries: u32,
    /// B6: a prefill that failed for good may be done on a worker that prefills locally, and that is told.
    pub local_fallback: bool,
}

/// What is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One leg on one worker.
    Aggregated,
    /// Prefill and decode on two.
    Remote,
}

/// What the prefill worker that was routed to is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTraits {
    /// What its handoff is.
    pub handoff: HandoffKind,
    /// E4: whether it may be cancelled in the middle of a prefill.
    pub cancellable: bool,
    /// Whether its engine aborts by request id.
    pub abortable: bool,
}

/// How a leg failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Another try elsewhere may help.
    pub retryable: bool,
    /// Some byte of the request may have reached the engine.
    pub sent: bool,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A single leg or the decode leg has its worker.
    Routed,
    /// The prefill leg has its worker.
    PrefillRouted(PrefillTraits),
    /// A leg got no worker.
    Unroutable,
    /// The prefill answer carries a complete handoff.
    PrefillHandoff,
    /// The prefill leg of a bootstrap pair ended well.
    PrefillEnded,
    /// C8: the prefill answer is the whole answer; nothing to hand off.
    PrefillWasAll,
    /// The prefill leg failed, or its answer has no usable handoff.
    PrefillFailed(Failed),
    /// The decode (or single) leg answers with a success status.
    Head,
    /// The first event with a token, or a whole body, arrived: a handoff is consumed.
    FirstToken,
    /// The first event with a finish reason arrived; it has not been passed on.
    FinishSeen,
    /// The decode (or single) leg's answer is complete.
    Ended,
    /// The decode (or single) leg failed.
    DecodeFailed(Failed),
    /// The client is gone.
    ClientGone,
    /// The request's deadline passed.
    Deadline,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Choose and book a worker for the leg.
    Route(Leg),
    /// Send the leg's request.
    Send(Leg),
    /// Send decode with one output token, only so that the handoff is consumed; nobody reads the answer.
    SendToConsume,
    /// Close the leg's connection and free its booking.
    Cancel(Leg),
    /// B6: the request goes on as a single one; say so.
    FallBackToLocal,
    /// Tell the leg's engine to abort by request id, and keep reading until it ends.
    Abort(Leg),
    /// Give the decode (or single) leg's answer to the client from here on.
    Relay,
    /// Keep back what comes from here on.
    Hold,
    /// Give what was kept back.
    Release,
    /// Answer with the prefill leg's result.
    AnswerPrefill,
    /// Answer (or end the stream) with the failure of this leg.
    Fail(Leg),
    /// Answer (or end the stream) with "deadline".
    FailDeadline,
    /// Everything is over; free what is left.
    Finish,
}

/// Actions of one step, in order.
pub type Actions = Vec<Action>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LegState {
    Idle,
    Routing,
    Routed,
    InFlight,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// Nothing went downstream.
    Waiting,
    /// The answer's head went downstream.
    Reading,
    /// An answer was given whole, or the stream was ended.
    Served,
    /// Left before it was served.
    Gone,
}

/// The machine.
#[derive(Debug)]
pub struct Legs {
    shape: Shape,
    terms: RetryPolicy,
    attempt: u32,
    traits: Option<PrefillTraits>,
    prefill: LegState,
    decode: LegState,
    client: Client,
    /// A handoff exists that somebody has to consume.
    committed: bool,
    /// A decode request that carries it is on its way; what becomes of the blocks is the engines' from here on (E5).
    dispatched: bool,
    consumed: bool,
    /// C11: a finish reason was seen and is kept back until prefill ended.
    held: bool,
    finished: bool,
}

impl Legs {
    /// A request that has sent nothing yet, and what to do first.
    #[must_use]
    pub fn new(shape: Shape, terms: RetryPolicy) -> (Self, Actions) {
        let mut legs = Self {
            shape,
            terms,
            attempt: 0,
            traits: None,
            prefill: LegState::Idle,
            decode: LegState::Idle,
            client: Client::Waiting,
            committed: false,
            dispatched: false,
            consumed: false,
            held: false,
            finished: false,
        };
        let actions = legs.start();
        (legs, actions)
    }

    /// Whether everything is over.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Whether a committed handoff was never dispatched to a consumer: ending now strands it.
    #[must_use]
    pub fn strands(&self) -> bool {
        self.committed && !self.dispatched && !self.consumed
    }

    /// Counts tries, from 1. Nothing of the handoff of one try may be met again in the next.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The leg whose answer the client sees.
    #[must_use]
    pub fn answering(&self) -> Leg {
        match self.shape {
            Shape::Aggregated => Leg::Aggregated,
            Shape::Remote => Leg::Decode,
        }
    }

    /// Takes one event. Events that come too late are ignored.
    pub fn on(&mut self, event: Event) -> Actions {
        if self.finished {
            return Actions::new();
        }
        match event {
            Event::PrefillRouted(traits) => self.prefill_routed(traits),
            Event::Routed => self.routed(),
            Event::Unroutable => self.unroutable(),
            Event::PrefillHandoff => self.handoff(),
            Event::PrefillEnded => self.prefill_ended(),
            Event::PrefillWasAll => self.prefill_was_all(),
            Event::PrefillFailed(failed) => self.prefill_failed(failed),
            Event::Head => self.head(),
            Event::FirstToken => self.first_token(),
            Event::FinishSeen => self.finish_seen(),
            Event::Ended => self.ended(),
            Event::DecodeFailed(failed) => self.decode_failed(failed),
            Event::ClientGone => self.client_gone(),
            Event::Deadline => self.deadline(),
        }
    }

    // ---- the way forward

    fn start(&mut self) -> Actions {
        self.attempt += 1;
        self.traits = None;
        self.committed = false;
        self.dispatched = false;
        self.held = false;
        self.prefill = LegState::Idle;
        self.decode = LegState::Idle;
        match (self.shape, self.terms.order) {
            (Shape::Remote, Order::PrefillFirst) => {
                self.prefill = LegState::Routing;
                vec![Action::Route(Leg::Prefill)]
            }
            _ => {
                self.decode = LegState::Routing;
                vec![Action::Route(self.answering())]
            }
        }
    }

    /// Decode is routed once prefill's *routing* is complete (spec C2), unless the handoff comes back in its answer (C7).
    fn prefill_routed(&mut self, traits: PrefillTraits) -> Actions {
        if self.prefill != LegState::Routing {
            return Actions::new();
        }
        self.traits = Some(traits);
        self.prefill = LegState::Routed;
        if self.decode == LegState::Routed {
            return self.send_first();
        }
        if traits.handoff == HandoffKind::Completed {
            self.prefill = LegState::InFlight;
            return vec![Action::Send(Leg::Prefill)];
        }
        self.decode = LegState::Routing;
        vec![Action::Route(Leg::Decode)]
    }

    fn routed(&mut self) -> Actions {
        if self.decode != LegState::Routing {
            return Actions::new();
        }
        self.decode = LegState::Routed;
        match (self.shape, self.prefill) {
            (Shape::Aggregated, _) => {
                self.decode = LegState::InFlight;
                vec![Action::Send(Leg::Aggregated)]
            }
            (Shape::Remote, LegState::Idle) => {
                self.prefill = LegState::Routing;
                vec![Action::Route(Leg::Prefill)]
            }
            (Shape::Remote, LegState::Routed) => self.send_first(),
            (Shape::Remote, _) => self.send_decode(),
        }
    }

    /// Both legs have their workers and nothing was sent.
    fn send_first(&mut self) -> Actions {
        self.prefill = LegState::InFlight;
        if self.handoff_kind() == Some(HandoffKind::Bootstrap) {
            self.decode = LegState::InFlight;
            (self.committed, self.dispatched) = (true, true);
            return vec![Action::Send(Leg::Prefill), Action::Send(Leg::Decode)];
        }
        vec![Action::Send(Leg::Prefill)]
    }

    /// A handoff is there. E1: even with the client gone decode is sent, so that the pinned blocks are pulled.
    fn send_decode(&mut self) -> Actions {
        self.decode = LegState::InFlight;
        self.dispatched = true;
        if self.client == Client::Gone {
            return vec![Action::SendToConsume];
        }
        vec![Action::Send(Leg::Decode)]
    }

    fn handoff(&mut self) -> Actions {
        if self.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.prefill = LegState::Over;
        self.committed = true;
        if self.decode == LegState::Routed {
            return self.send_decode();
        }
        self.decode = LegState::Routing;
        vec![Action::Route(Leg::Decode)]
    }

    fn prefill_ended(&mut self) -> Actions {
        if self.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.prefill = LegState::Over;
        if self.handoff_kind() == Some(HandoffKind::Addressed) {
            self.committed = true;
            return self.send_decode();
        }
        let mut actions = Actions::new();
        if self.held {
            self.held = false;
            if self.client == Client::Reading {
                actions.push(Action::Release);
            }
        }
        if self.decode == LegState::Over {
            self.complete(&mut actions);
        }
        actions
    }

    fn prefill_was_all(&mut self) -> Actions {
        if self.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.prefill = LegState::Over;
        let mut actions = Actions::new();
        if self.client == Client::Waiting {
            self.client = Client::Served;
            actions.push(Action::AnswerPrefill);
        }
        self.finish(actions)
    }

    fn head(&mut self) -> Actions {
        if self.decode != LegState::InFlight || self.client != Client::Waiting {
            return Actions::new();
        }
        self.client = Client::Reading;
        vec![Action::Relay]
    }

    fn first_token(&mut self) -> Actions {
        if self.decode != LegState::InFlight {
            return Actions::new();
        }
        self.consumed = true;
        if self.client == Client::Gone {
            return self.cancel_all();
        }
        Actions::new()
    }

    fn finish_seen(&mut self) -> Actions {
        let waits = self.decode == LegState::InFlight && self.prefill == LegState::InFlight && !self.held;
        if !waits || self.client == Client::Gone {
            return Actions::new();
        }
        self.held = true;
        if self.client == Client::Reading { vec![Action::Hold] } else { Actions::new() }
    }

    fn ended(&mut self) -> Actions {
        if self.decode != LegState::InFlight {
            return Actions::new();
        }
        self.decode = LegState::Over;
        self.consumed = true;
        let mut actions = Actions::new();
        if self.prefill == LegState::InFlight {
            // C11: a successful end waits for prefill. Nobody waits for it any more when the client is gone, but the
            // prefill leg is drained all the same.
            if self.client == Client::Reading && !self.held {
                self.held = true;
                actions.push(Action::Hold);
            }
            return actions;
        }
        self.complete(&mut actions);
        actions
    }

    /// Both legs are over and well.
    fn complete(&mut self, actions: &mut Actions) {
        if self.client == Client::Waiting {
            actions.push(Action::Relay);
        }
        if self.client != Client::Gone {
            self.client = Client::Served;
        }
        self.finished = true;
        actions.push(Action::Finish);
    }

    fn finish(&mut self, mut actions: Actions) -> Actions {
        self.finished = true;
        actions.push(Action::Finish);
        actions
    }

    fn handoff_kind(&self) -> Option<HandoffKind> {
        self.traits.map(|traits| traits.handoff)
    }
}

#[cfg(test)]
mod tests;
