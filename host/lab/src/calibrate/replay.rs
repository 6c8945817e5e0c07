//! Runs one engine model with measured arrivals, to find the work from a request's arrival to its first
//! token, and from there to its last.

use std::sync::Arc;

use pointsman_sim::core::{BatchEngine, BatchLimits, PromptKv, Sequence, StepTime, StepWork, Token};

use super::Sample;

/// Weights of a request's overhead and of `c0..c4` in a duration.
pub(super) type Features = [f64; 6];

/// Features of one request's overhead.
const OVERHEAD: Features = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0];

/// Work of one request. The coefficients turn it into the model's times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// Work from its arrival to its first token.
    pub(super) ttft: Features,
    /// Work from its first to its last token.
    pub(super) decode: Features,
}

/// A request that arrives at an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Arrival {
    /// Time of arrival, milliseconds from the start.
    pub(super) at_ms: f64,
    /// Prompt tokens.
    pub(super) isl: u32,
    /// Output tokens.
    pub(super) osl: u32,
    /// Source of the KV of its prompt.
    pub(super) kv: PromptKv,
}

impl Arrival {
    /// A request whose whole prompt the engine computes.
    pub(super) fn of(sample: &Sample) -> Self {
        Self { at_ms: sample.at_ms, isl: sample.isl, osl: sample.osl, kv: PromptKv::Computed }
    }

    /// Returns the time at which the scheduler gets it. Received KV belongs to a request that the engine
    /// accepted earlier.
    fn scheduled_ms(&self, overhead_ms: f64) -> f64 {
        if self.has_overhead() { self.at_ms + overhead_ms } else { self.at_ms }
    }

    fn has_overhead(&self) -> bool {
        self.kv != PromptKv::Received
    }
}

/// A request during the replay.
#[derive(Clone, Copy, Default)]
struct Open {
    work: Work,
    first: bool,
    done: bool,
}

/// Runs requests through an engine that is idle at first. The result is `None` for a request that does not
/// fit into the engine.
pub(super) fn replay(
    requests: &[Arrival],
    limits: BatchLimits,
    overhead_ms: f64,
    coefficients: [f64; 5],
) -> Vec<Option<Work>> {
    let [c0, c1, c2, c3, c4] = coefficients;
    let mut replay = Replay {
        engine: BatchEngine::new(limits, StepTime::Linear { c0, c1, c2, c3, c4 }),
        requests,
        open: vec![Open::default(); requests.len()],
        active: Vec::new(),
    };
    let mut arrivals: Vec<(f64, usize)> =
        (0..).zip(requests).map(|(number, one)| (one.scheduled_ms(overhead_ms), number)).collect();
    arrivals.retain(|(_, number)| {
        requests.get(*number).is_some_and(|one| replay.engine.fits(one.isl.max(1), one.osl.max(1)))
    });
    arrivals.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut arrivals = arrivals.into_iter().peekable();
    let mut now = 0.0;
    let mut tokens = Vec::new();
    loop {
        while let Some((_, number)) = arrivals.next_if(|(at, _)| *at <= now) {
            replay.submit(number);
        }
        let Some(milliseconds) = replay.engine.begin_step() else {
            // The engine is idle until the next arrival.
            let Some((at, _)) = arrivals.peek() else { break };
            now = *at;
            continue;
        };
        let step = features(&replay.engine.step_work());
        let end = now + milliseconds.clamp(1e-6, 1e9);
        replay.add_to_active(step);
        // A request that arrives within a step waits for the end of the step.
        while let Some((at, number)) = arrivals.next_if(|(at, _)| *at < end) {
            replay.submit(number);
            replay.add(number, step, (end - at) / (end - now));
        }
        now = end;
        tokens.clear();
        replay.engine.end_step(&mut tokens);
        replay.add_tokens(&tokens);
    }
    replay.open.iter().map(|request| request.done.then_some(request.work)).collect()
}

/// An engine, and the requests that it runs.
struct Replay<'a> {
    engine: BatchEngine,
    requests: &'a [Arrival],
    open: Vec<Open>,
    /// Submitted requests that have not ended.
    active: Vec<usize>,
}

impl Replay<'_> {
    fn submit(&mut self, number: usize) {
        let Some(request) = self.requests.get(number) else { return };
        self.engine.submit(Sequence {
            tag: number as u64,
            prompt: Arc::from([]),
            isl: request.isl.max(1),
            osl: request.osl.max(1),
            kv: request.kv,
            keeps_blocks: false,
        });
        self.active.push(number);
        if request.has_overhead() {
            self.add(number, OVERHEAD, 1.0);
        }
    }

    fn add(&mut self, number: usize, step: Features, share: f64) {
        if let Some(request) = self.open.get_mut(number) {
            request.add(step, share);
        }
    }

    fn add_to_active(&mut self, step: Features) {
        for number in &self.active {
            if let Some(request) = self.open.get_mut(*number) {
                request.add(step, 1.0);
            }
        }
    }

    fn add_tokens(&mut self, tokens: &[Token]) {
        for token in tokens {
            let number = usize::try_from(token.tag).unwrap_or(usize::MAX);
            if let Some(request) = self.open.get_mut(number) {
                request.first = true;
                request.done |= token.last;
            }
        }
        let open = &self.open;
        self.active.retain(|number| open.get(*number).is_some_and(|request| !request.done));
    }
}

impl Open {
    fn add(&mut self, step: Features, share: f64) {
        let sum = if self.first { &mut self.work.decode } else { &mut self.work.ttft };
        sum.iter_mut().zip(step).for_each(|(sum, feature)| *sum += share * feature);
    }
}

/// Returns the weights of `c0..c4` in the duration of a step.
#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
fn features(work: &StepWork) -> Features {
    let (kv, new) = (work.context_tokens as f64, work.new_tokens as f64);
    [0.0, 1.0, f64::from(work.sequences), kv, new, work.new_tokens_squared]
}
