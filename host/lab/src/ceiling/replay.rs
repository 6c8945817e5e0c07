//! Runs requests on chosen engines without routing: with the engines, links and arrivals of a run. The state
//! can be copied at any time.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    time::Duration,
};

use pointsman_sim::core::{BatchEngine, PromptKv, Sequence, Token};
use pointsman_workers::Role;

use super::Waits;
use crate::{
    fleet::Fleet,
    outcome::Place,
    prepared::Prepared,
    run::{RunOptions, step_duration},
    trace::Trace,
};

mod queries;

/// Data that all replays of a run share.
pub(crate) struct Scene<'a> {
    pub(super) trace: &'a Trace,
    pub(super) prepared: &'a [Prepared],
    pub(super) fleet: &'a Fleet,
    pub(super) roles: Vec<Role>,
    /// Earliest arrival of each request, and the order of those that do not wait for another request.
    pub(super) arrivals: Vec<Duration>,
    pub(super) order: Vec<u32>,
    pub(super) waits: &'a Waits,
}

/// Part of a request that one engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Prefill,
    Decode,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(u32),
    Queued(u32, u32, Part),
    StepEnd(u32),
    Transferred(u32),
}

#[derive(Clone)]
struct Engine {
    core: BatchEngine,
    overhead: Duration,
    link_free: Duration,
}

/// A request that does not have its first token yet.
#[derive(Clone, Copy)]
struct Waiting {
    at: Duration,
    counts: bool,
}

/// The state of a replay.
#[derive(Clone)]
pub(super) struct World {
    /// Engines by position; `None` for an engine that is not simulated.
    engines: Vec<Option<Engine>>,
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    planned: u64,
    now: Duration,
    /// Position of the next arrival in the order of arrivals.
    next: usize,
    waiting: HashMap<u32, Waiting>,
    /// Number of answers that a request still waits for, if it has received some of them.
    missing: HashMap<usize, u32>,
    /// Number of requests whose time to first token still has to be counted, arrived or not.
    to_count: u32,
    counted: u32,
    /// Sum of the times to first token of the requests that count.
    pub(super) ttft: Duration,
    /// Engine steps.
    pub(super) steps: u64,
    tokens: Vec<Token>,
}

impl<'a> Scene<'a> {
    /// Returns the scene of a run. `outcomes` are those of any arm with the same seed.
    pub(crate) fn of(
        trace: &'a Trace,
        prepared: &'a [Prepared],
        fleet: &'a Fleet,
        options: RunOptions,
        arrivals: &[Duration],
        waits: &'a Waits,
    ) -> Self {
        let roles =
            fleet.engines.iter().flat_map(|group| (0..group.count).map(|_| group.role)).collect::<Vec<_>>();
        let earliest = arrivals.iter().zip(&trace.requests).enumerate();
        let earliest = earliest.map(|(number, (at, request))| match waits.waits(number) {
            false => *at,
            true if options.fixed_schedule => request.at.div_f64(options.speed),
            true => Duration::ZERO,
        });
        let arrivals: Vec<Duration> = earliest.collect();
        let all = (0_u32..).zip(&arrivals).map(|(number, _)| number);
        let mut order: Vec<u32> = all.filter(|number| !waits.waits(*number as usize)).collect();
        order.sort_by_key(|number| (arrivals.get(*number as usize).copied(), *number));
        Self { trace, prepared, fleet, roles, arrivals, order, waits }
    }

    /// Whether engines are independent of each other once every request has its engine.
    pub(super) fn is_separable(&self) -> bool {
        self.waits.is_empty() && self.roles.iter().all(|role| *role == Role::Aggregated)
    }

    pub(super) fn role(&self, engine: u32) -> Role {
        self.roles.get(engine as usize).copied().unwrap_or(Role::Aggregated)
    }

    fn sequence(&self, number: u32, part: Part) -> Option<Sequence> {
        let (request, prepared) =
            (self.trace.requests.get(number as usize)?, self.prepared.get(number as usize)?);
        Some(Sequence {
            tag: u64::from(number) * 4 + part as u64,
            prompt: prepared.chain.clone(),
            isl: request.input_tokens,
            osl: if part == Part::Prefill { 1 } else { request.output_tokens },
            kv: if part == Part::Decode { self.fleet.routing.decode_kv() } else { PromptKv::Computed },
            keeps_blocks: part == Part::Prefill,
        })
    }
}

/// Returns the number of the request that a tag belongs to.
fn number_of(tag: u64) -> u32 {
    u32::try_from(tag / 4).unwrap_or(u32::MAX)
}

