//! Duration of one step of an engine that batches continuously.

use std::str::FromStr;

pub use least::LeastTimes;

mod least;

/// Work of an engine in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Sequences in the step (`B`).
    pub sequences: u32,
    /// Sum of the context lengths of all sequences in the step, tokens (`sum(kv)`).
    pub context_tokens: u64,
    /// New tokens of all sequences, prompt and output (`sum(n)`).
    pub new_tokens: u64,
    /// Sum of the squares of each sequence's new tokens (`sum(n^2)`).
    pub new_tokens_squared: f64,
    /// New tokens of prompts.
    pub prompt_tokens: u64,
    /// Number of pairs of a new prompt token and an earlier token of its sequence, which is the work of the
    /// prompts' attention.
    pub prompt_pairs: f64,
    /// Sequences that have completed their prompt. Each computes one token.
    pub decoding: u32,
    /// Sum of the context lengths of these sequences, tokens.
    pub decoding_context_tokens: u64,
    /// Sequences whose prompt ends in this step, so that they emit their first token.
    pub first_tokens: u32,
    /// Sequences that emit a token at the end of the step.
    pub emitting: u32,
    /// Sum of the context lengths of these sequences, tokens.
    pub emitting_context_tokens: u64,
    /// KV capacity of the engine, tokens.
    pub capacity_tokens: u64,
    /// Whether the engine only computes prompts. Its first token then needs no decode pass.
    pub prefill_only: bool,
}

impl StepWork {
    /// Adds a sequence with `new` tokens and `context` tokens in all.
    pub(super) fn add(&mut self, new: u32, context: u32) {
        self.sequences += 1;
        self.new_tokens += u64::from(new);
        self.new_tokens_squared += f64::from(new).powi(2);
        self.context_tokens += u64::from(context);
    }

    /// Counts `prompt` of a sequence's `new` tokens as tokens of its prompt, which follow `before` earlier
    /// tokens.
    pub(super) fn add_prompt(&mut self, prompt: u32, new: u32, before: u32) {
        self.prompt_tokens += u64::from(prompt);
        self.prompt_pairs += f64::from(new) * (f64::from(before) + (f64::from(new) - 1.0) / 2.0);
    }

    /// Counts a sequence that has completed its prompt.
    pub(super) fn add_decoding(&mut self, context: u32) {
        self.decoding += 1;
        self.decoding_context_tokens += u64::from(context);
    }
}

/// Formula for the duration of a step, milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepTime {
    /// `c0 + c1*B + c2*sum(kv) + c3*sum(n) + c4*sum(n^2)`.
    Linear {
        /// Milliseconds per step.
        c0: f64,
        /// Milliseconds per sequence.
        c1: f64,
        /// Milliseconds per context token.
        c2: f64,
        /// Milliseconds per new token.
        c3: f64,
        /// Milliseconds per squared number of new tokens.
        c4: f64,
    },
    /// An engine described by its time to first token and its inter-token latency: `(overhead, if a prompt
    /// ends + per_token * prompt tokens + itl, if a sequence decodes)`, times `1 + slowdown * (B - 1)`.
    Latencies {
        /// Milliseconds of a prefill, in addition to those of its tokens.
        overhead: f64,
        /// Milliseconds per new prompt token.
        per_token: f64,
        /// Milliseconds of a decode step with one sequence.
        itl: f64,
        /// Share of the duration that each further sequence adds.
        slowdown: f64,
    },
    /// The built-in polynomial of NVIDIA Dynamo's mocker (1.6, `perf_model.rs`), with `x` the new prompt
    /// tokens of the step and `p` the context of the emitting sequences as a share of the KV capacity, at
    /// most 1:
    /// `4.209989e-7 x^2 + 1.518344e-2 x + 16.50142` when `x > 0`, plus
    /// `max(1, -25.74 p^2 + 54.01 p + 5.74)` when a sequence emits and the engine decodes.
    Dynamo,
    /// DistServe's fit for OPT-13B on one A100 80 GB (LLMServe/DistServe, `simdistserve/estimators`:
    /// `time_estimator.py` and `profile_data/profiler-a100-80g.distserve.json`, tensor parallelism 1). A step
    /// with prompts: `18.1025 + 0.101912 sum(n) + 7.12226e-6 sum(n^2)` over the prompts' new tokens, and 1 ms
    /// that `time_estimator.py` adds for each pipeline stage. A step that only decodes, with batch size `B`
    /// and `kv` context tokens: `19.9347 + 6.26936e-4 sum(kv) + 0.0385070 B` below 95 sequences, `7.16619 +
    /// 5.79800e-4 sum(kv) + 0.158311 B` from 95 on. In a step with prompts and decoding sequences,
    /// DistServe's formula counts no time for the decoding sequences; this one adds the decoding formula
    /// without its constant.
    DistServeOpt13bA100,
    /// The roofline of BLIS (inference-sim/inference-sim, `sim/latency/roofline.go`) for Llama 3.1 8B in
    /// bfloat16 on one H100 SXM: the larger of computing time and memory time of a step. See `Roofline`.
    BlisLlama8bH100,
}

