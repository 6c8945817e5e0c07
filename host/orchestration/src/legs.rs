//! The legs of one request as a pure state machine: events in, actions out, no I/O, no clock.
//!
//! It decides the order of the legs, what a failure of one leg means for the other, when a handoff is
//! committed and consumed, and what still has to run after the client left [C, E]. It knows no bytes and no
//! sockets. The driver performs the actions and reports the events, so tests reach every interleaving without
//! a network.
//!
//! An *aggregated* request runs one leg. A *remote* request runs prefill and decode, tied by a handoff:
//!
//! | handoff | prefill | decode |
//! | --- | --- | --- |
//! | completed | first, once decode has a place; its answer carries parameters | sent with the parameters |
//! | bootstrap | together with decode | together with prefill |
//! | addressed | first; the request id names both workers | sent when prefill ended |
//!
//! A *local plan* is an aggregated request for one worker. Without that worker it is a remote one.

use pointsman_workers::{Leg, PerLeg};
use smallvec::smallvec;

mod ending;
mod failures;
mod local_plan;
mod moves;
mod types;

pub use types::{
    Action, Actions, Event, Failed, HandoffKind, LegOrder, Lost, PrefillTraits, RetryPolicy, Shape,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum LegState {
    #[default]
    Idle,
    /// A place is being reserved for the decode leg.
    Reserving,
    Routing,
    Routed,
    InFlight,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    /// No byte was sent downstream.
    Waiting,
    /// The head of the answer was sent downstream.
    Reading,
    /// The whole answer was sent, or the stream was ended.
    Served,
    /// The client left before the answer was complete.
    Gone,
}

/// State of a request's legs.
#[derive(Debug)]
pub struct Legs {
    shape: Shape,
    policy: RetryPolicy,
    attempt: u32,
    traits: Option<PrefillTraits>,
    state: PerLeg<LegState>,
    client: Client,
    /// A handoff exists that a decode leg has to consume.
    committed: bool,
    /// A decode request with the handoff was sent; from then on the engines own the blocks (E5).
    dispatched: bool,
    consumed: bool,
    /// The decode leg that runs only consumes the handoff.
    consuming: bool,
    /// The deadline passed, and engines still need work.
    overdue: bool,
    /// A finish reason was seen and is held back until prefill ended (C11).
    held: bool,
    finished: bool,
    /// Whether a prefill leg of this request failed.
    prefill_failed: bool,
    /// Number of engines that broke while they handled this request.
    broken: u32,
    /// The legs are to generate the rest of an answer, and have not sent a token of it.
    resumes: bool,
    /// How often the stream left a worker that drains.
    moves: u32,
    /// How often the stream paused.
    pauses: u32,
    /// Whether the one leg is for the worker that a local plan names.
    follows_plan: bool,
    /// Whether a pair may take the request over from that worker.
    has_pair: bool,
    /// Whether the engine of an aggregated leg can abort by request id.
    aggregated_aborts: bool,
}

/// Engines that may break on a request: a request that kills its engine must not visit every worker.
const MAX_BROKEN: u32 = 2;

impl Legs {
    /// Returns a request that has sent nothing yet, and its first actions.
    #[must_use]
    pub fn new(shape: Shape, policy: RetryPolicy) -> (Self, Actions) {
        let mut legs = Self {
            shape,
            policy,
            attempt: 0,
            traits: None,
            state: PerLeg::default(),
            client: Client::Waiting,
            committed: false,
            dispatched: false,
            consumed: false,
            consuming: false,
            overdue: false,
            held: false,
            finished: false,
            prefill_failed: false,
            broken: 0,
            resumes: false,
            moves: 0,
            pauses: 0,
            follows_plan: false,
            has_pair: false,
            aggregated_aborts: false,
        };
        let actions = legs.start();
        (legs, actions)
    }

    /// Returns whether no leg runs any more.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Returns whether a committed handoff has to be sent to a decode worker: ending now would strand it.
    #[must_use]
    pub fn owes(&self) -> bool {
        self.committed && !self.dispatched && !self.consumed && !self.ends_with_its_pair()
    }

    /// Returns whether a place for decode is being reserved.
    #[must_use]
    pub fn reserves(&self) -> bool {
        self.state.answering == LegState::Reserving
    }

    /// Returns whether no client waits for the answer, so that decode is sent only to consume the handoff.
    #[must_use]
    pub fn only_consumes(&self) -> bool {
        matches!(self.client, Client::Gone | Client::Served)
    }

    /// Number of the current attempt, from 1. An attempt uses nothing of the handoff of an earlier one.
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

    /// Notes whether the engine that was chosen for an aggregated leg can abort by request id.
    pub fn note_abortable(&mut self, abortable: bool) {
        self.aggregated_aborts = abortable;
    }

    /// Notes that the prefill engine has begun to answer: it is past its work, and is not cancelled any more.
    pub fn note_prefill_answers(&mut self) {
        if let Some(traits) = &mut self.traits {
            traits.cancellable = false;
        }
    }

    /// Takes one event and returns the actions that follow. Events that arrive too late are ignored.
    pub fn on(&mut self, event: Event) -> Actions {
        if self.finished {
            return Actions::new();
        }
        match event {
            Event::PrefillRouted(traits) => self.prefill_routed(traits),
            Event::Reserved => self.reserved(),
            Event::Routed => self.after_decode_routed(),
            Event::Unroutable => self.unroutable(),
            Event::PlanRefused => self.plan_refused(),
            Event::HandoffLost(lost) => self.handoff_lost(lost),
            Event::NoPrefill => self.no_prefill(),
            Event::PrefillHandoff => self.handoff(),
            Event::PrefillEnded if self.is_completed() => self.nothing_handed_over(),
            Event::PrefillEnded => self.prefill_ended(),
            Event::PrefillWasAll => self.prefill_was_all(),
            Event::Failed(Leg::Prefill, failed) => self.prefill_failed(failed),
            Event::Head => self.head(),
            Event::FirstToken => self.first_token(),
            Event::FinishSeen => self.finish_seen(),
            Event::Ended => self.ended(),
            Event::Failed(_, failed) => self.decode_failed(failed),
            Event::Move => self.move_stream(),
            Event::Pause => self.pause_stream(),
            Event::ClientGone => self.client_gone(),
            Event::Deadline => self.deadline(),
        }
    }

    fn start(&mut self) -> Actions {
        self.attempt += 1;
        self.traits = None;
        self.committed = false;
        self.dispatched = false;
        self.consuming = false;
        self.held = false;
        self.state = PerLeg::default();
        let first = self.first_leg();
        self.state[first] = LegState::Routing;
        smallvec![Action::Route(first)]
    }

    /// Routes decode as soon as prefill is *routed* (C2), unless the prefill answer carries the handoff (C7):
    /// then decode's place is reserved (E6).
    fn prefill_routed(&mut self, traits: PrefillTraits) -> Actions {
        if self.state.prefill != LegState::Routing {
            return Actions::new();
        }
        self.traits = Some(traits);
        self.state.prefill = LegState::Routed;
        if self.state.answering == LegState::Routed {
            return self.send_first();
        }
        if self.is_completed() {
            self.state.answering = LegState::Reserving;
            return smallvec![Action::Reserve];
        }
        self.state.answering = LegState::Routing;
        smallvec![Action::Route(Leg::Decode)]
    }

    fn reserved(&mut self) -> Actions {
        if self.state.answering != LegState::Reserving {
            return Actions::new();
        }
        self.state.answering = LegState::Idle;
        self.send_first()
    }

    fn after_decode_routed(&mut self) -> Actions {
        if self.state.answering != LegState::Routing {
            return Actions::new();
        }
        self.state.answering = LegState::Routed;
        match (self.shape, self.state.prefill) {
            (Shape::Aggregated, _) => {
                self.state.answering = LegState::InFlight;
                smallvec![Action::Send(Leg::Aggregated)]
            }
            (Shape::Remote, LegState::Idle) => {
                self.state.prefill = LegState::Routing;
                smallvec![Action::Route(Leg::Prefill)]
            }
            (Shape::Remote, LegState::Routed) => self.send_first(),
            (Shape::Remote, _) => self.send_decode(),
        }
    }

    /// Sends the first leg or both: all workers are known and nothing was sent.
    fn send_first(&mut self) -> Actions {
        self.state.prefill = LegState::InFlight;
        if self.handoff_kind() == Some(HandoffKind::Bootstrap) {
            self.state.answering = LegState::InFlight;
            (self.committed, self.dispatched) = (true, true);
            return smallvec![Action::Send(Leg::Prefill), Action::Send(Leg::Decode)];
        }
        smallvec![Action::Send(Leg::Prefill)]
    }

    /// Sends decode with the handoff, even after the client left: only decode frees the blocks that prefill
    /// pinned (E1).
    fn send_decode(&mut self) -> Actions {
        self.state.answering = LegState::InFlight;
        self.dispatched = true;
        self.consuming = self.only_consumes();
        if self.consuming { smallvec![Action::SendToConsume] } else { smallvec![Action::Send(Leg::Decode)] }
    }

    fn handoff(&mut self) -> Actions {
        if self.state.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.state.prefill = LegState::Over;
        self.committed = true;
        if self.state.answering == LegState::Routed {
            return self.send_decode();
        }
        self.state.answering = LegState::Routing;
        smallvec![Action::Route(Leg::Decode)]
    }

    fn prefill_ended(&mut self) -> Actions {
        if self.state.prefill != LegState::InFlight {
            return Actions::new();
        }
        self.state.prefill = LegState::Over;
        if self.handoff_kind() == Some(HandoffKind::Addressed) {
            self.committed = true;
            return self.send_decode();
        }
        if self.other_leg_is_in_vain() {
            return self.cancel_all();
        }
        let mut actions = Actions::new();
        if self.held {
            self.held = false;
            if self.client == Client::Reading {
                actions.push(Action::Release);
            }
        }
        if self.state.answering == LegState::Over {
            self.complete(&mut actions);
        }
        actions
    }

    /// Ends a decode that was sent together with prefill, unless it answers: it waits for blocks in vain.
    fn prefill_was_all(&mut self) -> Actions {
        let answers = self.client == Client::Reading && !self.nothing_is_sent();
        // Such a prefill kept no blocks.
        self.committed &= self.state.prefill != LegState::InFlight || self.is_completed();
        if answers || self.state.prefill != LegState::InFlight || self.state.answering == LegState::Over {
            return self.prefill_ended();
        }
        self.state.prefill = LegState::Over;
        let mut actions = self.stop(Leg::Decode);
        if self.nothing_is_sent() {
            self.client = Client::Served;
            actions.push(Action::AnswerPrefill);
        }
        self.finish(actions)
    }

    fn head(&mut self) -> Actions {
        if self.state.answering != LegState::InFlight || self.client != Client::Waiting {
            return Actions::new();
        }
        self.client = Client::Reading;
        smallvec![Action::Relay]
    }

    fn first_token(&mut self) -> Actions {
        if self.state.answering != LegState::InFlight {
            return Actions::new();
        }
        (self.consumed, self.resumes) = (true, false);
        if self.only_consumes() {
            return self.cancel_all();
        }
        Actions::new()
    }

    fn handoff_kind(&self) -> Option<HandoffKind> {
        self.traits.map(|traits| traits.handoff)
    }
}

#[cfg(test)]
mod tests;
