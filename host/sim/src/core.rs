//! Engine model without I/O: scheduler, prefix cache, pinned blocks and durations.
//!
//! Time is an argument (`now`, since the engine's start), randomness is seeded, and nothing sleeps. The HTTP
//! engine and a replay in virtual time therefore use the same core. It does not depend on HTTP, sockets or
//! dialects.

use std::{sync::Arc, time::Duration};

use rand::{SeedableRng, rngs::SmallRng};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use self::events::EventLog;
pub use self::{
    batch::{BatchCounts, BatchEngine, PromptKv, Sequence, Token},
    block_pool::{BlockId, BlockPool, CacheChange},
    events::CacheEvent,
    jitter::Jitter,
    limits::BatchLimits,
    pins::{Ask, Pins, Pull},
    step_time::{LeastTimes, StepTime, StepWork},
    tokens::{Object, Output, Piece, Prompt},
};

mod batch;
mod block_pool;
mod events;
mod jitter;
mod limits;
mod pins;
mod step_time;
mod tokens;

/// Longest step, milliseconds. It keeps time finite if a formula returns an absurd value.
const MAX_STEP_MS: f64 = 86_400_000.0;

/// Id of a sequence in the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobId(pub(crate) u64);

/// Requirements of a sequence.
#[derive(Clone, Debug)]
pub struct Job {
    /// Sequence hashes of the full blocks of prompt and output.
    pub chain: Arc<[u64]>,
    /// Token ids of prompt and output, for KV events; may be empty if there are no KV events.
    pub tokens: Arc<[u32]>,
    /// Multimodal objects of the prompt, for KV events.
    pub objects: Arc<[Object]>,
    /// Number of prompt tokens.
    pub isl: u32,
    /// Number of output tokens.
    pub out: u32,
    /// Source of the KV of the prompt.
    pub kv: PromptKv,
    /// Whether the sequence keeps its blocks after the last token, until it leaves.
    pub keeps_blocks: bool,
}

/// Settings of one engine.
#[derive(Clone, Copy, Debug)]
pub struct CoreConfig {
    /// Limits of the scheduler.
    pub limits: BatchLimits,
    /// Maximum number of sequences that wait for admission.
    pub max_waiting: u32,
    /// Whether sequences share the blocks of equal prefixes.
    pub prefix_caching: bool,
    /// Duration of a step.
    pub step_time: StepTime,
    /// Jitter of all durations.
    pub jitter: Jitter,
    /// Duration of the KV transfer for each token.
    pub transfer_per_token: Duration,
}

/// Reason for which a sequence was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("queue is full: {waiting} requests are waiting, limit {max}")]
    QueueFull {
        /// Number of waiting sequences.
        waiting: u32,
        /// Maximum number of waiting sequences.
        max: u32,
    },
    /// The sequence needs more blocks than the engine has.
    #[error("request needs {need} KV blocks, the engine has {capacity}")]
    TooLarge {
        /// Number of blocks needed.
        need: u32,
        /// Number of blocks of the engine.
        capacity: u32,
    },
}

/// Current load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences in the batch, prefilling or decoding.
    pub running: u32,
    /// Finished sequences that still hold their blocks, because their handoff has not begun.
    pub held: u32,
    /// Sequences in the queue, and admitted ones that wait for KV.
    pub waiting: u32,
    /// Blocks in use.
    pub used_blocks: u32,
    /// Blocks pinned for a handoff; included in `used_blocks`.
    pub pinned_blocks: u32,
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreCounts {
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Handoffs whose lease expired before they were pulled.
    pub stranded: u64,
    /// Blocks evicted from the prefix cache.
    pub evicted: u64,
    /// Sequences that lost their blocks and were computed again.
    pub preemptions: u64,
}

/// A pinned handoff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Blocks with the prompt's KV.
    pub block_ids: Vec<u32>,
}

/// Scheduler, cache, pinned blocks and durations of one engine.
#[derive(Debug)]
pub struct EngineCore {
    config: CoreConfig,
    batch: BatchEngine,
    pins: Pins,
    rng: SmallRng,
    next: u64,
    stranded: u64,
    events: EventLog,
}

impl EngineCore {
    /// Creates an idle engine with an empty cache.
    #[must_use]
    pub fn new(config: CoreConfig, seed: u64) -> Self {
        Self {
            config,
            batch: BatchEngine::new(config.limits, config.step_time),
            pins: Pins::default(),
            rng: SmallRng::seed_from_u64(seed),
            next: 0,
            stranded: 0,
            events: EventLog::default(),
        }
    }

    /// Starts to collect the changes of the cache.
    pub(crate) fn collect_events(&mut self) {
        self.events.enable();
    }

    /// Submits a sequence, which waits for the next step, or is refused.
    ///
    /// # Errors
    /// [`Refusal`] if the queue is full or the sequence can never fit.
    pub fn submit(&mut self, job: &Job) -> Result<JobId, Refusal> {
        if !self.batch.fits(job.isl, job.out) {
            let tokens = u64::from(job.isl) + u64::from(job.out);
            let need = tokens.div_ceil(u64::from(self.config.limits.block_size));
            let need = u32::try_from(need).unwrap_or(u32::MAX);
            return Err(Refusal::TooLarge { need, capacity: self.config.limits.blocks });
        }
        let (waiting, max) = (self.batch.queued(), self.config.max_waiting);
        if waiting >= max && !self.batch.admits(job.isl) {
            return Err(Refusal::QueueFull { waiting, max });
        }
        let tag = self.next;
        self.next += 1;
        self.events.add(tag, job);
        self.batch.submit(Sequence {
            tag,
            prompt: if self.config.prefix_caching { job.chain.clone() } else { unshared(&job.chain, tag) },
            isl: job.isl,
            osl: job.out,
            kv: job.kv,
            keeps_blocks: job.keeps_blocks,
        });
        Ok(JobId(tag))
    }