/// A model on an accelerator, as BLIS describes them: `model_configs/llama-3.1-8b-instruct/config.json` and
/// `hardware_config.json`.
///
/// With `d` the hidden size, `k` the width of keys, `f` the width of the MLP, `l` layers and `h` heads:
/// computing takes `l (4 d^2 + 4 d k + 4 d f + 2 d)` operations a new token and `l (4 d + 5 h)` for each pair
/// of a new token and a token before it, at the peak rate times the utilization of the phase. Memory moves
/// the weights, `2 l (2 d^2 + 2 d k + 2 d f)` bytes, once a step, `4 l k` bytes for each token of KV that is
/// read or written, and `2 l d` bytes of activations a new token.
#[derive(Clone, Copy, Debug)]
struct Roofline {
    hidden: f64,
    layers: f64,
    heads: f64,
    /// Width of the keys: their heads times the size of a head.
    keys: f64,
    mlp: f64,
    /// Operations per second.
    peak: f64,
    /// Shares of the peak that prompts and decoding reach.
    utilization: (f64, f64),
    /// Bytes per second.
    bandwidth: f64,
}

impl Roofline {
    const LLAMA_8B_H100: Self = Self {
        hidden: 4_096.0,
        layers: 32.0,
        heads: 32.0,
        keys: 1_024.0,
        mlp: 14_336.0,
        peak: 989.5e12,
        utilization: (0.45, 0.30),
        bandwidth: 3.35e12,
    };

    /// Returns the operations for a new token.
    fn token_operations(&self) -> f64 {
        let Self { hidden, layers, keys, mlp, .. } = *self;
        layers * (4.0 * hidden * (hidden + keys + mlp) + 2.0 * hidden)
    }

    /// Returns the operations for a pair of a new token and an earlier token.
    fn pair_operations(&self) -> f64 {
        self.layers * (4.0 * self.hidden + 5.0 * self.heads)
    }

    fn weight_bytes(&self) -> f64 {
        2.0 * self.layers * 2.0 * self.hidden * (self.hidden + self.keys + self.mlp)
    }

    /// Returns the bytes of KV for a token.
    fn kv_bytes(&self) -> f64 {
        4.0 * self.layers * self.keys
    }

