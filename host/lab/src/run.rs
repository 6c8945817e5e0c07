//! One run: an arm, a trace, a fleet and a seed, in virtual time.
//!
//! The loop takes the earliest event, moves the paused clock of the runtime to its time, and calls the router
//! and the engines. Events are ordered by time, and events of one time by the order in which they were
//! planned, so equal inputs give equal results.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
};

use pointsman_orchestration::SplitRules;
use pointsman_routing::SlotKind;
use pointsman_sim::core::Token;
use pointsman_workers::{ModelName, SpecError};
use rand::{RngExt as _, SeedableRng as _, rngs::SmallRng};
use tokio::time::Duration;

use crate::{
    arm::{Arm, ArmError},
    engines::{self, Engine, MODEL},
    fleet::{Fleet, FleetError},
    monitor::Monitor,
    outcome::{Outcome, Place},
    prepared::{Prepared, prepare},
    trace::{Order, Trace},
};

mod draws;
mod ending;
mod event;
mod exchange;
mod flight;
mod gateway;
mod health;
mod legs;
mod oracle;
mod plan;
mod serving;
mod wake;

pub use draws::{Draws, DrawsError, run_with_draws};
pub(crate) use draws::{read as read_draws, run_assigned};
use event::{Event, Planned};
pub use exchange::ExchangedMessages;
use flight::Flight;
use gateway::Gateways;
use health::Imbalance;
pub(crate) use serving::step_duration;

/// Limit of the prefix index, bytes. A simulated fleet may be large, and each gateway has an index of its
/// own.
const INDEX_BYTES: usize = 1 << 30;
/// Start of every run as policies see it, microseconds since the Unix epoch.
const EPOCH_US: u64 = 1_700_000_000_000_000;

/// How a trace is run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RunOptions {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Factor by which arrivals follow each other faster than in the trace. Pauses of clients do not change.
    pub speed: f64,
    /// Maximum random time by which an arrival is moved, for traces whose times are rounded.
    pub jitter: Duration,
    /// Whether a request that waits for an answer arrives at its time in the trace, but not before its delay
    /// after that answer has passed (open loop). Otherwise it arrives when its delay after that answer has
    /// passed (closed loop), so an arm that answers faster gets the next request earlier.
    pub fixed_schedule: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { seed: 1, speed: 1.0, jitter: Duration::ZERO, fixed_schedule: false }
    }
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunResult {
    /// One outcome for each request, in the order of the trace.
    pub outcomes: Vec<Outcome>,
    /// Virtual time from the first arrival to the last token.
    pub span: Duration,
    /// Number of preemptions, over all engines.
    pub preemptions: u64,
    /// Number of steps, over all engines.
    pub steps: u64,
    /// Mean over time of the busiest engine's requests divided by the mean of all engines; 1 is even, 0 is an
    /// idle fleet.
    pub imbalance: f64,
    /// The imbalance at up to 2,000 points in time.
    pub imbalance_over_time: Vec<(Duration, f64)>,
    /// Legs that were routed again after a failure.
    pub retries: u64,
    /// Requests that ran on one worker because remote prefill had failed.
    pub local_fallbacks: u64,
    /// Handoffs that no decode engine read, so that their blocks stayed in use until the lease ended.
    pub stranded: u64,
    /// Number of calls of policies without a usable answer, by reason: an abstention, or the kind of a
    /// failure.
    pub fallbacks: BTreeMap<&'static str, u64>,
    /// Whether the run continued without the policies, because they had exceeded their limit of CPU time too
    /// often.
    pub withdrawn: bool,
    /// Slots whose last decisions all chose the same one of several engines, with the number of these
    /// decisions.
    pub one_sided: BTreeMap<SlotKind, u64>,
    /// Messages between gateways.
    pub exchanged: ExchangedMessages,
}

