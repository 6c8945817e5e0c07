//! Engine model without I/O: scheduler, prefix cache, pinned blocks and durations.
//!
//! Time is an argument (`now`, since the engine's start), randomness is seeded, and nothing sleeps, so the
//! same core serves the HTTP engine and a replay in virtual time. It knows neither HTTP nor sockets nor
//! dialects.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use rand::{SeedableRng, rngs::SmallRng};

pub use self::{
    cache::{Hold, PrefixCache},
    pins::{Ask, Pins, Pull},
    time::TimeModel,
    tokens::Prompt,
};

mod cache;
mod pins;
mod time;
mod tokens;

/// Id of a sequence in the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobId(u64);

/// Requirements of a sequence.
#[derive(Clone, Debug)]
pub struct Job {
    /// Sequence hashes of the prompt's full blocks.
    pub chain: Arc<[u64]>,
    /// Number of prompt tokens.
    pub isl: u32,
    /// Number of output tokens.
    pub out: u32,
}

/// Limits of the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limit of admitted sequences.
    pub max_num_seqs: u32,
    /// Limit of sequences that wait for admission.
    pub max_waiting: u32,
    /// Number of KV blocks.
    pub blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
}

/// A sequence was admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Started {
    /// Number of cached prompt tokens.
    pub cached: u32,
    /// Jitter of the prefill, the transfer and the decode steps, in this order.
    pub jitter: [f64; 3],
}

/// A sequence was accepted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Submitted {
    /// Id of the sequence.
    pub id: JobId,
    /// Set if the sequence did not have to wait.
    pub started: Option<Started>,
}

/// Why a sequence was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("queue is full: {waiting} requests are waiting, limit {max}")]
    QueueFull {
        /// Number of waiting sequences.
        waiting: u32,
        /// Limit of waiting sequences.
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

/// Phase of an admitted sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Holds its blocks and waits for KV from another engine. Not part of a batch.
    Fetching,
    Prefilling,
    Decoding,
}

#[derive(Debug)]
struct Admitted {
    phase: Phase,
    hold: Hold,
    isl: u32,
    jitter: [f64; 3],
}

/// Current load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences in the batch, prefilling or decoding.
    pub running: u32,
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
    limits: Limits,
    time: TimeModel,
    cache: PrefixCache,
    pins: Pins,
    queue: VecDeque<(JobId, Job)>,
    admitted: HashMap<JobId, Admitted>,
    prefilling: u32,
    decoding: u32,
    rng: SmallRng,
    next: u64,
    counts: CoreCounts,
}

impl EngineCore {
    /// Creates an idle engine with an empty cache.
    #[must_use]
    pub fn new(limits: Limits, time: TimeModel, seed: u64) -> Self {
        Self {
            limits,
            time,
            cache: PrefixCache::new(limits.blocks, limits.block_size),
            pins: Pins::default(),
            queue: VecDeque::new(),
            admitted: HashMap::new(),
            prefilling: 0,
            decoding: 0,
            rng: SmallRng::seed_from_u64(seed),
            next: 0,
            counts: CoreCounts::default(),
        }
    }

    /// Submits a sequence, which starts, waits in the queue, or is refused.
    ///
    /// # Errors
    /// [`Refusal`] if the queue is full or the sequence can never fit.
    pub fn submit(&mut self, job: Job) -> Result<Submitted, Refusal> {
        let need = self.blocks_of(&job);
        if need > self.limits.blocks {
            return Err(Refusal::TooLarge { need, capacity: self.limits.blocks });
        }
        let id = JobId(self.next);
        if self.queue.is_empty()
            && let Some(started) = self.admit(id, &job)
        {
            self.next += 1;
            return Ok(Submitted { id, started: Some(started) });
        }
        let waiting = count(self.queue.len());
        if waiting >= self.limits.max_waiting {
            return Err(Refusal::QueueFull { waiting, max: self.limits.max_waiting });
        }
        self.next += 1;
        self.queue.push_back((id, job));
        Ok(Submitted { id, started: None })
    }

    /// Removes a sequence in any phase. Returns the sequences that start in its place.
    pub fn leave(&mut self, id: JobId) -> Vec<(JobId, Started)> {
        if let Some(admitted) = self.admitted.remove(&id) {
            self.uncount(admitted.phase);
            self.cache.release(admitted.hold);
        } else {
            self.queue.retain(|(queued, _)| *queued != id);
        }
        self.fill()
    }

    /// Ends leases and transfers that are due. Returns the sequences that start in the freed blocks.
    pub fn advance(&mut self, now: Duration) -> Vec<(JobId, Started)> {
        for (hold, stranded) in self.pins.expire(now) {
            self.counts.stranded += u64::from(stranded);
            self.cache.release(hold);
        }
        self.fill()
    }

