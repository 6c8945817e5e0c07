//! Threads that encode long prompts, so that they delay no other work: a fixed number, shared fairly between
//! tenants, with a bounded queue. A prompt that nothing waits for any more leaves the queue, or ends.

mod fair_queue;

use std::{
    fmt, io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};

use parking_lot::{Condvar, Mutex};

use self::fair_queue::{FairQueue, Place, Waiting};

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
    place: Option<Place>,
    stopped: Arc<AtomicBool>,
}

struct Shared {
    limits: PoolLimits,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: FairQueue<Job>,
    /// Prompts that wait or are encoded, and their bytes.
    prompts: usize,
    bytes: usize,
    /// Long prompts that are encoded.
    long: usize,
    closed: bool,
}

struct Job {
    stopped: Arc<AtomicBool>,
    work: Work,
}

impl EncodePool {
    /// Starts the threads.
    ///
    /// # Errors
    /// The system does not give a thread.
    pub fn start(limits: PoolLimits) -> io::Result<Self> {
        let shared = Shared { limits, state: Mutex::default(), changed: Condvar::new() };
        let pool = Self { shared: Arc::new(shared) };
        for number in 0..limits.threads.max(1) {
            let shared = pool.shared.clone();
            thread::Builder::new().name(format!("pointsman-tokens-{number}")).spawn(move || shared.run())?;
        }
        Ok(pool)
    }

    /// Gives a prompt of `tenant` to the pool. When the pool is full, the prompts of the tenants that have
    /// most of it give way.
    pub fn submit(&self, tenant: u64, bytes: usize, work: Work) -> Ticket {
        let stopped = Arc::<AtomicBool>::default();
        let mut refused = Vec::new();
        let mut place = None;
        {
            let (limits, state) = (&self.shared.limits, &mut *self.shared.state.lock());
            while !state.fits(bytes, limits) {
                let Some(Waiting { bytes, item, .. }) = state.queue.give_way(tenant) else { break };
                state.left(bytes);
                refused.push(item.work);
            }
            if state.fits(bytes, limits) && !state.closed {
                (state.prompts, state.bytes) = (state.prompts + 1, state.bytes + bytes);
                place = Some(state.queue.push(tenant, bytes, Job { stopped: stopped.clone(), work }));
            } else {
                refused.push(work);
            }
        }
        self.shared.changed.notify_one();
        refused.into_iter().for_each(|work| work(Err(PoolFull)));
        Ticket { shared: self.shared.clone(), place, stopped }
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
        let removed = self.place.and_then(|place| state.queue.remove(place));
        if let Some(Waiting { bytes, .. }) = &removed {
            state.left(*bytes);
        }
        // The data of the work is dropped without the lock.
        drop(state);
    }
}

impl State {
    fn fits(&self, bytes: usize, limits: &PoolLimits) -> bool {
        self.prompts < limits.prompts && self.bytes.saturating_add(bytes) <= limits.bytes
    }

    fn left(&mut self, bytes: usize) {
        (self.prompts, self.bytes) = (self.prompts - 1, self.bytes - bytes);
    }
}

impl Shared {
    /// Encodes prompts until the pool is dropped.
    fn run(&self) {
        while let Some(Waiting { bytes, item: Job { stopped, work }, .. }) = self.next() {
            // The receiver of the result notices a panic because the work is dropped.
            let done = catch_unwind(AssertUnwindSafe(|| work(Ok(&stopped))));
            if done.is_err() {
                tracing::error!(bytes, "the tokenizer panicked");
            }
            let mut state = self.state.lock();
            state.left(bytes);
            if bytes > self.limits.long_bytes {
                state.long -= 1;
                self.changed.notify_one();
            }
        }
    }

    /// Waits for a prompt; `None` when the pool was dropped.
    fn next(&self) -> Option<Waiting<Job>> {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return None;
            }
            let may_be_long = state.long + 1 < self.limits.threads.max(2);
            let accepts = |bytes: usize| may_be_long || bytes <= self.limits.long_bytes;
            if let Some(next) = state.queue.pop(accepts) {
                state.long += usize::from(next.bytes > self.limits.long_bytes);
                return Some(next);
            }
            self.changed.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests;
