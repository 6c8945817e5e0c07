//! Scores in [0, 1], higher is better, and the cost that combines them. Knows columns of numbers, no facts
//! and no calls.
//!
//! The passes over columns have no branches, so that the compiler uses SIMD.

use serde::Deserialize;

/// Load age of a worker without figures.
pub(crate) const NO_FIGURES: u32 = u32::MAX;

/// Weights of the scores, and the age limit of load figures.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Settings {
    /// Weight of the queue score.
    pub queue: f32,
    /// Weight of the KV score.
    pub kv: f32,
    /// Weight of the prefix score.
    pub prefix: f32,
    /// Weight of the load score: the engine queue against a threshold.
    pub load: f32,
    /// Queue at which the load score is 0, requests.
    pub load_threshold: u32,
    /// Weight of the score of running requests.
    pub running: f32,
    /// Weight of the score of active requests.
    pub active: f32,
    /// A worker with at most this many active requests is idle; its score is 1.
    pub idle_threshold: u32,
    /// Largest score of a worker that is not idle, 0 to 1.
    pub max_busy_score: f32,
    /// Weight of the score of prompt tokens that wait for their prefill.
    pub tokens: f32,
    /// Tokens at which that score is 0.
    pub token_threshold: u32,
    /// Weight of the score of a loaded LoRA adapter.
    pub lora: f32,
    /// Age above which load figures count as unknown, milliseconds.
    pub max_load_age_ms: u32,
    /// Leading blocks of a prompt that the prefix score looks at; 0: all.
    pub max_prefix_blocks: u32,
}

/// Worker facts, one slice for each fact, all of equal length.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Columns<'a> {
    /// Waiting requests in the engine.
    pub(crate) queue: &'a [u32],
    /// Share of the KV cache in use, 0 to 1.
    pub(crate) kv_usage: &'a [f32],
    /// Age of the two above, milliseconds.
    pub(crate) load_age_ms: &'a [u32],
    /// Cached prefix blocks on the device.
    pub(crate) device: &'a [u32],
    /// Cached prefix blocks in host memory, beyond the device's.
    pub(crate) host: &'a [u32],
    /// Cached prefix blocks on disk, beyond the host's.
    pub(crate) disk: &'a [u32],
    /// Running requests in the engine. This and the columns below are empty unless their score has a weight.
    pub(crate) running: &'a [u32],
    /// Active requests.
    pub(crate) active: &'a [u32],
    /// Prompt tokens that wait for their prefill.
    pub(crate) prefill_tokens: &'a [u32],
    /// 1: the request's LoRA adapter is loaded.
    pub(crate) lora_loaded: &'a [u32],
}

/// Size of the request.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Prompt {
    /// Blocks of the prompt.
    pub(crate) blocks: u32,
    /// Tokens of a block.
    pub(crate) block_size: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            queue: 2.0,
            kv: 2.0,
            prefix: 3.0,
            load: 0.0,
            load_threshold: 128,
            running: 0.0,
            active: 0.0,
            idle_threshold: 0,
            max_busy_score: 1.0,
            tokens: 0.0,
            token_threshold: 4_194_304,
            lora: 0.0,
            max_load_age_ms: 30_000,
            max_prefix_blocks: 256,
        }
    }
}

impl Settings {
    /// Checks that the weights and their sum are finite and not negative. No cost exceeds the sum.
    ///
    /// # Errors
    /// Names the first weight that is not.
    pub fn check(&self) -> Result<(), String> {
        let all = [
            ("queue", self.queue),
            ("kv", self.kv),
            ("prefix", self.prefix),
            ("load", self.load),
            ("running", self.running),
            ("active", self.active),
            ("tokens", self.tokens),
            ("lora", self.lora),
        ];
        if let Some((name, weight)) = all.iter().find(|(_, weight)| !weight.is_finite() || *weight < 0.0) {
            return Err(format!("{name}: {weight} is not a finite number of 0 or more"));
        }
        if !all.iter().map(|(_, weight)| weight).sum::<f32>().is_finite() {
            return Err("the sum of the weights is not finite".to_owned());
        }
        if !(0.0..=1.0).contains(&self.max_busy_score) {
            return Err(format!("max-busy-score: {} is not between 0 and 1", self.max_busy_score));
        }
        for (name, threshold) in [("load", self.load_threshold), ("token", self.token_threshold)] {
            if threshold == 0 {
                return Err(format!("{name}-threshold: 0 is not a threshold: expected 1 or more"));
            }
        }
        Ok(())
    }

    /// Returns the cost of each row: the sum of `weight * (1 - score)`. Rows of unknown load get the mean of
    /// the known ones.
    pub(crate) fn costs(&self, prompt: Prompt, columns: &Columns<'_>) -> Vec<f32> {
        let mut costs = self.load_costs(columns);
        let blocks = match self.max_prefix_blocks {
            0 => single(prompt.blocks),
            most => single(prompt.blocks.min(most)),
        };
        let cached = columns.device.iter().zip(columns.host).zip(columns.disk);
        for (cost, ((device, host), disk)) in costs.iter_mut().zip(cached) {
            let cached = single(*device) + single(*host) + single(*disk);
            *cost += self.prefix * (1.0 - prefix_score(cached, blocks));
        }
        self.add_gateway_scores(prompt, columns, &mut costs);
        costs
    }

