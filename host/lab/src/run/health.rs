//! Outages of engines, and how routing notices them: failed legs, health checks and load figures.

use pointsman_orchestration::{Event as LegEvent, Failed};
use pointsman_sim::core::BatchEngine;
use pointsman_workers::{
    EngineLoad, Leg,
    probe::{MAX_LOAD_FAILURES, MIN_REQUESTED_GAP},
};
use tokio::time::{Duration, Instant};

use super::{Event, Lab};
use crate::{
    engines::{self, RANK},
    outcome::Ended,
};

/// Maximum number of samples of the imbalance in a result.
const MAX_SAMPLES: usize = 2_000;

/// Way in which an engine fails a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It refuses the connection.
    Connect,
    /// It closes the connection while it handles the request.
    Broken,
    /// It answers with a status 5xx.
    Status,
}

impl Fault {
    /// Returns the kind of the failure, as the gateway classifies the failed call.
    fn failed(self) -> Failed {
        let began = self != Self::Connect;
        Failed { retryable: true, refused: false, began, broke: began, continuable: false }
    }
}

/// The imbalance of load over time.
#[derive(Debug, Default)]
pub(super) struct Imbalance {
    sum: f64,
    count: u64,
    /// Only every sample with a number divisible by this is kept.
    every: u64,
    kept: Vec<(Duration, f64)>,
}

impl Imbalance {
    fn add(&mut self, at: Duration, value: f64) {
        self.every = self.every.max(1);
        if self.count.is_multiple_of(self.every) {
            self.kept.push((at, value));
        }
        self.sum += value;
        self.count += 1;
        if self.kept.len() >= MAX_SAMPLES {
            let mut place = 0_usize;
            self.kept.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            self.every *= 2;
        }
    }

    /// Returns the mean, and samples over time.
    #[expect(clippy::cast_precision_loss, reason = "numbers of samples stay far below 2^53")]
    pub(super) fn finish(self) -> (f64, Vec<(Duration, f64)>) {
        (if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }, self.kept)
    }
}

