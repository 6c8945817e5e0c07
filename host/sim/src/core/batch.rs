//! Continuous batching: an engine that runs step by step, with chunked prefill, paged KV, a prefix cache and
//! preemption, like vLLM's scheduler.
//!
//! A step first runs the admitted sequences in order, with one token or a chunk of the prompt each. It then
//! admits waiting sequences while the step's budget of tokens lasts. When blocks run out, the sequence that
//! was admitted last is preempted: it loses its blocks and computes them again later.

use std::collections::{HashMap, VecDeque};

use super::{
    block_pool::{BlockId, BlockPool, CacheChange},
    limits::BatchLimits,
    step_time::{StepTime, StepWork},
};

use self::sequence::Running;
pub use self::sequence::{PromptKv, Sequence, Token};

mod ahead;
mod handoffs;
mod sequence;

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Number of steps.
    pub steps: u64,
    /// Number of prompt tokens of admitted sequences. A preempted sequence counts once.
    pub prompt_tokens: u64,
    /// Prompt tokens that were cached.
    pub cached_tokens: u64,
    /// Number of preemptions.
    pub preemptions: u64,
}

/// One engine.
#[derive(Clone, Debug)]
pub struct BatchEngine {
    limits: BatchLimits,
    time: StepTime,
    pool: BlockPool,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    /// Admitted sequences that await KV from another engine.
    fetching: Vec<Running>,
    in_step: bool,
    /// Work of the newest step.
    work: StepWork,
    /// Cached prompt tokens of the sequences that were first admitted in the current step, by tag.
    admitted: Vec<(u64, u32)>,
    counts: BatchCounts,
    /// Finished prefills whose blocks stay until another engine has read them, by tag.
    pinned: HashMap<u64, Vec<BlockId>>,
}

impl BatchEngine {
    /// Creates an idle engine with an empty cache.
    #[must_use]
    pub fn new(limits: BatchLimits, time: StepTime) -> Self {
        Self {
            pool: BlockPool::new(limits.blocks),
            limits,
            time,
            waiting: VecDeque::new(),
            running: Vec::new(),
            fetching: Vec::new(),
            in_step: false,
            work: StepWork::default(),
            admitted: Vec::new(),
            counts: BatchCounts::default(),
            pinned: HashMap::new(),
        }
    }

    /// Returns whether the engine could ever run a sequence of this size.
    #[must_use]
    pub fn fits(&self, isl: u32, osl: u32) -> bool {
        let tokens = u64::from(isl) + u64::from(osl);
        tokens.div_ceil(u64::from(self.limits.block_size)) <= u64::from(self.limits.blocks)
    }

    /// Queues a sequence.
    pub fn submit(&mut self, sequence: Sequence) {
        self.waiting.push_back(Running::new(sequence));
    }

    /// Starts a step. Returns its duration in milliseconds, or `None` when there is nothing to do or a step
    /// is already running.
    pub fn begin_step(&mut self) -> Option<f64> {
        if self.in_step {
            return None;
        }
        let mut budget = self.limits.max_batched_tokens;
        let preempted = self.schedule_running(&mut budget);
        // A preempted sequence is not admitted again in the same step, unless nothing else is left to do.
        if !preempted || self.running.is_empty() {
            self.admit(&mut budget);
        }
        let work = self.work();
        if work.sequences == 0 {
            return None;
        }
        self.in_step = true;
        self.work = work;
        self.counts.steps += 1;
        Some(self.time.milliseconds(&work))
    }

    /// Returns the work of the newest step.
    #[must_use]
    pub fn step_work(&self) -> StepWork {
        self.work
    }

    /// Ends the running step. Appends its tokens to `out`.
    pub fn end_step(&mut self, out: &mut Vec<Token>) {
        self.in_step = false;
        let mut place = 0;
        while let Some(running) = self.running.get_mut(place) {
            running.scheduled = 0;
            if running.computed < running.known_tokens() {
                place += 1;
                continue;
            }
            running.produced += 1;
            let (tag, number) = (running.sequence.tag, running.produced);
            let last = number >= running.sequence.osl;
            out.push(Token { tag, number, last });
            if !last {
                place += 1;
                continue;
            }
            let ended = self.running.remove(place);
            self.end(ended);
        }
    }