    /// Adds the terms of what the gateway knows itself, which is never unknown.
    fn add_gateway_scores(&self, prompt: Prompt, columns: &Columns<'_>, costs: &mut [f32]) {
        let most = columns.active.iter().copied().max().unwrap_or(0);
        for (cost, active) in costs.iter_mut().zip(columns.active) {
            let busy = single(most.saturating_sub(*active)) / single(most.max(1)) * self.max_busy_score;
            *cost += self.active * (1.0 - if *active <= self.idle_threshold { 1.0 } else { busy });
        }
        let cached = columns.device.iter().zip(columns.host).zip(columns.disk);
        for ((cost, waiting), ((device, host), disk)) in
            costs.iter_mut().zip(columns.prefill_tokens).zip(cached)
        {
            let cached = device.saturating_add(*host).saturating_add(*disk);
            let own = prompt.blocks.saturating_sub(cached).saturating_mul(prompt.block_size);
            *cost += self.tokens * share_of(waiting.saturating_add(own), self.token_threshold);
        }
        for (cost, loaded) in costs.iter_mut().zip(columns.lora_loaded) {
            *cost += self.lora * (1.0 - single((*loaded).min(1)));
        }
    }

    /// Returns the queue and KV terms of each row.
    fn load_costs(&self, columns: &Columns<'_>) -> Vec<f32> {
        let rows = || columns.queue.iter().zip(columns.kv_usage).zip(columns.load_age_ms);
        let (mut shortest, mut longest, mut unknown) = (u32::MAX, 0, 0);
        for ((queue, usage), age) in rows() {
            let known = self.known(*usage, *age);
            shortest = shortest.min(if known { *queue } else { u32::MAX });
            longest = longest.max(if known { *queue } else { 0 });
            unknown += u32::from(!known);
        }
        let costs = rows().map(|((queue, usage), age)| {
            let cost = self.queue * (1.0 - queue_score(*queue, shortest, longest))
                + self.kv * (1.0 - kv_score(*usage));
            if self.known(*usage, *age) { cost } else { 0.0 }
        });
        let mut costs: Vec<f32> = costs.collect();
        self.add_engine_scores(columns, &mut costs);
        if unknown > 0 {
            let mean = mean(&costs, columns.queue.len().saturating_sub(unknown as usize));
            for (cost, (usage, age)) in costs.iter_mut().zip(columns.kv_usage.iter().zip(columns.load_age_ms))
            {
                *cost = if self.known(*usage, *age) { *cost } else { mean };
            }
        }
        costs
    }

    /// Adds the terms of further figures of the engines, to the rows of known load.
    fn add_engine_scores(&self, columns: &Columns<'_>, costs: &mut [f32]) {
        let known = || {
            let figures = columns.kv_usage.iter().zip(columns.load_age_ms);
            figures.map(|(usage, age)| self.known(*usage, *age))
        };
        if self.load > 0.0 {
            for ((cost, queue), _) in
                costs.iter_mut().zip(columns.queue).zip(known()).filter(|(_, known)| *known)
            {
                *cost += self.load * (0.5 + 0.5 * share_of(*queue, self.load_threshold));
            }
        }
        let running = || columns.running.iter().zip(known()).filter(|(_, known)| *known);
        let fewest = running().map(|(running, _)| *running).min().unwrap_or(0);
        let most = running().map(|(running, _)| *running).max().unwrap_or(0);
        for ((cost, running), _) in
            costs.iter_mut().zip(columns.running).zip(known()).filter(|(_, known)| *known)
        {
            *cost += self.running * (1.0 - queue_score(*running, fewest, most));
        }
    }

    /// Returns whether the engine's figures are recent and valid.
    fn known(&self, kv_usage: f32, age_ms: u32) -> bool {
        let fresh = age_ms <= self.max_load_age_ms.min(NO_FIGURES - 1);
        fresh & kv_usage.is_finite()
    }
}

fn queue_score(queue: u32, shortest: u32, longest: u32) -> f32 {
    let score = single(longest.wrapping_sub(queue)) / single(longest.wrapping_sub(shortest));
    if longest == shortest { 1.0 } else { score }
}

/// Returns `count / threshold`, at most 1.
fn share_of(count: u32, threshold: u32) -> f32 {
    single(count.min(threshold)) / single(threshold)
}

fn kv_score(usage: f32) -> f32 {
    // `f32::clamp` and `f32::min` handle NaN by a function call for each row.
    let used = if usage > 0.0 { usage } else { 0.0 };
    1.0 - if used < 1.0 { used } else { 1.0 }
}