    /// Removes a sequence in any phase, including an ended one.
    pub fn leave(&mut self, id: JobId) {
        self.events.collect(&mut self.batch, self.config.limits.block_size);
        self.batch.leave(id.0);
        self.events.remove(id.0);
    }

    /// Ends leases and transfers that are due.
    pub fn advance(&mut self, now: Duration) {
        for (blocks, stranded) in self.pins.expire(now) {
            self.stranded += u64::from(stranded);
            self.batch.release(&blocks);
        }
    }

    /// Returns the next time at which [`EngineCore::advance`] has something to do.
    #[must_use]
    pub(crate) fn next_deadline(&self) -> Option<Duration> {
        self.pins.next_deadline()
    }

    /// Starts a step. Returns its duration, or `None` when there is nothing to compute or a step is already
    /// running.
    pub fn begin_step(&mut self) -> Option<Duration> {
        let Some(milliseconds) = self.batch.begin_step() else {
            // A sequence that awaits KV needs blocks but no step.
            self.events.collect(&mut self.batch, self.config.limits.block_size);
            return None;
        };
        let milliseconds = milliseconds * self.config.jitter.draw(&mut self.rng);
        Some(Duration::from_secs_f64(milliseconds.clamp(0.0, MAX_STEP_MS) / 1e3))
    }

    /// Returns the sequences that were admitted since the last call, with their cached prompt tokens.
    pub fn take_admitted(&mut self) -> Vec<(JobId, u32)> {
        self.batch.take_admitted().into_iter().map(|(tag, cached)| (JobId(tag), cached)).collect()
    }

    /// Ends the running step. Appends its tokens to `out`.
    pub fn end_step(&mut self, out: &mut Vec<Token>) {
        self.batch.end_step(out);
        self.events.collect(&mut self.batch, self.config.limits.block_size);
    }

    /// Returns the changes of the cache since the last call, for KV events.
    pub fn take_events(&mut self) -> Vec<CacheEvent> {
        self.events.take_events()
    }

    /// Returns whether a step is running although all its sequences have left.
    #[must_use]
    pub(crate) fn steps_for_none(&self) -> bool {
        self.batch.in_step() && self.batch.sequences().0 == 0
    }

    /// Draws the duration of the transfer of so many tokens' KV from another engine.
    pub fn transfer(&mut self, tokens: u32) -> Duration {
        (self.config.transfer_per_token * tokens).mul_f64(self.config.jitter.draw(&mut self.rng))
    }

    /// Records that the KV of a sequence with [`PromptKv::Awaited`] has arrived. Returns the first token if
    /// the transfer contains it.
    pub fn receive(&mut self, id: JobId, first_token: bool) -> Option<Token> {
        self.batch.receive(id.0, first_token)
    }

    /// Pins the prompt's blocks of a finished sequence for another engine, until they are pulled or `lease`
    /// expires.
    pub fn pin(
        &mut self,
        now: Duration,
        id: JobId,
        name: &str,
        prompt: &Prompt,
        lease: Duration,
    ) -> Option<Pinned> {
        let blocks = self.batch.take_pinned(id.0, prompt.isl())?;
        let block_ids = pins::names(&blocks).collect();
        self.pins.pin(name, blocks, prompt.fingerprint(), now + lease);
        Some(Pinned { block_ids })
    }

    /// Hands a pinned handoff to another engine. Its blocks stay until the announced `transfer` has ended.
    pub fn pull(&mut self, now: Duration, name: &str, ask: &Ask<'_>) -> Pull {
        self.pins.pull(now, name, ask)
    }

    /// Releases a pinned handoff that was not pulled: its transfer failed, or one of its legs was aborted.
    pub fn unpin(&mut self, name: &str) {
        if let Some(blocks) = self.pins.release(name) {
            self.batch.release(&blocks);
        }
    }

    /// Returns the current load.
    #[must_use]
    pub(crate) fn occupancy(&self) -> Occupancy {
        let (running, waiting) = self.batch.sequences();
        Occupancy {
            running,
            waiting,
            held: self.batch.held(),
            used_blocks: self.batch.used_blocks(),
            pinned_blocks: self.pins.blocks(),
        }
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn counts(&self) -> CoreCounts {
        let counts = self.batch.counts();
        CoreCounts {
            prefix_queries: counts.prompt_tokens,
            prefix_hits: counts.cached_tokens,
            stranded: self.stranded,
            evicted: self.batch.evicted(),
            preemptions: counts.preemptions,
        }
    }
}

/// Returns other hashes for the blocks of a sequence, which no other sequence has.
fn unshared(chain: &[u64], tag: u64) -> Arc<[u64]> {
    chain.iter().map(|hash| xxh3_64_with_seed(&hash.to_le_bytes(), tag)).collect()
}

#[cfg(test)]
mod tests;
