//! Lower bounds of the time that prompts and decode steps take, whatever else an engine runs at the same
//! time.
//!
//! A step with new prompt tokens takes at least each of the model's [`Line`]s. A line is a sum of terms that
//! grow with the work of the step, so other sequences in the step can only increase it.

use super::{Roofline, StepTime, StepWork};
use crate::core::{BatchLimits, MAX_STEP_MS};

/// A lower bound of a step's duration, milliseconds. A step in which a sequence computes `n` prompt tokens
/// after `before` earlier ones takes at least `step + token * n + square * n^2 + pair * n * (before + (n - 1)
/// / 2) + context * (before + n)`.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    step: f64,
    token: f64,
    square: f64,
    /// Whether `square` also holds for the sum of the tokens of all sequences.
    squares_the_sum: bool,
    pair: f64,
    context: f64,
}

impl Line {
    /// Returns the least time of `tokens` new tokens after `cached` earlier ones, in any number of steps of
    /// at most `limit` tokens.
    ///
    /// `k` steps take at least `k * step + token * tokens + square * tokens^2 / k`: squares of equal parts
    /// have the least sum. This is convex in `k`, so the best integer is next to the best real number.
    fn prompt(&self, cached: f64, tokens: f64, limit: f64) -> f64 {
        let (fewest, most) = ((tokens / limit).ceil().max(1.0), tokens.max(1.0));
        let squares = self.square * tokens * tokens;
        let best = if self.step > 0.0 { (squares / self.step).sqrt() } else { most };
        let best = best.clamp(fewest, most);
        let cost = |steps: f64| steps * self.step + squares / steps;
        let steps = cost(best.floor()).min(cost(best.ceil()));
        let pairs = tokens * (cached + (tokens - 1.0) / 2.0);
        // The context of the last step is the whole prompt.
        let context = self.context * (cached + tokens);
        steps + self.token * tokens + self.pair * pairs + context
    }

    /// Returns the least time for a token in a step of at most `limit` tokens of any number of prompts.
    fn each_token(&self, limit: f64) -> f64 {
        let square = if self.squares_the_sum { self.square } else { 0.0 };
        let best = if square > 0.0 { (self.step / square).sqrt().min(limit) } else { limit };
        self.step / best.max(1.0) + self.token + square * best.max(1.0)
    }
}

/// Lower bounds of one engine's times, milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct LeastTimes {
    time: StepTime,
    limits: BatchLimits,
    lines: [Line; 2],
}

impl LeastTimes {
    /// Returns the bounds of an engine. A formula whose steps may exceed the longest step has no bounds,
    /// because such steps are cut to the longest step.
    #[must_use]
    pub fn new(time: StepTime, limits: BatchLimits) -> Self {
        let (most, context) = (f64::from(limits.max_batched_tokens), f64::from(limits.blocks));
        let context = context * f64::from(limits.block_size);
        let longest = |line: &Line| {
            line.step
                + (line.token + line.square * most + line.pair * context) * most
                + line.context * context
        };
        let lines = lines(&time);
        let is_cut = lines.iter().any(|line| longest(line) > MAX_STEP_MS);
        Self { time, limits, lines: if is_cut { Default::default() } else { lines } }
    }

    fn most_tokens(&self) -> f64 {
        f64::from(self.limits.max_batched_tokens.max(1))
    }

    fn capacity(&self) -> u64 {
        u64::from(self.limits.blocks) * u64::from(self.limits.block_size)
    }

    fn over_lines(&self, of: impl Fn(&Line) -> f64) -> f64 {
        self.lines.iter().map(of).fold(0.0, f64::max)
    }

    /// Returns the least time from the start of a prompt's first step to the end of its last, with its first
    /// `cached` tokens in the cache.
    #[must_use]
    pub fn prompt_ms(&self, cached: u32, isl: u32) -> f64 {
        let (cached, tokens) = (f64::from(cached), f64::from(isl.saturating_sub(cached)));
        self.over_lines(|line| line.prompt(cached, tokens, self.most_tokens())) + self.emission_ms(isl)
    }