    /// Returns the sequences that were admitted since the last call, with their cached prompt tokens.
    pub fn take_admitted(&mut self) -> Vec<(u64, u32)> {
        std::mem::take(&mut self.admitted)
    }

    /// Returns the changes of the cache since the last call.
    pub fn take_changes(&mut self) -> VecDeque<CacheChange> {
        self.pool.take_changes()
    }

    /// Returns the numbers of running and waiting sequences. A sequence that awaits KV counts as waiting.
    #[must_use]
    pub fn sequences(&self) -> (u32, u32) {
        (count(self.running.len()), count(self.waiting.len() + self.fetching.len()))
    }

    /// Returns the number of finished sequences whose blocks are not yet pinned or released.
    #[must_use]
    pub fn held(&self) -> u32 {
        count(self.pinned.len())
    }

    /// Returns the number of sequences in the queue.
    #[must_use]
    pub fn queued(&self) -> u32 {
        count(self.waiting.len())
    }

    /// Returns whether a step is running.
    #[must_use]
    pub(crate) fn in_step(&self) -> bool {
        self.in_step
    }

    /// Returns whether a new sequence with this number of prompt tokens, none of them cached, would be
    /// admitted with the next step.
    #[must_use]
    pub fn admits(&self, isl: u32) -> bool {
        let all = self.running.len() + self.fetching.len() + self.waiting.len();
        let tokens = |waiting: &Running| u64::from(waiting.known_tokens().div_ceil(self.limits.block_size));
        let blocks: u64 = self.waiting.iter().map(tokens).sum();
        all < self.limits.max_num_seqs as usize
            && blocks + u64::from(isl.div_ceil(self.limits.block_size)) <= u64::from(self.pool.free())
    }

    /// Returns the number of blocks in use.
    #[must_use]
    pub fn used_blocks(&self) -> u32 {
        self.pool.used()
    }