impl World {
    /// Returns the state before the first arrival: all engines are idle.
    pub(super) fn new(scene: &Scene<'_>) -> Self {
        let fleet = scene.fleet;
        let engine = |group: &crate::fleet::EngineGroup| {
            let core = BatchEngine::new(group.limits(fleet.block_tokens), group.step_time());
            Some(Engine { core, overhead: group.request_overhead(), link_free: Duration::ZERO })
        };
        let engines = fleet.engines.iter().flat_map(|group| (0..group.count).map(move |_| engine(group)));
        Self {
            engines: engines.collect(),
            events: BinaryHeap::new(),
            planned: 0,
            now: Duration::ZERO,
            next: 0,
            waiting: HashMap::new(),
            missing: HashMap::new(),
            to_count: u32::MAX,
            counted: 0,
            ttft: Duration::ZERO,
            steps: 0,
            tokens: Vec::new(),
        }
    }

    /// Copies the state with one engine only.
    pub(super) fn only(&self, engine: u32) -> Self {
        let is_of =
            |event: &Event| matches!(event, Event::Queued(of, ..) | Event::StepEnd(of) if *of == engine);
        let copied = |(at, one): (u32, &Option<Engine>)| if at == engine { one.clone() } else { None };
        let engines = (0..).zip(&self.engines).map(copied);
        let events = self.events.iter().filter(|Reverse((_, _, event))| is_of(event)).copied();
        Self {
            engines: engines.collect(),
            events: events.collect(),
            waiting: HashMap::new(),
            missing: HashMap::new(),
            tokens: Vec::new(),
            ..*self
        }
    }

    /// Starts counting the times to first token of the next `arrivals` requests.
    pub(super) fn count_next(&mut self, arrivals: u32) {
        (self.to_count, self.counted, self.ttft, self.steps) = (arrivals, 0, Duration::ZERO, 0);
        self.waiting.values_mut().for_each(|waiting| waiting.counts = false);
    }

    /// Runs until the next arrival, and returns the number of its request.
    pub(super) fn run_to_arrival(&mut self, scene: &Scene<'_>, places: &[Place]) -> Option<u32> {
        loop {
            match self.peek(scene)? {
                (_, Event::Arrival(number)) => return Some(number),
                _ => self.step(scene, places),
            }
        }
    }

    /// Runs until every request that counts has its first token, or the sum of their times exceeds `limit`.
    /// Returns whether the sum stayed within `limit`.
    pub(super) fn run_counted(&mut self, scene: &Scene<'_>, places: &[Place], limit: Duration) -> bool {
        while self.to_count > 0 || self.counted > 0 {
            if self.ttft > limit {
                return false;
            }
            if self.peek(scene).is_none() {
                break;
            }
            self.step(scene, places);
        }
        self.ttft <= limit
    }

    /// Returns the next event. Arrivals come before other events of the same time, because they were planned
    /// first.
    fn peek(&self, scene: &Scene<'_>) -> Option<(Duration, Event)> {
        let event = self.events.peek().map(|Reverse((at, _, event))| (*at, *event));
        let arrival = scene
            .order
            .get(self.next)
            .and_then(|number| Some((*scene.arrivals.get(*number as usize)?, Event::Arrival(*number))));
        match (arrival, event) {
            (Some(arrival), Some(event)) => Some(if arrival.0 <= event.0 { arrival } else { event }),
            (arrival, event) => arrival.or(event),
        }
    }

    /// Handles the next event.
    pub(super) fn step(&mut self, scene: &Scene<'_>, places: &[Place]) {
        let Some((at, event)) = self.peek(scene) else { return };
        match event {
            Event::Arrival(number) if scene.order.get(self.next) == Some(&number) => self.next += 1,
            _ => drop(self.events.pop()),
        }
        self.now = at;
        match event {
            Event::Arrival(number) => self.arrive(scene, places, number),
            Event::Queued(engine, number, part) => self.enqueue(scene, places, engine, number, part),
            Event::StepEnd(engine) => self.end_step(scene, places, engine),
            Event::Transferred(number) => self.transferred(scene, places, number),
        }
    }

    fn plan(&mut self, at: Duration, event: Event) {
        self.planned += 1;
        self.events.push(Reverse((at, self.planned, event)));
    }

    fn engine(&mut self, engine: u32) -> Option<&mut Engine> {
        self.engines.get_mut(engine as usize)?.as_mut()
    }

    fn arrive(&mut self, scene: &Scene<'_>, places: &[Place], number: u32) {
        let counts = self.to_count > 0;
        self.to_count -= u32::from(counts);
        let Some(place) = places.get(number as usize).copied() else { return };
        if self.engine(place.prefill).is_none() {
            return;
        }
        self.counted += u32::from(counts);
        self.waiting.insert(number, Waiting { at: self.now, counts });
        let part = if place.is_local() { Part::Whole } else { Part::Prefill };
        self.submit(scene, places, place.prefill, number, part);
    }