/// Reason for which a run has no result.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A policy of the arm cannot be built.
    #[error(transparent)]
    Arm(#[from] ArmError),
    /// The fleet is not valid.
    #[error(transparent)]
    Fleet(#[from] FleetError),
    /// An engine cannot be described as a worker.
    #[error("engine: {0}")]
    Engine(#[from] SpecError),
    /// The runtime cannot start.
    #[error("cannot start a runtime: {0}")]
    Runtime(#[from] std::io::Error),
    /// The run was stopped.
    #[error("interrupted before the first seed was over; no report is written")]
    Interrupted,
    /// The run has requests left but no event: an error in the model.
    #[error("the simulation cannot continue: {0} requests are open and no event is left")]
    Stalled(usize),
}

/// State of a run.
struct Lab<'a> {
    trace: &'a Trace,
    fleet: &'a Fleet,
    prepared: &'a [Prepared],
    options: RunOptions,
    monitor: &'a Monitor,
    gateways: Gateways,
    model: ModelName,
    split: SplitRules,
    /// Whether the arm is the oracle.
    oracle: bool,
    engines: Vec<Engine>,
    /// Position of the engine with the fewest blocks. A request that fits there fits into every engine.
    smallest: usize,
    rng: SmallRng,
    /// Random numbers for the pauses between attempts, kept separate so that pauses change no other random
    /// number.
    rng_of_pauses: SmallRng,
    events: BinaryHeap<Reverse<Planned>>,
    /// Number of events planned so far.
    planned: u64,
    /// Current virtual time.
    now: Duration,
    /// Time to which the runtime's clock was last moved.
    clock: Duration,
    flights: HashMap<usize, Flight>,
    outcomes: Vec<Option<Outcome>>,
    /// Requests that wait for the answers to other requests.
    order: Order,
    /// Requests in flight by tenant.
    tenants: HashMap<u64, u32>,
    /// Number of requests that have not ended.
    open: usize,
    /// Whether the next reading of load figures is planned. Readings pause while no request runs, because
    /// figures do not change then.
    scraping: bool,
    /// Whether the next batches of bookings are planned.
    telling: bool,
    exchanged: ExchangedMessages,
    imbalance: Imbalance,
    preemptions: u64,
    steps: u64,
    retries: u64,
    local_fallbacks: u64,
    stranded: u64,
    fallbacks: BTreeMap<&'static str, u64>,
    timeouts: u32,
    withdrawn: bool,
    /// Buffer for the tokens of a step.
    tokens: Vec<Token>,
    /// Recorded seeds of decisions to repeat.
    draws: Draws,
    /// Engines for each request, which replace the arm's decisions; empty if the arm decides.
    assigned: &'a [Place],
}

/// Runs a trace through an arm. Blocks the thread until the run ends.
///
/// # Errors
/// [`RunError`] when the arm or the fleet is not valid.
pub fn run(arm: &Arm, trace: &Trace, fleet: &Fleet, options: RunOptions) -> Result<RunResult, RunError> {
    run_prepared(arm, trace, &prepare(trace, fleet.block_tokens), fleet, options, &Monitor::default())
}

/// Like [`run`], for a trace whose prompts are already hashed.
pub(crate) fn run_prepared(
    arm: &Arm,
    trace: &Trace,
    prepared: &[Prepared],
    fleet: &Fleet,
    options: RunOptions,
    monitor: &Monitor,
) -> Result<RunResult, RunError> {
    draws::run_one(arm, trace, prepared, fleet, options, Draws::new(), monitor)
}

impl<'a> Lab<'a> {
    fn new(
        arm: &Arm,
        trace: &'a Trace,
        prepared: &'a [Prepared],
        fleet: &'a Fleet,
        options: RunOptions,
        monitor: &'a Monitor,
    ) -> Result<Self, RunError> {
        let engines = engines::build(fleet);
        let mut lab = Self {
            trace,
            fleet,
            prepared,
            options,
            monitor,
            gateways: Gateways::new(arm, fleet, options.seed)?,
            model: ModelName::new(MODEL),
            split: fleet.routing.split_rules(),
            oracle: arm.is_oracle(),
            smallest: smallest(&engines),
            engines,
            rng: SmallRng::seed_from_u64(options.seed),
            rng_of_pauses: SmallRng::seed_from_u64(options.seed ^ 0x7061_7573_6573),
            events: BinaryHeap::new(),
            planned: 0,
            now: Duration::ZERO,
            clock: Duration::ZERO,
            flights: HashMap::new(),
            outcomes: vec![None; trace.requests.len()],
            order: Order::of(trace),
            tenants: HashMap::new(),
            open: trace.requests.len(),
            scraping: false,
            telling: false,
            exchanged: ExchangedMessages::default(),
            imbalance: Imbalance::default(),
            preemptions: 0,
            steps: 0,
            retries: 0,
            local_fallbacks: 0,
            stranded: 0,
            fallbacks: BTreeMap::new(),
            timeouts: 0,
            withdrawn: false,
            tokens: Vec::new(),
            draws: Draws::new(),
            assigned: &[],
        };
        lab.plan_arrivals();
        lab.plan_outages();
        Ok(lab)
    }

    /// Plans the arrival of every request that does not wait for an answer.
    fn plan_arrivals(&mut self) {
        for (number, request) in self.trace.requests.iter().enumerate() {
            let jitter = self.options.jitter.mul_f64(self.rng.random::<f64>());
            if !self.order.waits(number) {
                self.plan(request.at.div_f64(self.options.speed) + jitter, Event::Arrival(number));
            }
        }
    }

    fn plan(&mut self, at: Duration, event: Event) {
        self.planned += 1;
        self.events.push(Reverse(Planned { at, order: self.planned, event }));
    }

    async fn run_events(&mut self) -> Result<(), RunError> {
        while self.open > 0 {
            if self.monitor.is_stopped() {
                return Err(RunError::Interrupted);
            }
            // A reading of load figures or a batch of bookings does not let any request continue.
            if self.events.len() <= usize::from(self.scraping) + usize::from(self.telling) {
                return Err(RunError::Stalled(self.open));
            }
            let Some(Reverse(Planned { at, event, .. })) = self.events.pop() else { break };
            self.now = at;
            // The policies, bookings and load figures of production read this clock.
            if self.clock < at {
                tokio::time::advance(at - self.clock).await;
                self.clock = at;
            }
            self.handle(event);
            self.resume_woken();
            self.send_first_change();
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(number) => {
                self.withdraw_loops();
                self.resume_scraping();
                self.arrive(number);
            }
            Event::Queued(engine, sequence) => self.enqueue(engine, *sequence),
            Event::StepEnd(engine, incarnation) => self.end_step(engine, incarnation),
            Event::Transferred(tag) => self.transferred(tag),
            Event::KvEvents(engine, incarnation, batch) => self.apply_events(engine, incarnation, *batch),
            Event::Scrape => self.scrape(),
            Event::Retry(number, waits) => {
                if self.flights.get(&number).is_some_and(|flight| flight.waits == waits) {
                    self.resume(number);
                }
            }
            Event::LeaseEnd(engine, tag) => self.lease_ended(engine, tag),
            Event::Leaves(engine) => self.leave(engine),
            Event::Returns(engine) => self.come_back(engine),
            Event::Check(engine) => self.check(engine),
            Event::SendBookings => self.send_bookings(),
            Event::BookingsArrive(from, message) => self.receive_bookings(from, &message),
            Event::Learn(gateway) => self.learn(gateway),
        }
    }

    /// Makes the last reading of load figures that was due while no request ran, and plans the next one.
    /// Earlier readings would have shown the same, because all engines were idle.
    fn resume_scraping(&mut self) {
        if !std::mem::replace(&mut self.scraping, true) {
            let interval = self.scrape_interval();
            let age = u64::try_from(self.now.as_nanos() % interval.as_nanos()).unwrap_or(0);
            let age = Duration::from_nanos(age);
            self.read_loads(age);
            self.plan(self.now - age + interval, Event::Scrape);
        }
    }

    fn scrape(&mut self) {
        self.read_loads(Duration::ZERO);
        self.scraping = !self.flights.is_empty();
        if self.scraping {
            self.plan(self.now + self.scrape_interval(), Event::Scrape);
        }
    }

    fn scrape_interval(&self) -> Duration {
        Duration::from_secs_f64(self.fleet.scrape_interval_ms / 1e3)
    }

    fn finish(self) -> RunResult {
        let counts = self.engines.iter().map(|engine| engine.core.counts());
        let (preemptions, steps) = counts
            .fold((self.preemptions, self.steps), |(preempted, steps), count| {
                (preempted + count.preemptions, steps + count.steps)
            });
        let (imbalance, imbalance_over_time) = self.imbalance.finish();
        let first = self.outcomes.iter().flatten().map(|outcome| outcome.at).min().unwrap_or_default();
        RunResult {
            outcomes: self.outcomes.into_iter().flatten().collect(),
            span: self.now - first,
            preemptions,
            steps,
            imbalance,
            imbalance_over_time,
            retries: self.retries,
            local_fallbacks: self.local_fallbacks,
            stranded: self.stranded,
            fallbacks: self.fallbacks,
            withdrawn: self.withdrawn,
            one_sided: self.gateways.one_sided(),
            exchanged: self.exchanged,
        }
    }
}

/// Returns the position of the engine with the fewest blocks.
fn smallest(engines: &[Engine]) -> usize {
    let blocks = |place: &usize| engines.get(*place).map(|engine| engine.limits.blocks);
    (0..engines.len()).min_by_key(blocks).unwrap_or_default()
}

#[cfg(test)]
mod tests;
