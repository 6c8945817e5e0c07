//! The share of a worker that just started: it grows, so that a worker with an empty cache and no load does
//! not get all requests at once.
//!
//! The share is kept by turns. Each decision over a pool of the worker gives it a part of a turn: its part of
//! the pool, times the part of the time that has passed. With a whole turn it may be chosen, and being chosen
//! takes the turn. Its share is therefore the same whatever chooses.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering},
};

use tokio::time::{Duration, Instant};

use super::Worker;

/// How long the share of a worker grows after its start.
pub(crate) const WARM_UP: Duration = Duration::from_secs(30);
/// Turns are counted in parts.
const TURN: i64 = 1_000_000;

/// State that the warm-ups of a registry's workers share.
#[derive(Clone, Debug)]
pub(crate) struct WarmUps {
    /// Until then no warm-up begins: to a gateway that just started, all workers are new. `None` if none ever
    /// does.
    from: Option<Instant>,
    /// Number of workers that warm up.
    running: Arc<AtomicU32>,
}

/// The warm-up of one worker.
#[derive(Debug)]
pub(super) struct WarmUp {
    shared: WarmUps,
    created: Instant,
    /// Whether the worker's process has not been healthy yet.
    is_new: AtomicBool,
    /// When the warm-up began, milliseconds after `created`, plus 1; 0: it is over.
    begun_ms: AtomicU64,
    /// Parts of a turn.
    turn: AtomicI64,
}

impl WarmUps {
    /// Returns those of a registry that begins now.
    pub(crate) fn new() -> Self {
        Self { from: Some(Instant::now() + WARM_UP), running: Arc::default() }
    }

    /// Returns those of a worker that never warms up.
    pub(crate) fn never() -> Self {
        Self { from: None, running: Arc::default() }
    }
}

impl WarmUp {
    pub(super) fn new(shared: WarmUps) -> Self {
        Self {
            shared,
            created: Instant::now(),
            is_new: AtomicBool::new(true),
            begun_ms: AtomicU64::new(0),
            turn: AtomicI64::new(0),
        }
    }

    /// Begins the warm-up if the process is new. Called when the worker is healthy.
    fn begin_if_new(&self) {
        if !self.is_new.load(Ordering::Relaxed) || !self.is_new.swap(false, Ordering::AcqRel) {
            return;
        }
        if self.shared.from.is_some_and(|from| Instant::now() >= from) {
            let elapsed = u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
            self.turn.store(0, Ordering::Relaxed);
            if self.begun_ms.swap(elapsed + 1, Ordering::AcqRel) == 0 {
                self.shared.running.fetch_add(1, Ordering::AcqRel);
            }
        }
    }

    /// Ends it when its time is over. Returns whether it ended.
    fn end(&self) -> bool {
        let ended = self.runs() && self.share().is_none() && self.begun_ms.swap(0, Ordering::AcqRel) != 0;
        if ended {
            self.shared.running.fetch_sub(1, Ordering::AcqRel);
        }
        ended
    }

    /// Returns whether the worker warms up. It may be over and not ended yet.
    pub(super) fn runs(&self) -> bool {
        self.begun_ms.load(Ordering::Acquire) != 0
    }

    /// Returns the worker's share, below 1; `None`: the whole one.
    fn share(&self) -> Option<f64> {
        let begun = Duration::from_millis(self.begun_ms.load(Ordering::Acquire).checked_sub(1)?);
        let share = self.created.elapsed().saturating_sub(begun).as_secs_f64() / WARM_UP.as_secs_f64();
        (share < 1.0).then_some(share)
    }

    /// Counts a decision over a pool of this number of candidates.
    fn count(&self, pool: usize) {
        let Some(share) = self.share() else { return };
        #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "less than a turn")]
        let part = (share * TURN as f64 / pool.max(1) as f64) as i64;
        // At most one turn is saved, and at most one is owed.
        let add = |turn: i64| Some((turn + part).min(2 * TURN - 1));
        let _ = self.turn.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    fn take_turn(&self) {
        let take = |turn: i64| Some((turn - TURN).max(-TURN));
        let _ = self.turn.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
    }
}

impl Drop for WarmUp {
    fn drop(&mut self) {
        if self.runs() {
            self.shared.running.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Worker {
    /// Returns the number of the engine's process, as far as the gateway noticed that others ended.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.state.ended_processes.load(Ordering::Acquire)
    }

    /// Records that another process serves, or will.
    pub(crate) fn note_new_process(&self) {
        self.state.ended_processes.fetch_add(1, Ordering::AcqRel);
        self.state.warm_up.is_new.store(true, Ordering::Release);
        self.forget_failed_legs();
        self.forget_limit();
    }

    /// Begins the warm-up of a process that is healthy for the first time.
    pub(super) fn begin_warm_up(&self) {
        self.state.warm_up.begin_if_new();
    }

    /// Ends the warm-up when its time is over.
    pub(crate) fn end_warm_up(&self) {
        if self.state.warm_up.end() {
            self.tell_ranks();
        }
    }

    /// Returns the part of its share that a worker gets that just started, below 1; `None`: all of it.
    #[must_use]
    pub fn warm_up_share(&self) -> Option<f64> {
        self.state.warm_up.share()
    }

    /// Returns whether a worker of the registry warms up.
    #[must_use]
    pub fn any_warms_up(&self) -> bool {
        self.state.warm_up.shared.running.load(Ordering::Relaxed) > 0
    }

    /// Returns whether the worker may be chosen beside others: it has warmed up, or has a turn.
    #[must_use]
    pub fn has_turn(&self) -> bool {
        self.state.warm_up.share().is_none() || self.state.warm_up.turn.load(Ordering::Relaxed) >= TURN
    }

    /// Counts a decision over a pool of this number of candidates, of which this is one.
    pub fn count_decision(&self, pool: usize) {
        self.state.warm_up.count(pool);
    }

    /// The worker was chosen.
    pub fn take_turn(&self) {
        self.state.warm_up.take_turn();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Health, Registry, WorkerId, WorkerSpec};

    fn join(registry: &Registry, id: u64) -> Arc<Worker> {
        let flag = format!("id={id},role=aggregated,engine=vllm,model=m,url=http://a:{id}");
        registry.upsert(WorkerSpec::parse_flag(&flag).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn f6_processes_that_start_later_than_the_gateway_warm_up() {
        let registry = Registry::default();
        let first = join(&registry, 1);
        first.set_health(Health::Healthy);
        // F6.11
        assert_eq!(first.warm_up_share(), None, "to a gateway that just started all are new");
        tokio::time::advance(2 * WARM_UP).await;
        let late = join(&registry, 2);
        assert!(!first.any_warms_up());
        late.set_health(Health::Healthy);
        assert_eq!(late.warm_up_share(), Some(0.0));
        assert!(first.any_warms_up() && first.has_turn() && !late.has_turn());
        assert!(first.is_surely_eligible() && !late.is_surely_eligible());
        tokio::time::advance(WARM_UP / 2).await;
        late.set_health(Health::Unhealthy);
        late.set_health(Health::Healthy);
        assert_eq!(late.warm_up_share(), Some(0.5), "health alone does not begin it");
        tokio::time::advance(WARM_UP).await;
        late.end_warm_up();
        assert!(late.is_surely_eligible() && !first.any_warms_up() && late.has_turn());
        first.note_new_process();
        first.set_health(Health::Healthy);
        assert_eq!(first.warm_up_share(), Some(0.0), "another process");
        registry.remove(WorkerId(1));
        drop(first);
        assert!(!late.any_warms_up());
    }
}
