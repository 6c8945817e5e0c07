//! The cost of a worker. Knows columns of numbers and no facts.
//!
//! The passes over columns have no branches, so that the compiler uses SIMD.

use serde::Deserialize;

/// Range of a worker's measured time relative to the mean of the candidates. What is outside counts as the
/// limit: a single slow request, such as the first one of an engine that still compiles, must not end the
/// traffic of its worker.
const SLOWNESS: (f32, f32) = (0.25, 4.0);

/// Age at which an engine's queue says nothing any more, milliseconds: while some engines' reports are new
/// and others' old, requests would gather where the queue is not known yet.
const LONGEST_AGE_MS: f32 = 1_000.0;

/// Number of a request's lives for which a copy of a prompt is expected to stay in a cache.
const COPY_LIFE: f32 = 3.0;

/// Settings of the operator.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Prompt tokens that take as long to compute as the fixed part of a step.
    pub step_tokens: f32,
    /// Weight of the delay of each active request by this prompt's computation.
    pub delayed_weight: f32,
    /// Weight of the delay of each active request by this prompt's context, for each prompt token.
    pub shared_weight: f32,
    /// Computed prompt tokens that take as long as one token of context that is booked on the worker.
    pub context_weight: f32,
    /// Tokens by which the context of an active request still grows, on average.
    pub growth_tokens: f32,
    /// Computed prompt tokens that take as long as the transfer of one token's KV to a decode worker.
    pub transfer_weight: f32,
    /// Length of an answer, tokens, for which `shared-weight` and `context-weight` hold; 0: for any.
    pub output_tokens: f32,
    /// Share of the measured difference of speed between workers that counts.
    pub speed_trust: f32,
    /// Share of decisions that ignore measured times.
    pub explore: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            step_tokens: 1_000.0,
            delayed_weight: 0.25,
            shared_weight: 0.03,
            context_weight: 0.08,
            growth_tokens: 500.0,
            transfer_weight: 0.2,
            output_tokens: 256.0,
            speed_trust: 1.0,
            explore: 0.03,
        }
    }
}

impl Settings {
    /// Checks ranges.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        let factors = [
            ("step-tokens", self.step_tokens),
            ("delayed-weight", self.delayed_weight),
            ("shared-weight", self.shared_weight),
            ("context-weight", self.context_weight),
            ("growth-tokens", self.growth_tokens),
            ("transfer-weight", self.transfer_weight),
            ("output-tokens", self.output_tokens),
        ];
        // The largest cost stays far below the largest single.
        if let Some((name, value)) = factors.iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            return Err(format!("{name}: {value} is not a finite number of 0 to 1000000"));
        }
        let shares = [("speed-trust", f64::from(self.speed_trust)), ("explore", self.explore)];
        match shares.iter().find(|(_, value)| !(0.0..=1.0).contains(value)) {
            Some((name, value)) => Err(format!("{name}: {value} is not within 0 to 1")),
            None => Ok(()),
        }
    }
}

/// A request and what its leg does with the prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    /// Prompt tokens.
    pub(crate) tokens: f32,
    /// Tokens of a block, at least 1.
    pub(crate) block: f32,
    /// Credit of a cached block on the device, in host memory and on disk.
    pub(crate) credits: [f32; 3],
    /// Weight of the prefill, of the router configuration.
    pub(crate) load_scale: f32,
    /// Blocks that an active request counts for in addition, of the router configuration.
    pub(crate) request_blocks: f32,
    /// Whether the leg computes the prompt, and does not receive it from another worker.
    pub(crate) computes: bool,
    /// Length of an answer relative to `output_tokens`.
    pub(crate) length: f32,
    /// Whether requests emit tokens on the workers, so that their context grows.
    pub(crate) grows: bool,
    /// Tokens of an answer.
    pub(crate) answer: f32,
}