    /// Returns the least time that the first token adds to the step in which a prompt ends, in addition to
    /// the time of the prompts.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
    pub fn emission_ms(&self, isl: u32) -> f64 {
        match self.time {
            StepTime::Dynamo if !self.limits.prefill_only => {
                super::dynamo_decode(f64::from(isl) / self.capacity().max(1) as f64)
            }
            StepTime::Latencies { overhead, .. } => overhead,
            _ => 0.0,
        }
    }

    /// Returns the least duration of a step that decodes a sequence with a context of `isl` tokens.
    #[must_use]
    pub fn decode_ms(&self, isl: u32) -> f64 {
        let mut work = StepWork {
            capacity_tokens: self.capacity(),
            emitting: 1,
            emitting_context_tokens: u64::from(isl),
            prefill_only: self.limits.prefill_only,
            ..StepWork::default()
        };
        work.add(1, isl);
        work.add_decoding(isl);
        let least = match self.time {
            // The smallest constant and the smallest slopes of the three formulas for a step with a decoding
            // sequence. From 95 sequences on, the constant includes the term of 95 sequences.
            StepTime::DistServeOpt13bA100 => {
                19.102_546_474 + 0.038_506_977 + 0.000_579_800_04 * f64::from(isl)
            }
            time => time.milliseconds(&work),
        };
        least.min(MAX_STEP_MS)
    }

    /// Returns the least time of a prompt token in the steps of the engine, whatever else runs in them: the
    /// inverse of the largest rate, milliseconds a token.
    #[must_use]
    pub fn token_ms(&self) -> f64 {
        self.over_lines(|line| line.each_token(self.most_tokens()))
    }

    /// Returns the least time between the mean time at which the tokens of a prompt are computed and the end
    /// of its last step, when each step computes its tokens at a constant rate.
    #[must_use]
    pub fn half_prompt_ms(&self, tokens: u32) -> f64 {
        let tokens = f64::from(tokens);
        self.over_lines(|line| (line.step + line.token * tokens) / 2.0).max(self.token_ms() * tokens / 2.0)
    }

    /// Returns the least time between the mean time at which the tokens of a prompt are computed and the end
    /// of its last step, when each step computes its tokens at the rate of [`Self::token_ms`] from its start.
    #[must_use]
    pub fn behind_mean_ms(&self, tokens: u32) -> f64 {
        let half = self.token_ms() / 2.0;
        self.over_lines(|line| {
            if line.token >= half {
                line.step + (line.token - half) * f64::from(tokens)
            } else {
                line.step / 2.0
            }
        })
    }
}

