//! Threads that encode long prompts, so that they delay no other work: a fixed number, shared fairly between
//! tenants, with a bounded queue. A prompt that nothing waits for any more leaves the queue, or ends.

use std::{
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use fair_queue::{FairQueue, Key, Line, Position, Rules};
use parking_lot::{Condvar, Mutex};

/// Cost of a prompt beside its bytes, so that many short prompts are not free.
const FIXED_COST: u64 = 1_024;
/// The order of waiting prompts: by tenants only.
const ORDER: Rules = Rules { ageing_turn: 0, credit: 0.0, check: |right| debug_assert!(right) };

/// Bounds of a pool.
#[derive(Clone, Copy, Debug)]
pub struct PoolLimits {
    /// Number of threads.
    pub threads: usize,
    /// Number of prompts that are encoded or wait for it.
    pub prompts: usize,
    /// Size of these prompts in bytes.
    pub bytes: usize,
    /// Size in bytes from which on a prompt is long: one thread is left to the others.
    pub long_bytes: usize,
}

/// The pool cannot take a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many prompts wait for the tokenizer")]
pub struct PoolFull;

/// Work of a thread on a prompt. It checks the flag, and ends soon after the flag is set. Called once, with
/// an error if the prompt has to give way.
pub type Work = Box<dyn FnOnce(Result<&AtomicBool, PoolFull>) + Send>;

/// The pool. Its threads end when it is dropped.
pub struct EncodePool {
    shared: Arc<Shared>,
}

/// A prompt in the pool. Dropping it gives up the prompt.
#[derive(Debug)]
pub struct Ticket {
    shared: Arc<Shared>,
    position: Option<Position<Length>>,
    stopped: Arc<AtomicBool>,
}

struct Shared {
    limits: PoolLimits,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    queue: FairQueue<Length, Job>,
    /// Prompts that were added to the queue so far.
    arrived: u64,
    /// Prompts that wait or are encoded, and their bytes.
    prompts: usize,
    bytes: usize,
    /// Long prompts that are encoded.
    long: usize,
    closed: bool,
}

struct Job {
    bytes: usize,
    stopped: Arc<AtomicBool>,
    work: Work,
}

/// Prompts of both lengths share the threads, but one thread is left to short ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Length {
    Short,
    Long,
}

impl Line for Length {
    type Group = ();

    fn group(&self) -> &() {
        &()
    }
}

impl EncodePool {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system does not give a thread.
    pub fn start(limits: PoolLimits) -> io::Result<Self> {
        let queue = FairQueue::new(ORDER);
        let state = State { queue, arrived: 0, prompts: 0, bytes: 0, long: 0, closed: false };
        let shared = Shared { limits, state: Mutex::new(state), changed: Condvar::new() };
        let pool = Self { shared: Arc::new(shared) };
        for number in 0..limits.threads.max(1) {
            let shared = pool.shared.clone();
            thread::Builder::new().name(format!("pointsman-tokens-{number}")).spawn(move || shared.run())?;
        }
        Ok(pool)
    }

    /// Gives a prompt of `tenant` to the pool. A full pool drops the last prompts of the tenant that has
    /// the most bytes in it, if that makes room.
    pub fn submit(&self, tenant: u64, bytes: usize, work: Work) -> Ticket {
        let stopped = Arc::<AtomicBool>::default();
        let mut refused = Vec::new();
        let mut position = None;
        {
            let (limits, state) = (&self.shared.limits, &mut *self.shared.state.lock());
            for last in state.gives_way(tenant, bytes, limits) {
                let Some(job) = state.queue.remove(&last) else { continue };
                state.left(job.bytes);
                refused.push(job.work);
            }
            if limits.fit(state.prompts, state.bytes, bytes) && !state.closed {
                (state.prompts, state.bytes) = (state.prompts + 1, state.bytes + bytes);
                let length = if limits.is_long(bytes) { Length::Long } else { Length::Short };
                let key = Key::in_turn(state.arrived);
                state.arrived += 1;
                let job = Job { bytes, stopped: stopped.clone(), work };
                position = Some(state.queue.insert(length, tenant, 1.0, key, job));
            } else {
                refused.push(work);
            }
        }
        self.shared.changed.notify_one();
        refused.into_iter().for_each(|work| work(Err(PoolFull)));
        Ticket { shared: self.shared.clone(), position, stopped }
    }