/// Worker facts, one slice for each fact, all of equal length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    /// Prompt tokens whose prefill has not ended.
    pub(crate) waiting: &'a [u32],
    /// KV blocks in use, with this request.
    pub(crate) context: &'a [u32],
    /// Active requests.
    pub(crate) requests: &'a [u32],
    /// Cached prefix blocks by tier.
    pub(crate) cached: [&'a [u32]; 3],
    /// Requests that the engine computes, as it said last.
    pub(crate) running: &'a [u32],
    /// Requests that wait in the engine, as it said last.
    pub(crate) queue: &'a [u32],
    /// Age of what the engine said, milliseconds.
    pub(crate) age: &'a [u32],
    /// Active requests with much of the same prompt.
    pub(crate) like: &'a [u32],
}

impl Settings {
    /// Returns the cost of each row: prompt tokens whose computation takes as long as the request delays
    /// itself and others on this worker.
    pub(crate) fn costs(&self, prompt: &Prompt, columns: &Columns<'_>) -> Vec<f32> {
        let growth = if prompt.grows { self.growth_tokens } else { 0.0 };
        let context = self.context_weight * prompt.length;
        let each = context * growth + prompt.request_blocks * prompt.block;
        let rows = columns.requests.iter().zip(columns.context);
        let later = rows
            .map(|(requests, blocks)| context * single(*blocks) * prompt.block + each * single(*requests));
        let mut costs: Vec<f32> = later.collect();
        if prompt.computes {
            self.add_prefill(prompt, columns, &mut costs);
        } else {
            self.add_transfer(prompt, columns, &mut costs);
        }
        self.add_wait_for_batch(prompt, columns, &mut costs);
        costs
    }

    /// Adds the time until the engine has room in its batch: until one of the requests that it computes ends.
    fn add_wait_for_batch(&self, prompt: &Prompt, columns: &Columns<'_>, costs: &mut [f32]) {
        // Seldom do requests wait in an engine.
        if columns.queue.iter().all(|queue| *queue == 0) {
            return;
        }
        let answer = prompt.answer * self.step_tokens;
        let engines = columns.queue.iter().zip(columns.running).zip(columns.age);
        let rows = engines.zip(columns.requests).zip(columns.waiting);
        for (cost, ((((queue, running), age), requests), waiting)) in costs.iter_mut().zip(rows) {
            // Requests that wait for prompts before theirs are not a sign of a full batch.
            let for_prompts = single(*waiting) / self.step_tokens.max(1.0);
            let without_room = single(*requests) + 1.0 - single(*running) - for_prompts;
            let trust = 1.0 - single(*age) / LONGEST_AGE_MS;
            if *queue > 0 && *running > 0 && without_room > 0.0 && trust > 0.0 {
                *cost += trust * answer * without_room / single(*running);
            }
        }
    }

    /// Adds the transfer of what each worker lacks of the prompt. A worker that decoded the last answer of a
    /// session has most of the next prompt.
    fn add_transfer(&self, prompt: &Prompt, columns: &Columns<'_>, costs: &mut [f32]) {
        for (cost, cached) in costs.iter_mut().zip(columns.cached[0]) {
            let lacking = prompt.tokens - single(*cached) * prompt.block;
            *cost += if lacking > 0.0 { self.transfer_weight * lacking } else { 0.0 };
        }
    }

    fn add_prefill(&self, prompt: &Prompt, columns: &Columns<'_>, costs: &mut [f32]) {
        let [device, host, disk] = columns.cached;
        let own = device.iter().zip(host).zip(disk).map(|((device, host), disk)| {
            let cached = prompt.credits[0] * single(*device)
                + prompt.credits[1] * single(*host)
                + prompt.credits[2] * single(*disk);
            let new = prompt.tokens - cached * prompt.block;
            // The last token is always computed.
            if new > 1.0 { new } else { 1.0 }
        });
        let own: Vec<f32> = own.collect();
        let rows = columns.waiting.iter().zip(columns.requests);
        for (cost, (waiting, requests)) in costs.iter_mut().zip(rows) {
            let step = if *waiting > 0 { self.step_tokens } else { 0.0 };
            let shared = self.shared_weight * prompt.length * single(*requests) * prompt.tokens;
            *cost += prompt.load_scale * (single(*waiting) + step + shared);
        }
        self.add_own(prompt, columns, &own, costs);
    }