/// Returns lower bounds of the duration of a step with prompts. Each bound holds by itself.
fn lines(time: &StepTime) -> [Line; 2] {
    let one = |line| [line, Line::default()];
    match *time {
        StepTime::Linear { c0, c1, c2, c3, c4 } => {
            one(Line { step: c0 + c1, token: c3, square: c4, context: c2, ..Line::default() })
        }
        StepTime::Latencies { per_token, .. } => one(Line { token: per_token, ..Line::default() }),
        StepTime::Dynamo => one(Line {
            step: 16.501_42,
            token: 1.518_344e-2,
            square: 4.209_989e-7,
            squares_the_sum: true,
            ..Line::default()
        }),
        StepTime::DistServeOpt13bA100 => one(Line {
            step: 19.102_546_474,
            token: 0.101_912_257,
            square: 7.122_264_314e-6,
            ..Line::default()
        }),
        StepTime::BlisLlama8bH100 => {
            let model = Roofline::LLAMA_8B_H100;
            let ms_an_operation = 1e3 / (model.peak * model.utilization.0);
            let ms_a_byte = 1e3 / model.bandwidth;
            let compute = Line {
                token: model.token_operations() * ms_an_operation,
                pair: model.pair_operations() * ms_an_operation,
                ..Line::default()
            };
            let memory = Line {
                step: model.weight_bytes() * ms_a_byte,
                token: model.activation_bytes() * ms_a_byte,
                context: model.kv_bytes() * ms_a_byte,
                ..Line::default()
            };
            [compute, memory]
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::core::{BatchEngine, PromptKv, Sequence};

    fn times() -> impl Strategy<Value = StepTime> {
        let coefficient = |most: f64| prop_oneof![Just(0.0), 0.0..most];
        let linear =
            (coefficient(20.0), coefficient(2.0), coefficient(0.001), coefficient(0.05), coefficient(0.001));
        let linear = linear.prop_map(|(c0, c1, c2, c3, c4)| StepTime::Linear { c0, c1, c2, c3, c4 });
        prop_oneof![
            Just(StepTime::Dynamo),
            Just(StepTime::DistServeOpt13bA100),
            Just(StepTime::BlisLlama8bH100),
            Just(StepTime::Latencies { overhead: 30.0, per_token: 0.2, itl: 12.0, slowdown: 0.5 }),
            linear,
        ]
    }

    proptest! {
        /// Tests any mix of prompts, decoding sequences and preempted ones, in batches of any size.
        #[test]
        fn no_engine_is_faster_than_its_least_times(
            time in times(),
            prefill_only in any::<bool>(),
            max_batched_tokens in 20_u32..600,
            sequences in proptest::collection::vec((1_u32..900, 1_u32..30, 0_u64..4, any::<bool>()), 1..12),
        ) {
            let limits =
                BatchLimits { max_num_seqs: 8, max_batched_tokens, blocks: 70, block_size: 16, prefill_only };
            let least = LeastTimes::new(time, limits);
            let mut engine = BatchEngine::new(limits, time);
            for (tag, (isl, osl, family, received)) in (0..).zip(&sequences) {
                let prompt = (0..u64::from(isl / 16)).map(|block| family * 1_000 + block).collect();
                let kv = if *received { PromptKv::Received } else { PromptKv::Computed };
                engine.submit(Sequence { tag, prompt, isl: *isl, osl: *osl, kv, keeps_blocks: false });
            }
            let (mut now, mut cached, mut tokens) = (0.0, vec![0; sequences.len()], Vec::new());
            while let Some(took) = engine.begin_step() {
                for (tag, hit) in engine.take_admitted() {
                    cached[tag as usize] = hit;
                }
                now += took;
                tokens.clear();
                engine.end_step(&mut tokens);
                for token in tokens.iter().filter(|token| token.number == 1) {
                    let (isl, _, _, received) = sequences[token.tag as usize];
                    let hit = cached[token.tag as usize];
                    let bound = if received { least.decode_ms(isl) } else { least.prompt_ms(hit, isl) };
                    prop_assert!(now >= bound - 1e-6, "{isl} tokens, {hit} cached: {now} < {bound}");
                }
                let work = engine.step_work();
                let rate = f64::from(u32::try_from(work.prompt_tokens).unwrap()) * least.token_ms();
                prop_assert!(took >= rate - 1e-6, "{work:?}: {took} < {rate}");
            }
        }
    }

    #[test]
    fn a_lone_prompt_takes_just_its_least_time() {
        let limits = BatchLimits {
            max_num_seqs: 8,
            max_batched_tokens: 8_192,
            blocks: 2_048,
            block_size: 512,
            prefill_only: false,
        };
        for time in [StepTime::Dynamo, StepTime::DistServeOpt13bA100, StepTime::BlisLlama8bH100] {
            // With DistServe's square term, a long prompt would be faster in several steps.
            for isl in [10, 1_000, 1_600] {
                let mut engine = BatchEngine::new(limits, time);
                let prompt = [].into();
                engine.submit(Sequence {
                    tag: 1,
                    prompt,
                    isl,
                    osl: 1,
                    kv: PromptKv::Computed,
                    keeps_blocks: false,
                });
                let took = engine.begin_step().unwrap();
                let least = LeastTimes::new(time, limits).prompt_ms(0, isl);
                // The constants of DistServe's fit are truncated after the ninth digit.
                assert!(
                    (took / least - 1.0).abs() < 1e-6 && took >= least - 1e-6,
                    "{time:?} {isl} {took} {least}"
                );
            }
        }
    }
}
