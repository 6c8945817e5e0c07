//! Runs the engines: steps, tokens, transfers of KV, and leases.

use pointsman_orchestration::{Event as LegEvent, HandoffKind};
use pointsman_sim::core::{PromptKv, Sequence, Token};
use pointsman_workers::Leg;
use prefix_index::events::Batch;
use tokio::time::Duration;

use super::{
    Event, Lab,
    flight::{self, Held, Part},
    health::Fault,
};
use crate::engines::{self, RANK};

/// Longest step, seconds. It keeps time finite if a formula returns an absurd value.
const MAX_STEP_S: f64 = 86_400.0;

/// Returns the duration of a step. It is never zero, even if a formula says so.
pub(crate) fn step_duration(milliseconds: f64) -> Duration {
    Duration::from_secs_f64((milliseconds / 1e3).clamp(1e-9, MAX_STEP_S))
}

impl Lab<'_> {
    /// Sends a sequence to an engine.
    pub(super) fn submit(&mut self, number: usize, place: usize, tag: u64) {
        let (Some(request), Some(flight)) = (self.trace.requests.get(number), self.flights.get(&number))
        else {
            return;
        };
        let part = flight::part_of(tag);
        let sequence = Sequence {
            tag,
            prompt: flight.chain.clone(),
            isl: request.input_tokens,
            osl: if part == Part::Prefill { 1 } else { request.output_tokens },
            kv: if part == Part::Decode { self.fleet.routing.decode_kv() } else { PromptKv::Computed },
            keeps_blocks: part == Part::Prefill,
        };
        let overhead = self.engines.get(place).map_or(Duration::ZERO, |engine| engine.request_overhead);
        if overhead.is_zero() {
            self.enqueue(place, sequence);
        } else {
            self.plan(self.now + overhead, Event::Queued(place, Box::new(sequence)));
        }
    }

    /// Gives a sequence to the scheduler of its engine, unless it was cancelled before.
    pub(super) fn enqueue(&mut self, place: usize, sequence: Sequence) {
        let tag = sequence.tag;
        let Some(flight) = self.flights.get(&flight::request_of(tag)) else { return };
        let run = &flight.runs[flight::part_of(tag).leg()];
        if !run.as_ref().is_some_and(|run| run.tag == Some(tag) && run.engine == place) {
            return;
        }
        if let Some(engine) = self.engines.get_mut(place) {
            engine.core.submit(sequence);
        }
        self.start_step(place);
    }

    /// Starts an engine's next step, if it is idle and has work.
    pub(super) fn start_step(&mut self, place: usize) {
        let Some(engine) = self.engines.get_mut(place) else { return };
        let step = engine.core.begin_step();
        let admitted = engine.core.take_admitted();
        if let Some(milliseconds) = step {
            let ends = self.now + step_duration(milliseconds);
            engine.step_ends = Some(ends);
            let incarnation = engine.incarnation;
            self.plan(ends, Event::StepEnd(place, incarnation));
        }
        for (tag, cached) in admitted {
            if flight::part_of(tag) == Part::Decode {
                if self.fleet.routing.pulls() {
                    self.transfer(tag, cached);
                }
            } else if let Some(flight) = self.flights.get_mut(&flight::request_of(tag)) {
                flight.cached = cached;
            }
        }
    }

    pub(super) fn end_step(&mut self, place: usize, incarnation: u32) {
        let Some(engine) = self.engines.get_mut(place) else { return };
        if engine.incarnation != incarnation {
            return;
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        engine.step_ends = None;
        engine.core.end_step(&mut tokens);
        let changes = engine.core.take_changes();
        if self.fleet.kv_events && !changes.is_empty() {
            let batch = engines::events(changes, self.trace, self.fleet.block_tokens, flight::request_of);
            let delay = Duration::from_secs_f64(self.fleet.kv_event_delay_ms / 1e3);
            if delay.is_zero() {
                self.apply_events(place, incarnation, batch);
            } else {
                self.plan(self.now + delay, Event::KvEvents(place, incarnation, Box::new(batch)));
            }
        }
        for token in &tokens {
            self.token(place, token);
        }
        self.tokens = tokens;
        self.start_step(place);
    }

    /// Applies the KV events of an engine. Events from before an outage are lost.
    pub(super) fn apply_events(&self, place: usize, incarnation: u32, batch: Batch) {
        let Some(engine) = self.engines.get(place) else { return };
        if engine.incarnation == incarnation {
            let (first, others) = self.gateways.split();
            for gateway in others {
                let _ = gateway.router.index().events(engines::id(place), RANK, batch.clone());
            }
            // A synchronous index has no queue that could be full.
            let _ = first.router.index().events(engines::id(place), RANK, batch);
        }
    }

    /// Handles a token of an engine: updates bookings and figures, and ends legs.
    fn token(&mut self, place: usize, token: &Token) {
        let number = flight::request_of(token.tag);
        let part = flight::part_of(token.tag);
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let answering = flight.legs.answering();
        let run = &mut flight.runs[part.leg()];
        let Some(run) = run.as_mut().filter(|run| run.tag == Some(token.tag) && run.engine == place) else {
            return;
        };
        if part == Part::Prefill {
            return self.prefill_done(number);
        }
        run.keep_record();
        if let Some(booking) = &mut run.booking {
            if token.number == 1 {
                booking.first_token(self.now - run.sent, part == Part::Whole);
            }
            booking.output_tokens(token.number);
        }
        let first = *flight.first_token.get_or_insert(self.now);
        flight.last_token = (self.now, token.number);
        if token.last {
            run.tag = None;
            let programs = &self.gateways.of(number).programs;
            programs.answered(&mut flight.request, &run.candidate, token.number);
            run.candidate.load().observe_outcome(true);
            run.candidate.worker.note_outcome(true);
            if token.number > 1 {
                run.candidate.load().observe_itl((self.now - first) / (token.number - 1));
            }
        }
        if token.number == 1 {
            self.report(number, LegEvent::Head);
            self.report(number, LegEvent::FirstToken);
            self.bind(number, answering);
        }
        if token.last {
            self.report(number, LegEvent::Ended);
        }
        if token.number == 1 || token.last {
            self.perform(number);
        }
    }

    /// Binds the session to the worker that a leg reached.
    fn bind(&mut self, number: usize, leg: Leg) {
        if let Some(flight) = self.flights.get_mut(&number) {
            flight.bind_session(&self.gateways.of(number).sessions, leg, self.fleet.routing.session_affinity);
        }
    }

    /// Releases a leg's booking and wakes the queue.
    pub(super) fn free(&mut self, number: usize, leg: Leg) {
        let run = self.flights.get_mut(&number).and_then(|flight| flight.runs[leg].as_mut());
        if run.and_then(|run| run.booking.take()).is_some() {
            self.gateways.of(number).queue.wake();
        }
    }

    fn prefill_done(&mut self, number: usize) {
        let lease = Duration::from_secs_f64(self.fleet.links.lease_s);
        let handoff = self.fleet.routing.handoff;
        let Some(flight) = self.flights.get_mut(&number) else { return };
        let decode_waits = flight.runs.answering.as_ref().is_some_and(|decode| decode.tag.is_some());
        let Some(run) = flight.runs.prefill.as_mut() else { return };
        let Some(tag) = run.tag.take() else { return };
        run.keep_record();
        if let Some(booking) = &mut run.booking {
            booking.first_token(self.now - run.sent, true);
        }
        run.candidate.load().observe_outcome(true);
        run.candidate.worker.note_outcome(true);
        flight.held = Some(Held { engine: run.engine, tag, until: self.now + lease, lost: false });
        if handoff == HandoffKind::Completed {
            flight.attempts.commit(lease);
        }
        self.free(number, Leg::Prefill);
        self.bind(number, Leg::Prefill);
        if decode_waits {
            self.hand_over(number);
        }
        let event = match handoff {
            HandoffKind::Completed => LegEvent::PrefillHandoff,
            HandoffKind::Bootstrap | HandoffKind::Addressed => LegEvent::PrefillEnded,
        };
        self.report(number, event);
        self.perform(number);
    }

    /// Gives a finished prefill to its decode engine: one that pulls allocates blocks before the transfer,
    /// another one after it.
    pub(super) fn hand_over(&mut self, number: usize) {
        let decode = self.flights.get(&number).and_then(|flight| flight.runs.answering.as_ref());
        let Some((tag, place)) = decode.and_then(|decode| Some((decode.tag?, decode.engine))) else { return };
        if self.fleet.routing.pulls() {
            self.submit(number, place, tag);
        } else {
            self.transfer(tag, 0);
        }
    }

    /// Sends the KV of a finished prefill over its engine's link, after the earlier transfers. The decode
    /// engine holds the blocks of the first `cached` tokens.
    fn transfer(&mut self, tag: u64, cached: u32) {
        let number = flight::request_of(tag);
        let (Some(request), Some(flight)) = (self.trace.requests.get(number), self.flights.get(&number))
        else {
            return;
        };
        let Some(held) = flight.held.filter(|_| flight.decodes(tag)) else { return };
        let Some(engine) = self.engines.get_mut(held.engine) else { return };
        let start = engine.link_free.max(self.now);
        engine.link_free = start + self.fleet.transfer(request.input_tokens, cached);
        let at = engine.link_free;
        self.plan(at, Event::Transferred(tag));
    }

    /// Handles the arrival of KV: the prefill engine releases its blocks, and the decode engine starts.
    pub(super) fn transferred(&mut self, tag: u64) {
        let number = flight::request_of(tag);
        let Some(flight) = self.flights.get_mut(&number).filter(|flight| flight.decodes(tag)) else { return };
        let held = flight.held.take();
        let Some(place) = flight.runs.answering.as_ref().map(|decode| decode.engine) else { return };
        match held {
            Some(held) if !held.lost => self.release(held),
            _ => {
                self.drop_sequence(place, tag);
                self.leg_failed(number, Leg::Decode, Fault::Status);
                return self.perform(number);
            }
        }
        if !self.fleet.routing.pulls() {
            return self.submit(number, place, tag);
        }
        if let Some(engine) = self.engines.get_mut(place) {
            engine.core.receive(tag, false);
        }
        self.start_step(place);
    }

    /// Removes a sequence from an engine, whose blocks another one may wait for.
    pub(super) fn drop_sequence(&mut self, place: usize, tag: u64) {
        if let Some(engine) = self.engines.get_mut(place) {
            engine.core.leave(tag);
        }
        self.start_step(place);
    }

    fn release(&mut self, held: Held) {
        if let Some(engine) = self.engines.get_mut(held.engine) {
            engine.core.unpin(held.tag);
        }
        self.start_step(held.engine);
    }

    /// Records a handoff that no decode engine reads. Its blocks stay in use until the lease ends.
    pub(super) fn strand(&mut self, held: Held) {
        if !held.lost {
            self.stranded += 1;
            let at = held.until.max(self.now);
            self.plan(at, Event::LeaseEnd(held.engine, held.tag));
        }
    }

    pub(super) fn lease_ended(&mut self, place: usize, tag: u64) {
        if let Some(engine) = self.engines.get_mut(place) {
            engine.core.unpin(tag);
        }
        self.start_step(place);
    }
}