    fn submit(&mut self, scene: &Scene<'_>, places: &[Place], engine: u32, number: u32, part: Part) {
        let overhead = self.engine(engine).map_or(Duration::ZERO, |engine| engine.overhead);
        if overhead.is_zero() {
            self.enqueue(scene, places, engine, number, part);
        } else {
            self.plan(self.now + overhead, Event::Queued(engine, number, part));
        }
    }

    fn enqueue(&mut self, scene: &Scene<'_>, places: &[Place], engine: u32, number: u32, part: Part) {
        if let (Some(of), Some(sequence)) = (self.engine(engine), scene.sequence(number, part)) {
            of.core.submit(sequence);
        }
        self.start_step(scene, places, engine);
    }

    fn start_step(&mut self, scene: &Scene<'_>, places: &[Place], engine: u32) {
        let Some(of) = self.engine(engine) else { return };
        let step = of.core.begin_step();
        let admitted = of.core.take_admitted();
        if let Some(milliseconds) = step {
            self.steps += 1;
            self.plan(self.now + step_duration(milliseconds), Event::StepEnd(engine));
        }
        let pulls = scene.fleet.routing.pulls();
        for (tag, cached) in admitted.into_iter().filter(|_| pulls) {
            if tag % 4 == Part::Decode as u64 {
                self.transfer(scene, places, number_of(tag), cached);
            }
        }
    }

    fn end_step(&mut self, scene: &Scene<'_>, places: &[Place], engine: u32) {
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        if let Some(of) = self.engine(engine) {
            of.core.end_step(&mut tokens);
            // A replay does not use the cache events. Taking them keeps their list short.
            of.core.take_changes();
        }
        for token in &tokens {
            let number = number_of(token.tag);
            if token.tag % 4 == Part::Prefill as u64 {
                self.hand_over(scene, places, number);
                continue;
            }
            if token.number == 1 {
                self.first_token(number);
            }
            if token.last {
                self.follow(scene, number);
            }
        }
        self.tokens = tokens;
        self.start_step(scene, places, engine);
    }

    /// Gives a finished prefill to its decode engine, as a run does.
    fn hand_over(&mut self, scene: &Scene<'_>, places: &[Place], number: u32) {
        let Some(place) = places.get(number as usize).copied() else { return };
        if scene.fleet.routing.pulls() {
            self.submit(scene, places, place.decode, number, Part::Decode);
        } else {
            self.transfer(scene, places, number, 0);
        }
    }

    fn transfer(&mut self, scene: &Scene<'_>, places: &[Place], number: u32, cached: u32) {
        let now = self.now;
        let tokens = scene.trace.requests.get(number as usize).map_or(0, |request| request.input_tokens);
        let Some(place) = places.get(number as usize) else { return };
        let Some(of) = self.engine(place.prefill) else { return };
        of.link_free = of.link_free.max(now) + scene.fleet.transfer(tokens, cached);
        let at = of.link_free;
        self.plan(at, Event::Transferred(number));
    }

    fn transferred(&mut self, scene: &Scene<'_>, places: &[Place], number: u32) {
        let Some(place) = places.get(number as usize).copied() else { return };
        if let Some(of) = self.engine(place.prefill) {
            of.core.unpin(u64::from(number) * 4 + Part::Prefill as u64);
        }
        self.start_step(scene, places, place.prefill);
        if !scene.fleet.routing.pulls() {
            return self.submit(scene, places, place.decode, number, Part::Decode);
        }
        if let Some(of) = self.engine(place.decode) {
            of.core.receive(u64::from(number) * 4 + Part::Decode as u64, false);
        }
        self.start_step(scene, places, place.decode);
    }

    fn first_token(&mut self, number: u32) {
        let Some(waiting) = self.waiting.remove(&number) else { return };
        if waiting.counts {
            self.counted -= 1;
            self.ttft += self.now - waiting.at;
        }
    }

    /// Plans the requests that waited for this one.
    fn follow(&mut self, scene: &Scene<'_>, number: u32) {
        for next in scene.waits.followers(number as usize) {
            let missing = self.missing.entry(*next).or_insert_with(|| scene.waits.count(*next));
            *missing = missing.saturating_sub(1);
            let found = (scene.trace.requests.get(*next), scene.arrivals.get(*next));
            if let (0, (Some(request), Some(planned))) = (*missing, found) {
                self.missing.remove(next);
                let at = (*planned).max(self.now + request.delay.unwrap_or_default());
                self.plan(at, Event::Arrival(u32::try_from(*next).unwrap_or(u32::MAX)));
            }
        }
    }
}
