//! The engine without I/O: who runs, who waits, what is cached, what is pinned, how long a step takes.
//!
//! Time is an argument (`now`, since the engine's start), randomness is seeded, nothing here sleeps: the same core serves
//! the HTTP engine and a replay in virtual time. It must not know HTTP, sockets or a dialect.

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

/// One sequence inside the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobId(u64);

/// What a sequence needs.
#[derive(Clone, Debug)]
pub struct Job {
    /// Sequence hashes of the prompt's full blocks.
    pub chain: Arc<[u64]>,
    /// Prompt tokens.
    pub isl: u32,
    /// Tokens it will generate.
    pub out: u32,
}

/// Bounds of the scheduler.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sequences admitted at once.
    pub max_num_seqs: u32,
    /// Sequences that may wait for admission.
    pub max_waiting: u32,
    /// KV blocks.
    pub blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
}

/// A sequence was admitted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Started {
    /// Prompt tokens whose KV was cached.
    pub cached: u32,
    /// Jitter of its prefill, its transfer and its decode steps, in that order.
    pub jitter: [f64; 3],
}

/// A sequence was accepted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Submitted {
    /// Its name from here on.
    pub id: JobId,
    /// Set when it did not have to wait.
    pub started: Option<Started>,
}

/// A sequence was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("{waiting} requests are waiting, {max} may")]
    QueueFull {
        /// Waiting now.
        waiting: u32,
        /// Allowed to wait.
        max: u32,
    },
    /// It can never fit.
    #[error("{need} KV blocks are needed, the engine has {capacity}")]
    TooLarge {
        /// Blocks it needs.
        need: u32,
        /// Blocks there are.
        capacity: u32,
    },
}

/// What an admitted sequence does at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Holds its blocks, waits for KV from elsewhere: not part of a batch.
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

/// Numbers of the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences in the batch: prefilling or decoding.
    pub running: u32,
    /// Sequences in the queue, or admitted and waiting for KV.
    pub waiting: u32,
    /// Blocks that somebody holds.
    pub used_blocks: u32,
    /// Blocks pinned for a handoff, counted in `used_blocks` too.
    pub pinned_blocks: u32,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreCounts {
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Handoffs whose lease ended before they were pulled.
    pub stranded: u64,
}

/// A pinned handoff.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The blocks that hold the prompt's KV.
    pub block_ids: Vec<u32>,
}

/// The scheduler, the cache, the pins and the clockwork of one engine.
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
    /// An idle engine with an empty cache.
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

    /// Takes a sequence in: it starts, waits in line, or is refused.
    ///
    /// # Errors
    /// [`Refusal`] when the queue is full or the sequence can never fit.
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

    /// The sequence ends or leaves, wherever it is; returns those that start in its place.
    pub fn leave(&mut self, id: JobId) -> Vec<(JobId, Started)> {
        if let Some(admitted) = self.admitted.remove(&id) {
            self.uncount(admitted.phase);
            self.cache.release(admitted.hold);
        } else {
            self.queue.retain(|(queued, _)| *queued != id);
        }
        self.fill()
    }

    /// Lets time pass: ends leases and transfers; returns those that start in the freed blocks.
    pub fn advance(&mut self, now: Duration) -> Vec<(JobId, Started)> {
        for (hold, stranded) in self.pins.expire(now) {
            self.counts.stranded += u64::from(stranded);
            self.cache.release(hold);
        }
        self.fill()
    }

    /// When [`EngineCore::advance`] has something to do next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.pins.next_deadline()
    }

    /// The sequence enters the batch to compute its prompt; returns how long that takes.
    pub fn begin_prefill(&mut self, id: JobId) -> Duration {
        self.enter(id, Phase::Prefilling);
        let Some(admitted) = self.admitted.get(&id) else { return Duration::ZERO };
        self.time.prefill(admitted.isl, admitted.hold.cached(), self.running(), admitted.jitter[0])
    }

    /// How long the sequence's KV is on its way from another engine.
    #[must_use]
    pub fn transfer(&self, id: JobId) -> Duration {
        self.admitted.get(&id).map_or(Duration::ZERO, |job| self.time.transfer(job.isl, job.jitter[1]))
    }

    /// The sequence's next token; returns how long that takes.
    pub fn decode_step(&mut self, id: JobId) -> Duration {
        self.enter(id, Phase::Decoding);
        let Some(admitted) = self.admitted.get(&id) else { return Duration::ZERO };
        self.time.step(self.running(), self.prefilling, admitted.jitter[2])
    }

    /// Keeps the prompt's blocks for a remote engine after the sequence leaves, until pulled or `lease` ends.
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

    /// A remote engine takes a pinned handoff; its blocks stay until the `transfer` it announces is over.
    pub fn pull(&mut self, now: Duration, name: &str, ask: &Ask<'_>) -> Pull {
        self.pins.pull(now, name, ask)
    }

    /// Names the blocks that the answer filled, so that the next turn of a conversation finds them.
    pub fn seal(&mut self, id: JobId, chain: &[u64]) {
        if let Some(admitted) = self.admitted.get_mut(&id) {
            self.cache.name(&mut admitted.hold, chain);
        }
    }

    /// Numbers of the moment.
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

    /// Counts since the start.
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

    /// First in, first out: the head of the line blocks those behind it.
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