    /// Returns the bytes of activations for a new token.
    fn activation_bytes(&self) -> f64 {
        2.0 * self.layers * self.hidden
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
    fn milliseconds(&self, work: &StepWork) -> f64 {
        let (token, pair) = (self.token_operations(), self.pair_operations());
        let prompts = token * work.prompt_tokens as f64 + pair * work.prompt_pairs;
        // BLIS counts the context before the new token.
        let before = work.decoding_context_tokens as f64 - f64::from(work.decoding);
        let decoding = token * f64::from(work.decoding) + pair * before;
        let compute =
            prompts / (self.peak * self.utilization.0) + decoding / (self.peak * self.utilization.1);
        let kv = self.kv_bytes() * work.context_tokens as f64;
        let activations = self.activation_bytes() * work.new_tokens as f64;
        compute.max((self.weight_bytes() + kv + activations) / self.bandwidth) * 1e3
    }
}

/// Returns DistServe's fit for OPT-13B on A100; see [`StepTime::DistServeOpt13bA100`].
#[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
fn distserve_opt_13b(work: &StepWork) -> f64 {
    /// Batch size from which the second decoding formula applies.
    const LARGE_BATCH: u32 = 95;
    let (constant, token, sequence) = if work.decoding < LARGE_BATCH {
        (19.934_702_624_895_458, 0.000_626_935_652_435_058_3, 0.038_506_977_408_283_98)
    } else {
        (7.166_188_946_825_36, 0.000_579_800_040_339_604_6, 0.158_310_961_917_640_46)
    };
    let decoding = token * work.decoding_context_tokens as f64 + sequence * f64::from(work.decoding);
    if work.prompt_tokens == 0 {
        return if work.decoding == 0 { 0.0 } else { constant + decoding };
    }
    // A decoding sequence has one new token.
    let squares = work.new_tokens_squared - f64::from(work.decoding);
    let prompts = 0.101_912_257_269_873_8 * work.prompt_tokens as f64 + 7.122_264_314_252_114e-6 * squares;
    18.102_546_474_863_72 + 1.0 + prompts + decoding
}

/// Returns the duration of Dynamo's decode step, from the context of the emitting sequences as a share of the
/// KV capacity.
fn dynamo_decode(share: f64) -> f64 {
    let p = share.min(1.0);
    (-25.74 * p * p + 54.01 * p + 5.74).max(1.0)
}

impl StepTime {
    /// Returns the duration of a step, milliseconds.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "numbers of tokens stay far below 2^53")]
    pub fn milliseconds(&self, work: &StepWork) -> f64 {
        match *self {
            Self::Linear { c0, c1, c2, c3, c4 } => {
                let linear = c2 * work.context_tokens as f64 + c3 * work.new_tokens as f64;
                c0 + c1 * f64::from(work.sequences) + linear + c4 * work.new_tokens_squared
            }
            Self::DistServeOpt13bA100 => distserve_opt_13b(work),
            Self::BlisLlama8bH100 => Roofline::LLAMA_8B_H100.milliseconds(work),
            Self::Latencies { overhead, per_token, itl, slowdown } => {
                let ends = if work.first_tokens > 0 { overhead } else { 0.0 };
                let decode = if work.decoding > 0 { itl } else { 0.0 };
                let further = f64::from(work.sequences.saturating_sub(1));
                (ends + per_token * work.prompt_tokens as f64 + decode) * (1.0 + slowdown * further)
            }
            Self::Dynamo => {
                let x = work.prompt_tokens as f64;
                let prefill = if x > 0.0 { 4.209_989e-7 * x * x + 1.518_344e-2 * x + 16.501_42 } else { 0.0 };
                let decodes = work.emitting > 0 && !work.prefill_only;
                let p = work.emitting_context_tokens as f64 / work.capacity_tokens.max(1) as f64;
                prefill + if decodes { dynamo_decode(p) } else { 0.0 }
            }
        }
    }
}

impl FromStr for StepTime {
    type Err = String;

