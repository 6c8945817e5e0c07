//! One engine model under measured arrivals: which work lies between a request's arrival, its first and its
//! last token.

use std::sync::Arc;

use pointsman_sim::core::{BatchEngine, BatchLimits, PromptKv, Sequence, StepTime, StepWork};

use super::Experiment;

/// Weights of a request's overhead and of `c0..c4` in a duration.
pub(super) type Features = [f64; 6];

/// The overhead of one request.
const OVERHEAD: Features = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0];

/// The work of one request. The model's times follow from it and the coefficients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// From its arrival to its first token.
    pub(super) ttft: Features,
    /// From its first to its last token.
    pub(super) decode: Features,
}

/// A request during the replay.
#[derive(Clone, Copy, Default)]
struct Open {
    work: Work,
    queued: bool,
    first: bool,
    done: bool,
}

/// Runs the requests of an experiment through an engine. `None` for a request that does not fit into it.
pub(super) fn replay(
    experiment: &Experiment,
    limits: BatchLimits,
    overhead_ms: f64,
    coefficients: [f64; 5],
) -> Vec<Option<Work>> {
    let [c0, c1, c2, c3, c4] = coefficients;
    let mut engine = BatchEngine::new(limits, StepTime::Linear { c0, c1, c2, c3, c4 });
    let mut open = vec![Open::default(); experiment.samples.len()];
    let mut arrivals: Vec<(f64, usize)> = (0..).zip(&experiment.samples).map(arrival(overhead_ms)).collect();
    arrivals.retain(|(_, number)| {
        experiment.samples.get(*number).is_some_and(|sample| engine.fits(sample.isl, sample.osl))
    });
    arrivals.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut arrivals = arrivals.into_iter().peekable();
    let mut now = 0.0;
    let mut tokens = Vec::new();
    loop {
        while let Some((_, number)) = arrivals.next_if(|(at, _)| *at <= now) {
            submit(&mut engine, experiment, number);
            add(&mut open, number, OVERHEAD, 1.0);
        }
        let Some(milliseconds) = engine.begin_step() else {
            // Idle until the next arrival.
            let Some((at, _)) = arrivals.peek() else { break };
            now = *at;
            continue;
        };
        let step = features(&engine.step_work());
        let end = now + milliseconds.clamp(1e-6, 1e9);
        for request in open.iter_mut().filter(|request| request.queued && !request.done) {
            request.add(step, 1.0);
        }
        // A request that comes within a step waits for the rest of it.
        while let Some((at, number)) = arrivals.next_if(|(at, _)| *at < end) {
            submit(&mut engine, experiment, number);
            add(&mut open, number, OVERHEAD, 1.0);
            add(&mut open, number, step, (end - at) / (end - now));
        }
        now = end;
        tokens.clear();
        engine.end_step(&mut tokens);
        for token in &tokens {
            let number = usize::try_from(token.tag).unwrap_or(usize::MAX);
            if let Some(request) = open.get_mut(number) {
                request.first = true;
                request.done |= token.last;
            }
        }
    }
    open.iter().map(|request| request.done.then_some(request.work)).collect()
}

fn arrival(overhead_ms: f64) -> impl Fn((usize, &super::Sample)) -> (f64, usize) {
    move |(number, sample)| (sample.at_ms + overhead_ms, number)
}

fn submit(engine: &mut BatchEngine, experiment: &Experiment, number: usize) {
    let Some(sample) = experiment.samples.get(number) else { return };
    engine.submit(Sequence {
        tag: number as u64,
        prompt: Arc::from([]),
        isl: sample.isl.max(1),
        osl: sample.osl.max(1),
        kv: PromptKv::Computed,
        keeps_blocks: false,
    });
}

fn add(open: &mut [Open], number: usize, step: Features, share: f64) {
    if let Some(request) = open.get_mut(number) {
        request.queued = true;
        request.add(step, share);
    }
}

impl Open {
    fn add(&mut self, step: Features, share: f64) {
        let sum = if self.first { &mut self.work.decode } else { &mut self.work.ttft };
        sum.iter_mut().zip(step).for_each(|(sum, feature)| *sum += share * feature);
    }
}

/// The weights of `c0..c4` in the duration of a step.
#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
fn features(work: &StepWork) -> Features {
    let (kv, new) = (work.context_tokens as f64, work.new_tokens as f64);
    [0.0, 1.0, f64::from(work.sequences), kv, new, work.new_tokens_squared]
}