    /// Returns the number of blocks that were evicted from the cache.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.pool.evicted()
    }

    /// Returns the share of the blocks in use, 0 to 1.
    #[must_use]
    pub fn kv_usage(&self) -> f64 {
        f64::from(self.pool.used()) / f64::from(self.limits.blocks.max(1))
    }

    /// Returns the counters.
    #[must_use]
    pub fn counts(&self) -> BatchCounts {
        self.counts
    }

    /// Schedules the running sequences in order. Returns whether one was preempted.
    fn schedule_running(&mut self, budget: &mut u32) -> bool {
        let mut preempted = false;
        let mut place = 0;
        while *budget > 0
            && let Some(running) = self.running.get(place)
        {
            let want = (running.known_tokens() - running.computed).min(*budget);
            let target = running.computed + want;
            let mut here = true;
            while !self.grow(place, target) {
                // The last sequence loses its blocks, and its tokens in this step become free again.
                let Some(victim) = self.running.pop() else { break };
                preempted = true;
                *budget += victim.scheduled;
                here = self.running.len() > place;
                self.preempt(victim);
                if !here {
                    break;
                }
            }
            if !here {
                break;
            }
            self.take_step(place, target);
            *budget -= want;
            place += 1;
        }
        preempted
    }

    fn admit(&mut self, budget: &mut u32) {
        while *budget > 0
            && self.running.len() + self.fetching.len() < self.limits.max_num_seqs as usize
            && let Some(next) = self.waiting.front()
        {
            let cached = self.cached_blocks(next);
            let cached_tokens = cached * self.limits.block_size;
            let received = next.receives() && !next.preempted;
            // KV that another engine computed needs memory but no computation, except for the last token,
            // which this engine computes.
            let computed = match next.sequence.kv {
                _ if received => next.sequence.isl - 1,
                PromptKv::Cached(tokens) if !next.preempted => {
                    tokens.min(next.sequence.isl - 1).max(cached_tokens)
                }
                _ => cached_tokens,
            };
            let awaits = next.sequence.kv == PromptKv::Awaited && !next.preempted;
            let want = (next.known_tokens() - computed).min(*budget);
            let target = computed + want;
            if target.div_ceil(self.limits.block_size).saturating_sub(cached)
                > self.pool.free() - self.idle_among(next, cached)
            {
                break;
            }
            let Some(place) = self.admit_next(cached, computed) else { break };
            if !self.grow(place, target) {
                if let Some(victim) = self.running.pop() {
                    self.preempt(victim);
                }
                break;
            }
            if awaits {
                self.fetching.extend(self.running.pop());
                continue;
            }
            self.take_step(place, target);
            *budget -= want;
        }
    }

    /// Moves the first sequence of the queue into the batch, with its cached blocks. Returns its position in
    /// the batch.
    fn admit_next(&mut self, cached: u32, computed: u32) -> Option<usize> {
        let mut next = self.waiting.pop_front()?;
        for position in 0..cached {
            next.blocks.extend(self.pool.share(next.hash(position)));
        }
        (next.published, next.computed) = (cached, computed);
        if !std::mem::replace(&mut next.preempted, false) {
            let cached_tokens = cached * self.limits.block_size;
            self.counts.prompt_tokens += u64::from(next.sequence.isl);
            self.counts.cached_tokens += u64::from(cached_tokens.min(next.sequence.isl));
            self.admitted.push((next.sequence.tag, cached_tokens));
        } else if next.receives() {
            // The KV was lost with the blocks, so this engine computes it.
            next.sequence.kv = PromptKv::Computed;
        }
        self.running.push(next);
        Some(self.running.len() - 1)
    }

    /// Returns the number of cached blocks that a sequence can use. Its last known token is always computed.
    fn cached_blocks(&self, waiting: &Running) -> u32 {
        let most = (waiting.known_tokens() - 1) / self.limits.block_size;
        let run = self.pool.cached_run((0..most).map(|position| waiting.hash(position)));
        u32::try_from(run).unwrap_or(u32::MAX)
    }

    /// Returns how many of the cached blocks are unused. When the sequence shares them, they can no longer be
    /// allocated.
    fn idle_among(&self, waiting: &Running, cached: u32) -> u32 {
        let idle = (0..cached).filter(|position| self.pool.is_idle(waiting.hash(*position))).count();
        u32::try_from(idle).unwrap_or(u32::MAX)
    }

    /// Allocates blocks for the first `target` tokens.
    fn grow(&mut self, place: usize, target: u32) -> bool {
        let Some(running) = self.running.get_mut(place) else { return false };
        let have = u32::try_from(running.blocks.len()).unwrap_or(u32::MAX);
        let need = target.div_ceil(self.limits.block_size).saturating_sub(have);
        self.pool.allocate(need, &mut running.blocks)
    }

    /// Adds a sequence's next tokens to the step and offers its full blocks to the cache.
    fn take_step(&mut self, place: usize, target: u32) {
        let Some(running) = self.running.get_mut(place) else { return };
        running.scheduled = target - running.computed;
        running.computed = target;
        let full = target / self.limits.block_size;
        for position in running.published..full {
            let parent = position.checked_sub(1).map(|before| running.hash(before));
            if let Some(id) = running.blocks.get(position as usize) {
                self.pool.publish(*id, running.hash(position), parent, running.sequence.tag, position);
            }
        }
        running.published = running.published.max(full);
    }

    fn preempt(&mut self, mut victim: Running) {
        self.pool.release(&victim.blocks);
        self.counts.preemptions += 1;
        victim.blocks.clear();
        (victim.computed, victim.scheduled, victim.published) = (0, 0, 0);
        victim.preempted = true;
        self.waiting.push_front(victim);
    }

    fn work(&self) -> StepWork {
        let mut work = StepWork {
            capacity_tokens: u64::from(self.limits.blocks) * u64::from(self.limits.block_size),
            prefill_only: self.limits.prefill_only,
            ..StepWork::default()
        };
        for running in self.running.iter().filter(|running| running.scheduled > 0) {
            let (new, context, isl) = (running.scheduled, running.computed, running.sequence.isl);
            let before = context - new;
            work.add(new, context);
            let received_last = running.receives() && before + 1 == isl;
            if before < isl && !received_last {
                work.add_prompt(isl.min(context) - before, new, before);
                work.first_tokens += u32::from(context >= isl);
            } else {
                work.add_decoding(context);
            }
            if running.computed >= running.known_tokens() {
                work.emitting += 1;
                work.emitting_context_tokens += u64::from(context);
            }
        }
        work
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