impl Lab<'_> {
    /// Plans the outages that the fleet file lists.
    pub(super) fn plan_outages(&mut self) {
        for outage in &self.fleet.outages {
            let engine = outage.engine as usize;
            let from = Duration::from_secs_f64(outage.from_s);
            self.plan(from, Event::Leaves(engine));
            self.plan(from + Duration::from_secs_f64(outage.for_s), Event::Returns(engine));
        }
    }

    pub(super) fn is_away(&self, place: usize) -> bool {
        self.engines.get(place).is_some_and(|engine| engine.outages > 0)
    }

    /// Begins an outage: the engine's requests break, and its cache is lost.
    pub(super) fn leave(&mut self, place: usize) {
        let Some(engine) = self.engines.get_mut(place) else { return };
        engine.outages += 1;
        if engine.outages > 1 {
            return;
        }
        engine.incarnation += 1;
        let counts = engine.core.counts();
        self.preemptions += counts.preemptions;
        self.steps += counts.steps;
        engine.core = BatchEngine::new(engine.limits, engine.step_time);
        engine.step_ends = None;
        if self.fleet.kv_events {
            for gateway in self.gateways.iter() {
                gateway.router.index().forget(engines::id(place), RANK);
                gateway.router.index().set_live(engines::id(place), RANK, false);
            }
        }
        // The next check comes at the next multiple of the interval.
        let interval = self.fleet.probe.interval;
        let past = u64::try_from(self.now.as_nanos() % interval.as_nanos().max(1)).unwrap_or(0);
        self.plan_check(place, self.now + interval - Duration::from_nanos(past));
        self.break_legs(place);
    }

    /// Fails the legs that run on an engine, by the number of their request.
    fn break_legs(&mut self, place: usize) {
        let mut broken: Vec<(usize, Option<Leg>)> = Vec::new();
        for (number, flight) in &mut self.flights {
            if let Some(held) = flight.held.as_mut().filter(|held| held.engine == place) {
                held.lost = true;
            }
            let runs = |run: &Option<super::flight::LegRun>| {
                run.as_ref().is_some_and(|run| run.engine == place && run.tag.is_some())
            };
            if runs(&flight.runs.prefill) {
                broken.push((*number, Some(Leg::Prefill)));
            } else if runs(&flight.runs.answering) {
                broken.push((*number, None));
            }
        }
        broken.sort_unstable_by_key(|(number, _)| *number);
        for (number, leg) in broken {
            let answering = || self.flights.get(&number).map(|flight| flight.legs.answering());
            if let Some(leg) = leg.or_else(answering) {
                self.leg_failed(number, leg, Fault::Broken);
                self.perform(number);
            }
        }
    }

    /// Ends an outage: the engine is back with an empty cache. Routing notices it at the next health check.
    pub(super) fn come_back(&mut self, place: usize) {
        if let Some(engine) = self.engines.get_mut(place) {
            engine.outages = engine.outages.saturating_sub(1);
        }
    }

    /// Handles the failure of a leg as the gateway does: records it for the worker, excludes the worker from
    /// further attempts, and ends the booking.
    pub(super) fn leg_failed(&mut self, number: usize, leg: Leg, fault: Fault) {
        let Some(flight) = self.flights.get_mut(&number) else { return };
        flight.cause.get_or_insert(Ended::Failed);
        let Some(run) = flight.runs[leg].as_mut() else { return };
        (run.tag, run.record) = (None, None);
        let (place, candidate) = (run.engine, run.candidate.clone());
        candidate.load().observe_outcome(false);
        candidate.worker.note_outcome(false);
        flight.attempts.note_failure(Some((candidate.worker.id(), RANK)));
        match fault {
            Fault::Connect => candidate.worker.note_connect_failed(),
            Fault::Broken => candidate.worker.note_restart(),
            Fault::Status => {}
        }
        if fault != Fault::Status {
            self.request_check(place);
        }
        if leg != Leg::Prefill {
            self.free(number, leg);
        }
        self.note_failed_plan(number, leg);
        self.report(number, LegEvent::Failed(leg, fault.failed()));
    }

    /// Plans the health check that a failed request causes.
    fn request_check(&mut self, place: usize) {
        let Some(engine) = self.engines.get(place) else { return };
        let gap = MIN_REQUESTED_GAP.min(self.fleet.probe.interval);
        let at = engine.last_check.map_or(self.now, |last| (last + gap).max(self.now));
        self.plan_check(place, at);
    }

    /// Plans a health check, unless an earlier one is planned.
    fn plan_check(&mut self, place: usize, at: Duration) {
        let Some(engine) = self.engines.get_mut(place) else { return };
        if engine.next_check.is_none_or(|next| next > at) {
            engine.next_check = Some(at);
            self.plan(at, Event::Check(place));
        }
    }

    /// Checks the health of an engine that was away. Other engines would pass.
    pub(super) fn check(&mut self, place: usize) {
        let Some(engine) = self.engines.get_mut(place) else { return };
        if engine.next_check != Some(self.now) {
            return;
        }
        (engine.last_check, engine.next_check) = (Some(self.now), None);
        if engine.outages == 0 {
            engine.load_failures = 0;
            for watched in self.gateways.watched(place) {
                watched.checks.passed(&watched.worker);
            }
            for gateway in self.gateways.iter().filter(|_| self.fleet.kv_events) {
                gateway.router.index().set_live(engines::id(place), RANK, true);
            }
            return;
        }
        for watched in self.gateways.watched(place) {
            watched.checks.requested(&watched.worker);
            watched.checks.failed(&watched.worker);
        }
        self.plan_check(place, self.now + self.fleet.probe.interval);
    }

    /// Reports the load figures of all engines to routing, as readings of `age` ago.
    #[expect(clippy::cast_precision_loss, reason = "numbers of requests stay far below 2^53")]
    pub(super) fn read_loads(&mut self, age: Duration) {
        let (mut most, mut all) = (0, 0);
        for (place, engine) in self.engines.iter_mut().enumerate() {
            if engine.outages > 0 {
                engine.load_failures += 1;
                if engine.load_failures >= MAX_LOAD_FAILURES {
                    self.gateways.watched(place).for_each(|watched| watched.worker.set_engine_load(None));
                }
                continue;
            }
            let (running, waiting) = engine.core.sequences();
            most = most.max(running + waiting);
            all += u64::from(running + waiting);
            let kv_usage = engine.core.kv_usage() as f32;
            let load = EngineLoad {
                running: Some(running),
                waiting: Some(waiting),
                kv_usage: Some(kv_usage),
                read_at: Instant::now() - age,
            };
            self.gateways.watched(place).for_each(|watched| watched.worker.set_engine_load(Some(load)));
        }
        if all > 0 {
            let value = f64::from(most) * self.engines.len() as f64 / all as f64;
            self.imbalance.add(self.now.saturating_sub(age), value);
        }
    }
}
