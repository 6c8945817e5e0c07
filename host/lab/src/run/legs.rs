//! Performs the actions of a request's legs. The order of legs, retries, pauses, the queue and sessions are
//! the gateway's own (`pointsman_orchestration`), and the production router makes the decisions.

use pointsman_orchestration::{
    Action, AdmissionRequest, AfterRefusal, Attempts, Entry, Event as LegEvent, HandoffKind, Legs, Lost,
    Parking, PrefillTraits, Queued,
};
use pointsman_routing::{Purpose, Query, RouteError, Routed, RouterConfigOverride, RoutingRequest};
use pointsman_workers::{Leg, ModelName};
use rand::RngExt as _;
use tokio::time::Instant;

use super::{
    EPOCH_US, Event, Lab,
    flight::{self, Flight, LegRun, Part},
};
use crate::{
    engines::{self, RANK},
    outcome::Ended,
};

impl Lab<'_> {
    /// Plans and routes a request that arrives now.
    pub(super) fn arrive(&mut self, number: usize) {
        let Some(request) = self.trace.requests.get(number) else { return };
        let Some(prepared) = self.prepared.get(number).cloned() else { return };
        let tenant_active_requests = request.tenant_hash.map_or(0, |tenant| {
            let active = self.tenants.entry(tenant).or_insert(0);
            *active += 1;
            *active
        });
        let (ttft_target_us, itl_target_us) = request.targets.micros();
        let mut routing_request = RoutingRequest {
            prompt_tokens: request.input_tokens,
            block_size: self.fleet.block_tokens,
            prefix: prepared.prefix,
            n: 1,
            priority: request.priority,
            ttft_target_us,
            itl_target_us,
            draw: self.rng.random(),
            session_hash: prepared.session_hash,
            program: prepared.program,
            tenant_hash: request.tenant_hash,
            tenant_active_requests,
            ..RoutingRequest::default()
        };
        self.gateways.of(number).programs.fill(&mut routing_request);
        let fits = |engine: &engines::Engine| engine.core.fits(request.input_tokens, request.output_tokens);
        if !self.engines.get(self.smallest).is_some_and(fits) {
            routing_request.allowed_workers = engines::that_hold(&self.engines, request);
            if routing_request.allowed_workers.is_none() {
                return self.refuse(number, Ended::TooLarge);
            }
        }
        match self.plan_request(number, &routing_request) {
            Err(ended) => self.refuse(number, ended),
            Ok(plan) => {
                let policy = self.split.retry_policy;
                let legs = match plan.planned {
                    Some(_) => Legs::of_local_plan(policy),
                    None => Legs::new(plan.shape, policy),
                };
                let seed = self.rng_of_pauses.random();
                let mut flight = Flight::new(self.now, routing_request, prepared.chain, legs, seed);
                (flight.planned, flight.decode_override) = (plan.planned, plan.decode_override);
                flight.fell_back = plan.fell_back;
                self.flights.insert(number, flight);
                self.perform(number);
            }
        }
    }

    pub(super) fn query<'q>(
        &'q self,
        number: usize,
        request: &'q RoutingRequest,
        leg: Leg,
        seed: u64,
    ) -> Query<'q> {
        let gateway = self.gateways.of(number);
        let affinity = request.session_hash.filter(|_| !self.fleet.routing.session_affinity.is_zero());
        Query {
            session: affinity.and_then(|session| gateway.sessions.get(session, leg)),
            seed,
            now_us: self.now_us(),
            ..Query::new(&gateway.snapshot, &self.model, leg, request)
        }
    }

    /// Returns the current time as policies see it, microseconds since the Unix epoch.
    pub(super) fn now_us(&self) -> u64 {
        EPOCH_US + u64::try_from(self.now.as_micros()).unwrap_or(u64::MAX)
    }

    /// Performs the actions of a request until none is left.
    pub(super) fn perform(&mut self, number: usize) {
        while let Some(flight) = self.flights.get_mut(&number)
            && let Some(action) = flight.actions.pop_front()
        {
            match action {
                Action::Route(leg) => {
                    if flight.attempts.pause(leg) {
                        self.retries += 1;
                        self.wait(number);
                    } else {
                        self.route(number, leg, None);
                    }
                }
                Action::Reserve => self.route(number, Leg::Decode, None),
                Action::Send(Leg::Prefill) => self.send_prefill(number),
                Action::Send(_) | Action::SendToConsume => self.send_answering(number),
                Action::Cancel(leg) => self.cancel(number, leg),
                Action::FallBackToLocal => self.local_fallbacks += 1,
                Action::Fail(_) | Action::FailDeadline => flight.failed = true,
                Action::Finish => self.end(number),
                // An abort comes together with a cancellation. The other actions concern the bytes of the
                // answer. A lost handoff holds its blocks until the lease ends.
                Action::Abort(_)
                | Action::Relay
                | Action::Continue
                | Action::Hold
                | Action::Release
                | Action::AnswerPrefill
                | Action::Lose(_) => {}
            }
        }
    }

    /// Reports an event to the state machine of a request and queues the actions that follow.
    pub(super) fn report(&mut self, number: usize, event: LegEvent) {
        if let Some(flight) = self.flights.get_mut(&number) {
            flight.actions.extend(flight.legs.on(event));
        }
    }

    /// Begins to route a leg. A new attempt uses nothing of the previous one.
    fn begin(&mut self, number: usize, leg: Leg) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.hold_session(&self.gateways.of(number).sessions, leg, self.fleet.routing.session_affinity);
        if flight.attempts.begin(flight.legs.attempt()) {
            flight.place = None;
            if let Some(held) = flight.held.take() {
                self.strand(held);
            }
        }
    }

    /// Chooses and books the leg's worker. `place` is the request's place in the queue.
    pub(super) fn route(&mut self, number: usize, leg: Leg, place: Option<Queued>) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let parking = Parking {
            queue: &self.gateways.of(number).queue,
            admission_request: to_admit(&self.model, &flight.request, flight.arrived),
            timeout: self.fleet.queue.timeout,
        };
        let place = match flight.attempts.enter(leg, place, &parking) {
            Entry::Route(place) => place,
            Entry::Wait => return self.wait(number),
            Entry::Refused | Entry::LostPlace => {
                flight.cause.get_or_insert(Ended::Shed);
                return self.report(number, LegEvent::Unroutable);
            }
        };
        if leg == Leg::Decode && self.flights.get(&number).is_some_and(|flight| flight.legs.reserves()) {
            return self.reserve(number, place);
        } else if !self.plan_holds(number, leg, place.is_some()) {
            return self.plan_refused(number, place);
        }
        let drawn = self.rng.random();
        let seed = self.draws.get(&(number, leg)).copied().unwrap_or(drawn);
        self.begin(number, leg);
        let pin = self.pinned(number, leg);
        let Some(flight) = self.flights.get(&number) else { return };
        let query = Query {
            attempt: flight.attempts.earlier(),
            pin: pin.map(|worker| (worker, Some(RANK))),
            planned: flight.planned_for(leg),
            tried: flight.attempts.tried(),
            other_leg: flight.other_leg(leg),
            pairing: flight.pairing(leg),
            queue_us: u32::try_from(flight.attempts.queued().as_micros()).unwrap_or(u32::MAX),
            ..self.query(number, &flight.request, leg, seed)
        };
        let router = &self.gateways.of(number).router;
        let (over, fallback) = match leg {
            Leg::Decode => router.decode_config(&query, Purpose::Route),
            _ => (RouterConfigOverride::default(), None),
        };
        let routed = router.route(&query, &over);
        if let Some(reason) = fallback {
            *self.fallbacks.entry(reason).or_insert(0) += 1;
        }
        match routed {
            Ok(routed) => {
                if let Some(flight) = self.flights.get_mut(&number)
                    && let Some(admission) = flight.attempts.found(place.as_ref())
                {
                    flight.admission = Some(admission);
                }
                self.record_routed(number, leg, routed);
            }
            Err(error) => self.not_routed(number, leg, &error, place),
        }
    }

    /// Reserves a place for the decode leg before its prefill runs. A request whose workers are given
    /// reserves none: the arm that decides here could reserve at other workers than the run that is repeated.
    fn reserve(&mut self, number: usize, place: Option<Queued>) {
        if self.assigned.get(number).is_some() {
            return self.report(number, LegEvent::Reserved);
        }
        let Some(flight) = self.flights.get(&number) else { return };
        let query = Query {
            attempt: flight.attempts.earlier(),
            tried: flight.attempts.tried(),
            other_leg: flight.other_leg(Leg::Decode),
            ..self.query(number, &flight.request, Leg::Decode, 0)
        };
        let router = &self.gateways.of(number).router;
        match router.reserve(&query, &mut None) {
            Ok(reserved) => {
                if let Some(flight) = self.flights.get_mut(&number) {
                    flight.place = reserved;
                }
                self.report(number, LegEvent::Reserved);
            }
            Err(error) => self.not_routed(number, Leg::Decode, &error, place),
        }
    }

    fn not_routed(&mut self, number: usize, leg: Leg, error: &RouteError, place: Option<Queued>) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        if flight.planned_for(leg).is_some() {
            return self.plan_refused(number, place);
        }
        let parking = Parking {
            queue: &self.gateways.of(number).queue,
            admission_request: to_admit(&self.model, &flight.request, flight.arrived),
            timeout: self.fleet.queue.timeout,
        };
        flight.attempts.note_client(!flight.legs.only_consumes());
        match flight.attempts.after_refusal(leg, error, place, &parking) {
            AfterRefusal::Wait => self.wait(number),
            AfterRefusal::RouteAgain => self.route(number, leg, None),
            AfterRefusal::GiveUp => {
                flight.cause.get_or_insert_with(|| Ended::of_refusal(error));
                let is_lost = leg == Leg::Decode && flight.legs.owes() && flight.legs.only_consumes();
                let lost = LegEvent::HandoffLost(Lost::NoDecodeWorker);
                self.report(number, if is_lost { lost } else { Attempts::unroutable(leg, error) });
            }
        }
    }

    fn record_routed(&mut self, number: usize, leg: Leg, routed: Routed) {
        let Routed { candidate, booking, record, receipt } = routed;
        if let Some(reason) = receipt.decider.fallback() {
            *self.fallbacks.entry(reason).or_insert(0) += 1;
        }
        let handoff = self.fleet.routing.handoff;
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.fell_back |= receipt.decider.fallback().is_some();
        self.gateways.of(number).programs.routed(&mut flight.request, &candidate, receipt.cached_blocks);
        flight.receipts.push(receipt);
        let engine = engines::position(candidate.worker.id());
        let (booking, record) = (Some(booking), Some(record));
        flight.runs[leg] = Some(LegRun { engine, candidate, booking, record, tag: None, sent: self.now });
        if leg != Leg::Prefill && flight.place.take().is_some() {
            self.gateways.of(number).queue.wake();
        }
        let event = match leg {
            Leg::Prefill => LegEvent::PrefillRouted(PrefillTraits {
                handoff,
                cancellable: false,
                abortable: handoff == HandoffKind::Bootstrap,
            }),
            Leg::Decode | Leg::Aggregated => LegEvent::Routed,
        };
        self.report(number, event);
    }

    fn send_prefill(&mut self, number: usize) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let tag = flight::tag(number, flight.legs.attempt(), Part::Prefill);
        let Some(run) = flight.runs.prefill.as_mut() else { return };
        (run.sent, run.tag) = (self.now, Some(tag));
        let engine = run.engine;
        if self.is_away(engine) {
            return self.leg_failed(number, Leg::Prefill, super::health::Fault::Connect);
        }
        self.submit(number, engine, tag);
    }

    /// Sends the decode or aggregated leg. A decode leg starts when the KV has arrived.
    fn send_answering(&mut self, number: usize) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let leg = flight.legs.answering();
        let part = if leg == Leg::Decode { Part::Decode } else { Part::Whole };
        let tag = flight::tag(number, flight.legs.attempt(), part);
        let ready = flight.held.is_some();
        let Some(run) = flight.runs.answering.as_mut() else { return };
        (run.sent, run.tag) = (self.now, Some(tag));
        let engine = run.engine;
        if self.is_away(engine) {
            return self.leg_failed(number, leg, super::health::Fault::Connect);
        }
        match part {
            Part::Decode if ready => self.hand_over(number),
            Part::Decode => {}
            Part::Prefill | Part::Whole => self.submit(number, engine, tag),
        }
    }

    /// Stops a leg: its engine drops the sequence, and its booking ends.
    fn cancel(&mut self, number: usize, leg: Leg) {
        let run = self.flights.get_mut(&number).and_then(|flight| flight.runs[leg].as_mut());
        let Some(run) = run else { return };
        run.keep_record();
        if let Some(tag) = run.tag.take() {
            let place = run.engine;
            self.drop_sequence(place, tag);
        }
        self.free(number, leg);
    }

    /// Waits as the request's state requires: for a pause, or for a place in the queue.
    fn wait(&mut self, number: usize) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let Some(waiting) = flight.attempts.waiting() else { return };
        let left = waiting.latest().saturating_duration_since(tokio::time::Instant::now());
        let woken = waiting.woken().map(Box::pin);
        flight.waits += 1;
        let waits = flight.waits;
        if woken.is_some() {
            self.gateways.of(number).woken.push(number);
        }
        flight.woken = woken;
        self.plan(self.now + left, Event::Retry(number, waits));
    }

    /// Routes a request whose wait has ended.
    pub(super) fn resume(&mut self, number: usize) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        (flight.waits, flight.woken) = (flight.waits + 1, None);
        if let Some((leg, place)) = flight.attempts.resume() {
            self.route(number, leg, place);
            self.perform(number);
        }
    }
}

/// Returns the request as the queue sees it. Bodies have no size in a simulation.
fn to_admit<'a>(model: &'a ModelName, request: &'a RoutingRequest, arrived: Instant) -> AdmissionRequest<'a> {
    AdmissionRequest { model, request, pin: None, arrived, bytes: 0 }
}
