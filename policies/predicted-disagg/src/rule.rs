//! The figures that `predicted-disagg` compares, and what forbids a local prefill. Knows numbers and no
//! facts. The crate that explains decisions to operators (`host/admin-cli`) compiles this file, too.

/// Age from which an engine's figures do not count, milliseconds: twice the default interval at which they
/// are read.
const OLD_MS: u32 = 10_000;

/// Share of an engine's KV cache in use from which it counts as full: a further prompt may make it preempt
/// requests, which then compute their prompts again.
const FULL: f32 = 0.9;

/// A prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prompt {
    /// Tokens.
    pub(crate) tokens: u32,
    /// Tokens of a block, at least 1.
    pub(crate) block: u32,
    /// Target for the inter-token latency, microseconds; 0: none.
    pub(crate) itl_target: u32,
}

/// A worker that could prefill.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worker {
    /// Prompt tokens whose prefill has not ended.
    pub(crate) waiting: u32,
    /// Cached prefix blocks on the device.
    pub(crate) cached: u32,
}

/// What the decode worker does beside prefill. A figure that its engine does not tell is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Whether the worker can prefill.
    pub(crate) can_prefill: bool,
    /// Requests that are booked.
    pub(crate) booked: u32,
    /// Requests that the engine computes.
    pub(crate) running: u32,
    /// Requests that wait in the engine.
    pub(crate) queue: u32,
    /// Share of the engine's KV cache in use.
    pub(crate) kv_usage: f32,
    /// Age of the engine's figures, milliseconds.
    pub(crate) age: u32,
    /// Measured time of a prefill, microseconds for each 1,000 tokens; 0: not measured.
    pub(crate) prefill_time: u32,
}

/// What forbids a prefill on the decode worker, whatever it costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Obstacle {
    /// The worker cannot prefill.
    CannotPrefill,
    /// This share of its engine's KV cache is in use.
    Full(f32),
    /// Tokens of its requests would wait for this time, microseconds, which is longer than the target.
    MissesTarget(f32),
    /// There is a target, and the worker's speed is not measured.
    UnknownSpeed,
}

/// Returns the row and the tokens of the prefill worker that computes the fewest until the prompt's prefill
/// ends.
pub(crate) fn best(prompt: Prompt, prefill: impl Iterator<Item = Worker>) -> Option<(usize, f32)> {
    let until_computed = prefill.map(|worker| worker.until_computed(prompt));
    until_computed.enumerate().min_by(|(_, one), (_, other)| one.total_cmp(other))
}

impl Load {
    /// Returns what forbids that `own` tokens of the prompt are computed here.
    pub(crate) fn obstacle(self, prompt: Prompt, own: f32) -> Option<Obstacle> {
        if !self.can_prefill {
            return Some(Obstacle::CannotPrefill);
        }
        if !self.is_old() && self.kv_usage >= FULL {
            return Some(Obstacle::Full(self.kv_usage));
        }
        if prompt.itl_target == 0 || self.requests() == 0 {
            return None;
        }
        let takes = own * single(self.prefill_time) / 1e3;
        match self.prefill_time {
            0 => Some(Obstacle::UnknownSpeed),
            _ => (takes > single(prompt.itl_target)).then_some(Obstacle::MissesTarget(takes)),
        }
    }

    /// Returns the requests that a local prefill delays. Only the engine knows those of other gateways.
    pub(crate) fn requests(self) -> u32 {
        let reported = if self.is_old() { 0 } else { self.running.saturating_add(self.queue) };
        self.booked.max(reported)
    }

    fn is_old(self) -> bool {
        self.age > OLD_MS
    }
}

impl Worker {
    /// Returns the prompt tokens that this worker computes until the prompt's prefill ends.
    pub(crate) fn until_computed(self, prompt: Prompt) -> f32 {
        single(self.waiting) + self.own(prompt)
    }

    /// Returns the tokens of the prompt that this worker computes.
    pub(crate) fn own(self, prompt: Prompt) -> f32 {
        let cached = self.cached.saturating_mul(prompt.block);
        // The last token is always computed.
        single(prompt.tokens.saturating_sub(cached).max(1))
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^24 where differences matter")]
fn single(count: u32) -> f32 {
    count as f32
}