    /// Returns the number of prompts that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.state.lock().queue.len()
    }

    /// Returns the number of prompts that wait or are encoded.
    #[must_use]
    pub fn prompts(&self) -> usize {
        self.shared.state.lock().prompts
    }
}

impl Drop for EncodePool {
    fn drop(&mut self) {
        self.shared.state.lock().closed = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for EncodePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodePool").field("limits", &self.shared.limits).finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("limits", &self.limits).finish_non_exhaustive()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        let mut state = self.shared.state.lock();
        let removed = self.position.as_ref().and_then(|position| state.queue.remove(position));
        if let Some(job) = &removed {
            state.left(job.bytes);
        }
        // The data of the work is dropped without the lock.
        drop(state);
    }
}

impl PoolLimits {
    fn is_long(&self, bytes: usize) -> bool {
        bytes > self.long_bytes
    }

    /// Whether a prompt of `bytes` fits beside others.
    fn fit(&self, prompts: usize, sum: usize, bytes: usize) -> bool {
        prompts < self.prompts && sum.saturating_add(bytes) <= self.bytes
    }
}

impl State {
    /// Takes the next prompt, and charges its tenant for it.
    fn pop(&mut self, may_be_long: bool) -> Option<Job> {
        let may = |length: &Length| may_be_long || *length == Length::Short;
        let (position, job) = self.queue.next(may)?;
        let cost = cost(job.bytes);
        self.queue.charge(&position, 1.0, cost);
        self.queue.remove(&position)
    }

    /// Returns the prompts that give way to one of a tenant: none if it fits, or does not fit without them.
    fn gives_way(&self, tenant: u64, bytes: usize, limits: &PoolLimits) -> Vec<Position<Length>> {
        let (mut prompts, mut sum) = (self.prompts, self.bytes);
        if limits.fit(prompts, sum, bytes) {
            return Vec::new();
        }
        let suffices = |job: &Job| {
            (prompts, sum) = (prompts - 1, sum - job.bytes);
            limits.fit(prompts, sum, bytes)
        };
        self.queue.last_after(&(), tenant, |job| cost(job.bytes), suffices).unwrap_or_default()
    }

    fn left(&mut self, bytes: usize) {
        (self.prompts, self.bytes) = (self.prompts - 1, self.bytes - bytes);
    }
}

impl Shared {
    /// Encodes prompts until the pool is dropped.
    fn run(&self) {
        while let Some(Job { bytes, stopped, work }) = self.next() {
            // The receiver of the result notices a panic because the work is dropped.
            let done = catch_unwind(AssertUnwindSafe(|| work(Ok(&stopped))));
            if done.is_err() {
                tracing::error!(bytes, "the tokenizer panicked");
            }
            let mut state = self.state.lock();
            state.left(bytes);
            if self.limits.is_long(bytes) {
                state.long -= 1;
                self.changed.notify_one();
            }
        }
    }

    /// Waits for a prompt; `None` when the pool was dropped.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let may_be_long = state.long + 1 < self.limits.threads.max(2);
            if let Some(next) = state.pop(may_be_long) {
                state.long += usize::from(self.limits.is_long(next.bytes));
                return Some(next);
            }
            self.changed.wait(&mut state);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "shares need no more precision")]
fn cost(bytes: usize) -> f64 {
    u64::try_from(bytes).unwrap_or(u64::MAX).saturating_add(FIXED_COST) as f64
}

#[cfg(test)]
mod tests;