fn prefix_score(cached: f32, request_blocks: f32) -> f32 {
    let share = cached / request_blocks;
    let score = if share < 1.0 { share } else { 1.0 };
    if request_blocks > 0.0 { score } else { 0.0 }
}

/// Returns the mean of the known costs, 0 when there are none. Unknown costs are 0. The sum is an `f64`,
/// which large costs cannot overflow.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "few rows, and the mean of singles fits a single"
)]
fn mean(costs: &[f32], known: usize) -> f32 {
    let sum: f64 = costs.iter().map(|cost| f64::from(*cost)).sum();
    (sum / known.max(1) as f64) as f32
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24")]
fn single(count: u32) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests {
    use pointsman_policy_sdk::Rng;

    use super::*;

    fn prompt(blocks: u32) -> Prompt {
        Prompt { blocks, block_size: 16 }
    }

    #[test]
    fn the_shortest_queue_scores_one_and_the_longest_zero() {
        assert_eq!(queue_score(3, 3, 11), 1.0);
        assert_eq!(queue_score(5, 3, 11), 0.75);
        assert_eq!(queue_score(11, 3, 11), 0.0);
        assert_eq!(queue_score(u32::MAX, 0, u32::MAX), 0.0);
    }

    #[test]
    fn blocks_beyond_the_limit_count_neither_as_prompt_nor_as_cached() {
        let columns = Columns {
            queue: &[0; 3],
            kv_usage: &[0.0; 3],
            load_age_ms: &[0; 3],
            device: &[1_000, 256, 128],
            host: &[0; 3],
            disk: &[0; 3],
            ..Columns::default()
        };
        assert_eq!(Settings::default().costs(prompt(1_000), &columns), [0.0, 0.0, 1.5]);
        let all = Settings { max_prefix_blocks: 0, ..Settings::default() };
        assert_eq!(all.costs(prompt(1_000), &columns)[0], 0.0);
        assert!(all.costs(prompt(1_000), &columns)[1] > 2.0);
    }

    #[test]
    fn equal_queues_all_score_one() {
        assert_eq!(queue_score(9, 9, 9), 1.0);
    }

    #[test]
    fn a_stale_row_does_not_stretch_the_scale_of_the_queues() {
        let columns = Columns {
            queue: &[0, 2, 4_000],
            kv_usage: &[0.0; 3],
            load_age_ms: &[0, 0, 30_001],
            device: &[1; 3],
            host: &[0; 3],
            disk: &[0; 3],
            ..Columns::default()
        };
        assert_eq!(Settings::default().costs(prompt(1), &columns), [0.0, 2.0, 1.0]);
    }

    #[test]
    fn scores_stay_between_zero_and_one() {
        for usage in [-1.0, -0.0, 0.3, 1.0, 7.0, f32::MAX, f32::MIN] {
            assert!((0.0..=1.0).contains(&kv_score(usage)), "{usage}");
        }
        for (cached, blocks) in [(0, 0), (7, 0), (0, 7), (7, 7), (u32::MAX, 1), (u32::MAX, u32::MAX)] {
            let score = prefix_score(single(cached), single(blocks));
            assert!((0.0..=1.0).contains(&score), "{cached} / {blocks}");
        }
    }

    #[test]
    fn tiers_that_overflow_together_are_a_whole_prefix() {
        let columns = Columns {
            queue: &[0],
            kv_usage: &[0.0],
            load_age_ms: &[0],
            device: &[u32::MAX],
            host: &[u32::MAX],
            disk: &[1],
            ..Columns::default()
        };
        assert_eq!(Settings::default().costs(prompt(4), &columns), [0.0]);
    }

    #[test]
    fn any_bits_and_the_largest_weights_give_finite_costs() {
        let largest = Settings {
            queue: 4e37,
            kv: 4e37,
            prefix: 4e37,
            load: 4e37,
            running: 4e37,
            active: 4e37,
            tokens: 4e37,
            lora: 4e37,
            max_load_age_ms: u32::MAX,
            max_prefix_blocks: 0,
            ..Settings::default()
        };
        assert_eq!(largest.check(), Ok(()));
        for seed in 0..2_000 {
            let mut rng = Rng::new(seed);
            let mut column = || -> Vec<u32> { (0..8).map(|_| (rng.bits() >> 32) as u32).collect() };
            let usage: Vec<f32> = column().into_iter().map(f32::from_bits).collect();
            let (queue, age, device, host, disk) = (column(), column(), column(), column(), column());
            let columns = Columns {
                queue: &queue,
                kv_usage: &usage,
                load_age_ms: &age,
                device: &device,
                host: &host,
                disk: &disk,
                running: &device,
                active: &disk,
                prefill_tokens: &host,
                lora_loaded: &queue,
            };
            for settings in [Settings::default(), largest] {
                let costs = settings.costs(Prompt { blocks: queue[0], block_size: age[0] }, &columns);
                assert_eq!(costs.len(), 8);
                assert!(costs.iter().all(|cost| cost.is_finite() && *cost >= 0.0), "seed {seed}: {costs:?}");
            }
        }
    }
}