    /// Adds what each worker computes of the prompt, `own`, to the costs of its load. A further copy of what
    /// a worker has saves something while the workers that have it carry more load than the others: for the
    /// requests that share it and will find it there. It saves at most what it costs.
    fn add_own(&self, prompt: &Prompt, columns: &Columns<'_>, own: &[f32], costs: &mut [f32]) {
        // Whole numbers can be added in any order, so that the compiler adds several at once.
        let like: u64 = columns.like.iter().map(|requests| u64::from(*requests)).sum();
        let least = smallest(own.iter().copied());
        let half = (least + prompt.tokens) / 2.0;
        let copies: u32 = own.iter().map(|own| u32::from(*own < half)).sum();
        let (mut each, mut load, mut above) = (0.0, 0.0, 0.0);
        if like > 0 && copies > 0 {
            each = COPY_LIFE * mean(like, copies + 1);
            let of_copies = costs.iter().zip(own);
            let of_copies = of_copies.map(|(cost, own)| if *own < half { *cost } else { 0.0 });
            load = of_copies.fold(0.0, |sum, cost| sum + cost) / single(copies);
            above = load - average(costs);
        }
        for ((cost, own), requests) in costs.iter_mut().zip(own).zip(columns.requests) {
            let delays = prompt.load_scale * (1.0 + self.delayed_weight * single(*requests));
            let less = load - *cost;
            let less = if less < above { less } else { above };
            let saved = if less > 0.0 { each * less } else { 0.0 };
            let again = (own - least) * delays;
            *cost += own * delays - if saved < again { saved } else { again };
        }
    }
}

fn smallest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(f32::MAX, |least, value| if value < least { value } else { least })
}

/// Returns the mean of the costs, which are not empty. Adds eight at once.
fn average(costs: &[f32]) -> f32 {
    let mut sums = [0.0; 8];
    for eight in costs.chunks(8) {
        sums.iter_mut().zip(eight).for_each(|(sum, cost)| *sum += cost);
    }
    sums.iter().sum::<f32>() / single(u32::try_from(costs.len()).unwrap_or(u32::MAX))
}

/// Multiplies each cost by the worker's measured time relative to the mean of those measured, of which
/// `trust` counts.
pub(crate) fn scale(costs: &mut [f32], relative: &[f32], trust: f32) {
    for (cost, relative) in costs.iter_mut().zip(relative) {
        *cost *= 1.0 + trust * (relative - 1.0);
    }
}

/// Returns each worker's measured time relative to the mean of those measured, within [`SLOWNESS`]. A worker
/// that was not measured, 0, counts as the mean.
pub(crate) fn relative(measured: &[u32]) -> Vec<f32> {
    // Whole numbers can be added in any order, so that the compiler adds several at once.
    let sum: u64 = measured.iter().map(|time| u64::from(*time)).sum();
    let known: u32 = measured.iter().map(|time| u32::from(*time > 0)).sum();
    let mean = if known > 0 { mean(sum, known) } else { 1.0 };
    let rows = measured.iter().map(|time| {
        let relative = single(*time) / mean;
        let low = if relative > SLOWNESS.0 { relative } else { SLOWNESS.0 };
        let within = if low < SLOWNESS.1 { low } else { SLOWNESS.1 };
        if *time > 0 { within } else { 1.0 }
    });
    rows.collect()
}

/// Reduces each relative time to the smaller difference from the mean that both measurements show; 1 where
/// they contradict each other. Prompts of unequal length disturb the two in different ways.
pub(crate) fn agree(first: &mut [f32], second: &[f32]) {
    for (first, second) in first.iter_mut().zip(second) {
        let (low, high) = if *first < *second { (*first, *second) } else { (*second, *first) };
        let slow = if low > 1.0 { low } else { 1.0 };
        *first = if high < 1.0 { high } else { slow };
    }
}