    /// Reads a preset's name, or the five coefficients of the linear formula in milliseconds, separated by
    /// commas.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "dynamo" => return Ok(Self::Dynamo),
            "distserve-opt-13b-a100" => return Ok(Self::DistServeOpt13bA100),
            "blis-llama-8b-h100" => return Ok(Self::BlisLlama8bH100),
            _ => {}
        }
        let expected = || {
            format!(
                "step time is \"{text}\"; expected dynamo, distserve-opt-13b-a100, blis-llama-8b-h100, or \
                 c0,c1,c2,c3,c4 in milliseconds"
            )
        };
        let numbers: Result<Vec<f64>, _> = text.split(',').map(|number| number.trim().parse()).collect();
        let numbers = numbers.map_err(|_| expected())?;
        if !numbers.iter().all(|number| number.is_finite() && *number >= 0.0) {
            return Err(expected());
        }
        let &[c0, c1, c2, c3, c4] = numbers.as_slice() else { return Err(expected()) };
        Ok(Self::Linear { c0, c1, c2, c3, c4 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linear_formula_weighs_each_term() {
        let time = StepTime::Linear { c0: 1.0, c1: 10.0, c2: 0.1, c3: 0.01, c4: 0.001 };
        let work = StepWork {
            sequences: 2,
            context_tokens: 100,
            new_tokens: 30,
            new_tokens_squared: 500.0,
            ..StepWork::default()
        };
        assert!((time.milliseconds(&work) - (1.0 + 20.0 + 10.0 + 0.3 + 0.5)).abs() < 1e-9);
    }

    #[test]
    fn latencies_are_those_of_a_lone_request_and_grow_with_the_batch() {
        let time = StepTime::Latencies { overhead: 30.0, per_token: 0.2, itl: 12.0, slowdown: 0.5 };
        let prompt = |tokens, first_tokens| StepWork {
            sequences: 1,
            prompt_tokens: tokens,
            first_tokens,
            emitting: first_tokens,
            ..StepWork::default()
        };
        let decode = |sequences| StepWork { sequences, decoding: sequences, ..StepWork::default() };
        let both = StepWork { sequences: 2, decoding: 1, ..prompt(1_000, 1) };
        let table = [
            (prompt(1_000, 1), 230.0),
            (prompt(200, 1), 70.0),
            (prompt(200, 0), 40.0),
            (decode(1), 12.0),
            (decode(3), 24.0),
            (both, 242.0 * 1.5),
        ];
        for (work, want) in table {
            assert!((time.milliseconds(&work) - want).abs() < 1e-9, "{work:?}");
        }
    }

    #[test]
    fn a_step_time_is_read_from_an_option() {
        assert_eq!("dynamo".parse(), Ok(StepTime::Dynamo));
        let linear = StepTime::Linear { c0: 1.0, c1: 0.0, c2: 0.5, c3: 2.0, c4: 0.0 };
        assert_eq!("1,0,0.5, 2,0".parse(), Ok(linear));
        for bad in ["", "1,2,3", "1,2,3,4,-5", "1,2,3,4,inf", "fast"] {
            let error = bad.parse::<StepTime>().unwrap_err();
            assert!(error.contains(&format!("\"{bad}\"")), "{error}");
        }
    }

    #[test]
    fn the_polynomial_adds_a_prefill_and_a_decode_part() {
        let prompt = StepWork { prompt_tokens: 1_000, ..StepWork::default() };
        let prefill = 0.420_998_9 + 15.183_44 + 16.501_42;
        assert!((StepTime::Dynamo.milliseconds(&prompt) - prefill).abs() < 1e-6);
        let emitting = StepWork {
            emitting: 1,
            emitting_context_tokens: 500,
            capacity_tokens: 1_000,
            ..StepWork::default()
        };
        let decode = -25.74 * 0.25 + 54.01 * 0.5 + 5.74;
        assert!((StepTime::Dynamo.milliseconds(&emitting) - decode).abs() < 1e-9);
        let prefill_only = StepWork { prefill_only: true, ..emitting };
        assert!(StepTime::Dynamo.milliseconds(&prefill_only).abs() < 1e-9);
    }
    #[test]
    fn distserve_s_fit_gives_what_its_own_functions_return() {
        let prompt = |n: u64| StepWork {
            sequences: 1,
            new_tokens: n,
            new_tokens_squared: (n * n) as f64,
            prompt_tokens: n,
            ..StepWork::default()
        };
        let decode = |batch: u32, context: u64| StepWork {
            sequences: batch,
            decoding: batch,
            new_tokens: batch.into(),
            new_tokens_squared: batch.into(),
            decoding_context_tokens: context,
            ..StepWork::default()
        };
        // Values of get_prefill_time(prefill_len_list=[1000]), get_decode_time(10, token_generated_list=[500]
        // * 10) and get_decode_time(100, token_generated_list=[500] * 100).
        let table = [
            (prompt(1_000), 128.137_068_059),
            (decode(10, 5_000), 23.454_450_661),
            (decode(100, 50_000), 51.987_287_156),
        ];
        for (work, expected) in table {
            let found = StepTime::DistServeOpt13bA100.milliseconds(&work);
            assert!((found - expected).abs() < 1e-6, "{found} {expected}");
        }
    }

    #[test]
    fn the_roofline_is_bound_by_memory_in_decoding_and_by_computing_in_prompts() {
        let decode = StepWork {
            sequences: 1,
            decoding: 1,
            context_tokens: 1_001,
            decoding_context_tokens: 1_001,
            new_tokens: 1,
            ..StepWork::default()
        };
        // The step moves 10.2 GB of weights and 131 MB of KV at 3.35 TB/s.
        let found = StepTime::BlisLlama8bH100.milliseconds(&decode);
        assert!((found - ROOFLINE_DECODE_MS).abs() < 1e-6, "{found}");
        let prompt = StepWork {
            sequences: 1,
            context_tokens: 4_096,
            new_tokens: 4_096,
            prompt_tokens: 4_096,
            prompt_pairs: 4_096.0 * 4_095.0 / 2.0,
            ..StepWork::default()
        };
        let found = StepTime::BlisLlama8bH100.milliseconds(&prompt);
        assert!((found - ROOFLINE_PROMPT_MS).abs() < 1e-6, "{found}");
    }

    /// Result of BLIS's rooflineStepTime before it truncates to whole microseconds: one decoding sequence
    /// with 1,000 tokens of context, and a prompt of 4,096 tokens.
    const ROOFLINE_DECODE_MS: f64 = 3.084182849;
    const ROOFLINE_PROMPT_MS: f64 = 103.806473648;
}