    /// Returns the next time at which [`EngineCore::advance`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.pins.next_deadline()
    }

    /// Adds a sequence to the batch to compute its prompt. Returns the duration.
    pub fn begin_prefill(&mut self, id: JobId) -> Duration {
        self.enter(id, Phase::Prefilling);
        let Some(admitted) = self.admitted.get(&id) else { return Duration::ZERO };
        self.time.prefill(admitted.isl, admitted.hold.cached(), self.running(), admitted.jitter[0])
    }

    /// Returns the duration of the sequence's KV transfer from another engine.
    #[must_use]
    pub fn transfer(&self, id: JobId) -> Duration {
        self.admitted.get(&id).map_or(Duration::ZERO, |job| self.time.transfer(job.isl, job.jitter[1]))
    }

    /// Starts the sequence's next decode step. Returns the duration.
    pub fn decode_step(&mut self, id: JobId) -> Duration {
        self.enter(id, Phase::Decoding);
        let Some(admitted) = self.admitted.get(&id) else { return Duration::ZERO };
        self.time.step(self.running(), self.prefilling, admitted.jitter[2])
    }

    /// Pins the prompt's blocks for another engine after the sequence leaves, until they are pulled or
    /// `lease` expires.
    pub fn pin(
        &mut self,
        now: Duration,
        id: JobId,
        name: &str,
        fingerprint: u64,
        lease: Duration,
    ) -> Option<Pinned> {
        let admitted = self.admitted.get_mut(&id)?;
        let prompt_blocks = admitted.isl.div_ceil(self.limits.block_size);
        let hold = self.cache.split(&mut admitted.hold, prompt_blocks);
        let block_ids = self.cache.ids(&hold);
        self.pins.pin(name, hold, block_ids.clone(), fingerprint, now + lease);
        Some(Pinned { block_ids })
    }

    /// Hands a pinned handoff to another engine. Its blocks stay until the announced `transfer` is over.
    pub fn pull(&mut self, now: Duration, name: &str, ask: &Ask<'_>) -> Pull {
        self.pins.pull(now, name, ask)
    }

    /// Adds the blocks filled by the output to the cache, so that the next turn of a conversation finds them.
    pub fn seal(&mut self, id: JobId, chain: &[u64]) {
        if let Some(admitted) = self.admitted.get_mut(&id) {
            self.cache.name(&mut admitted.hold, chain);
        }
    }

    /// Returns the current load.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        let fetching = count(self.admitted.len()) - self.running();
        Occupancy {
            running: self.running(),
            waiting: count(self.queue.len()) + fetching,
            used_blocks: self.cache.used(),
            pinned_blocks: self.pins.blocks(),
        }
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn counts(&self) -> CoreCounts {
        self.counts
    }

    fn running(&self) -> u32 {
        self.prefilling + self.decoding
    }

    fn blocks_of(&self, job: &Job) -> u32 {
        (job.isl + job.out).div_ceil(self.limits.block_size)
    }

    /// Admits waiting sequences first in, first out: the head of the queue blocks those behind it.
    fn fill(&mut self) -> Vec<(JobId, Started)> {
        let mut all = Vec::new();
        while let Some((id, job)) = self.queue.pop_front() {
            let Some(started) = self.admit(id, &job) else {
                self.queue.push_front((id, job));
                break;
            };
            all.push((id, started));
        }
        all
    }

    fn admit(&mut self, id: JobId, job: &Job) -> Option<Started> {
        if count(self.admitted.len()) >= self.limits.max_num_seqs {
            return None;
        }
        let hold = self.cache.acquire(&job.chain, job.isl, self.blocks_of(job))?;
        let jitter = [(); 3].map(|()| self.time.draw_jitter(&mut self.rng));
        let started = Started { cached: hold.cached(), jitter };
        self.counts.prefix_queries += u64::from(job.isl);
        self.counts.prefix_hits += u64::from(started.cached);
        self.admitted.insert(id, Admitted { phase: Phase::Fetching, hold, isl: job.isl, jitter });
        Some(started)
    }

    fn enter(&mut self, id: JobId, phase: Phase) {
        let Some(admitted) = self.admitted.get_mut(&id) else { return };
        let old = std::mem::replace(&mut admitted.phase, phase);
        self.uncount(old);
        match phase {
            Phase::Fetching => {}
            Phase::Prefilling => self.prefilling += 1,
            Phase::Decoding => self.decoding += 1,
        }
    }

    fn uncount(&mut self, phase: Phase) {
        match phase {
            Phase::Fetching => {}
            Phase::Prefilling => self.prefilling -= 1,
            Phase::Decoding => self.decoding -= 1,
        }
    }
}

fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