#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a mean of times")]
fn mean(sum: u64, count: u32) -> f32 {
    (sum as f64 / f64::from(count)) as f32
}

/// Applies preferred taints, as `kv-aware` does: `exp(-tanh(sum))`.
pub(crate) fn prefer(costs: &mut [f32], preference: &[f32]) {
    let bits = preference.iter().fold(0, |bits, sum| bits | sum.to_bits());
    // Zero of either sign means no preference.
    if bits << 1 == 0 {
        return;
    }
    for (cost, sum) in costs.iter_mut().zip(preference) {
        *cost *= (-sum.tanh()).exp();
    }
}

/// Converts a count.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24 where differences matter")]
pub(crate) fn single(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::Rng;

    use super::*;

    #[test]
    fn a_measured_time_scales_by_the_trusted_share_of_its_difference() {
        let scaled = |measured: &[u32], trust: f32| {
            let mut costs = vec![100.0; measured.len()];
            scale(&mut costs, &relative(measured), trust);
            costs
        };
        assert_eq!(scaled(&[1_000, 3_000], 1.0), [50.0, 150.0]);
        assert_eq!(scaled(&[1_000, 3_000], 0.5), [75.0, 125.0]);
        assert_eq!(scaled(&[1_000, 3_000], 0.0), [100.0, 100.0]);
        assert_eq!(scaled(&[1_000, 3_000, 0], 1.0), [50.0, 150.0, 100.0], "not measured: the mean");
        assert_eq!(scaled(&[0, 0], 1.0), [100.0, 100.0]);
        assert_eq!(scaled(&[1, 1, 1, 1, 1, 999], 1.0), [25.0, 25.0, 25.0, 25.0, 25.0, 400.0]);
    }

    #[test]
    fn two_measurements_count_as_far_as_they_agree() {
        let mut times = [2.0, 3.0, 0.5, 0.25, 2.0, 0.5, 1.0];
        agree(&mut times, &[3.0, 2.0, 0.25, 0.5, 0.5, 2.0, 1.0]);
        assert_eq!(times, [2.0, 2.0, 0.5, 0.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn any_bits_and_the_largest_settings_give_finite_costs() {
        let largest = Settings {
            step_tokens: 1e6,
            delayed_weight: 1e6,
            shared_weight: 1e6,
            context_weight: 1e6,
            growth_tokens: 1e6,
            ..Settings::default()
        };
        assert_eq!(largest.check(), Ok(()));
        for seed in 0..2_000 {
            let mut rng = Rng::new(seed);
            let mut column = || -> Vec<u32> { (0..8).map(|_| (rng.bits() >> 32) as u32).collect() };
            let (waiting, context, requests, measured) = (column(), column(), column(), column());
            let cached = [column(), column(), column()];
            let (running, queue, age, like) = (column(), column(), column(), column());
            let columns = Columns {
                waiting: &waiting,
                context: &context,
                requests: &requests,
                cached: [&cached[0], &cached[1], &cached[2]],
                running: &running,
                queue: &queue,
                age: &age,
                like: &like,
            };
            for settings in [Settings::default(), largest] {
                let tokens = single(waiting[0]);
                let credits = [1.0, 0.75, 0.25];
                let prompt = Prompt {
                    tokens,
                    block: 65_536.0,
                    credits,
                    load_scale: 2.0,
                    request_blocks: 3.0,
                    computes: true,
                    length: 1_024.0,
                    grows: true,
                    answer: 1e6,
                };
                let mut costs = settings.costs(&prompt, &columns);
                scale(&mut costs, &relative(&measured), 1.0);
                assert!(costs.iter().all(|cost| cost.is_finite() && *cost >= 0.0), "seed {seed}: {costs:?}");
            }
        }
    }
}
