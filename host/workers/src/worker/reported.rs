//! Reports of a worker's engine about itself, their contradictions with the configuration, and problems that
//! probes found.

use std::sync::{Arc, atomic::Ordering};

use super::Worker;
use crate::{
    columns::EngineLoad,
    facts::{Contradiction, EngineFacts},
    id::{DpRank, Engine, ModelName},
    spec::{KvTransport, major_minor},
};

impl Worker {
    /// Returns the number of KV blocks of a rank: as configured, otherwise as the engine reports.
    #[must_use]
    pub fn total_blocks(&self) -> Option<u32> {
        self.ranks.first()?.view().total_blocks()
    }

    /// Returns the tokens in a KV block of the engine: as configured, otherwise as the engine reports.
    #[must_use]
    pub fn block_size(&self) -> Option<u32> {
        self.ranks.first()?.view().block_size()
    }

    /// Returns the number of blocks of `size` tokens in one of the engine's; 1 unless its block size is a
    /// multiple.
    #[must_use]
    pub fn blocks_at_once(&self, size: u32) -> u32 {
        self.ranks.first().map_or(1, |rank| rank.view().blocks_at_once(size))
    }

    /// Returns how many blocks of `size` tokens fit into a rank's KV cache. An engine with an unknown block
    /// size is taken to have this one.
    #[must_use]
    pub fn capacity_in_blocks(&self, size: u32) -> Option<u32> {
        self.ranks.first()?.view().capacity_in_blocks(size)
    }

    /// Returns what the engine last reported of itself.
    #[must_use]
    pub fn facts(&self) -> Arc<EngineFacts> {
        self.state.facts.load_full()
    }

    /// Returns the first two numbers of the engine's version, if the engine reports it.
    #[must_use]
    pub fn engine_version(&self) -> Option<(u32, u32)> {
        self.state.facts.load().version.as_deref().and_then(major_minor)
    }

    /// Returns the engine id of a rank, if it was read.
    #[must_use]
    pub fn engine_id(&self, rank: DpRank) -> Option<String> {
        self.state.engine_ids.load().as_deref()?.get(rank.0 as usize).cloned()
    }

    /// Stores the engine ids by rank. Returns true if others were known before.
    pub(crate) fn set_engine_ids(&self, ids: Vec<String>) -> bool {
        let new = Arc::new(ids);
        let earlier = self.state.engine_ids.swap(Some(new.clone()));
        earlier.is_some_and(|earlier| earlier != new)
    }

    /// Returns whether a prefill in flight may be cancelled (E4): as configured, otherwise if the engine is
    /// known to free its blocks (vLLM 0.33, `nixl/pull_scheduler.py`, `request_finished`). The source of
    /// vLLM's Rust frontend, which has to see that the connection is closed, was not read.
    #[must_use]
    pub fn cancels_prefill(&self) -> bool {
        let is_known = || {
            (self.spec.engine, self.spec.transport) == (Engine::Vllm, KvTransport::Nixl)
                && self.engine_version() >= Some((0, 33))
                && !self.state.facts.load().takes_global_ranks
        };
        self.spec.prefill_cancellable.unwrap_or_else(is_known)
    }

    /// Returns whether decisions may predict that the engine has prompts cached: unless it reports that it
    /// has no prefix cache.
    #[must_use]
    pub fn caches_prefixes(&self) -> bool {
        !self.state.lacks_prefix_cache.load(Ordering::Relaxed)
    }

    /// Stores what the engine reports. Configured values take precedence.
    pub fn set_facts(&self, facts: EngineFacts) {
        let value = |configured: Option<u32>, reported: Option<u32>| configured.or(reported).unwrap_or(0);
        let total_blocks = value(self.spec.total_blocks, facts.total_blocks);
        let block_size = value(self.spec.block_size, facts.block_size);
        self.ranks.iter().for_each(|rank| rank.view().set_capacity(total_blocks, block_size));
        self.state.lacks_prefix_cache.store(facts.prefix_cache == Some(false), Ordering::Relaxed);
        self.state.facts.store(Arc::new(facts));
        self.forget_lost_ranks();
    }

    /// Returns the longest context of a model, tokens, if the engine reports it.
    #[must_use]
    pub fn context_length(&self, model: &ModelName) -> Option<u32> {
        let lengths = self.state.context_lengths.load();
        let at = lengths.binary_search_by(|(name, _)| name.as_str().cmp(model.as_str())).ok()?;
        lengths.get(at).map(|(_, length)| *length)
    }

    /// Stores the longest context of each model that the engine reports. Returns true if one changed.
    pub(crate) fn set_context_lengths(&self, mut lengths: Vec<(String, u32)>) -> bool {
        lengths.sort_unstable();
        let new = Arc::new(lengths);
        let earlier = self.state.context_lengths.swap(Arc::clone(&new));
        earlier != new
    }

    /// Returns how often the engine's models were read.
    pub(crate) fn model_readings(&self) -> u32 {
        self.state.model_readings.load(Ordering::Acquire)
    }

    /// The engine's models were read.
    pub(crate) fn note_models_read(&self) {
        self.state.model_readings.fetch_add(1, Ordering::Release);
    }

    /// Returns the load figures of the engine, all of its ranks together, if they are known.
    #[must_use]
    pub fn engine_load(&self) -> Option<EngineLoad> {
        let mut loads = self.ranks.iter().filter_map(|rank| rank.view().engine_load());
        let first = loads.next()?;
        let by_rank = self.state.loads_by_rank.load(Ordering::Acquire);
        Some(if by_rank { loads.fold(first, EngineLoad::and) } else { first })
    }

    /// Stores the engine's load figures for each of its ranks, `None` when they are not known any more.
    pub fn set_engine_load(&self, load: Option<EngineLoad>) {
        self.state.loads_by_rank.store(false, Ordering::Release);
        self.ranks.iter().for_each(|rank| rank.view().set_engine_load(load));
    }

    /// Stores the load figures of each rank, `None` for those that are not known.
    pub(crate) fn set_rank_loads(&self, loads: &[Option<EngineLoad>]) {
        self.state.loads_by_rank.store(true, Ordering::Release);
        self.ranks.iter().zip(loads).for_each(|(rank, load)| rank.view().set_engine_load(*load));
    }

    /// Returns whether the engine reports every load figure, also if they do not count now.
    #[must_use]
    pub fn reports_load(&self) -> bool {
        self.state.reports_load.load(Ordering::Relaxed)
    }

    pub(crate) fn set_reports_load(&self, reports: bool) {
        self.state.reports_load.store(reports, Ordering::Relaxed);
    }

    /// Returns whether the engine sleeps: it lives, and serves no request until it is woken.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.state.asleep.load(Ordering::Acquire)
    }

    /// Sets whether the engine sleeps, and wakes the requests that wait for it if it fell asleep. Returns
    /// true if it changed.
    pub fn set_asleep(&self, asleep: bool) -> bool {
        let changed = self.state.asleep.swap(asleep, Ordering::AcqRel) != asleep;
        if changed {
            self.tell_ranks();
        }
        if asleep {
            self.note_sleep_mode();
        }
        if changed && asleep {
            self.state.stops_serving.notify_waiters();
        }
        changed
    }

    /// Returns whether the engine may be put to sleep while requests wait for it: it slept before, or has an
    /// endpoint that says whether it does. vLLM has that one where it has those that put it to sleep.
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        self.state.may_sleep.load(Ordering::Relaxed)
    }

    /// Notes that the engine may be put to sleep.
    pub(crate) fn note_sleep_mode(&self) {
        self.state.may_sleep.store(true, Ordering::Relaxed);
    }

    /// Returns whether an operator paused the engine: it lives, and requests wait until it resumes.
    #[must_use]
    pub(crate) fn is_engine_paused(&self) -> bool {
        self.state.engine_paused.load(Ordering::Acquire)
    }

    /// Sets whether the engine is paused. Returns true if it changed.
    pub(crate) fn set_engine_paused(&self, paused: bool) -> bool {
        let changed = self.state.engine_paused.swap(paused, Ordering::AcqRel) != paused;
        if changed {
            self.tell_ranks();
        }
        changed
    }

    /// Returns what the configuration and the engine contradict each other about.
    #[must_use]
    pub fn contradiction(&self) -> Option<Arc<Contradiction>> {
        self.state.contradiction.load_full()
    }

    /// Stores the contradiction between the configuration and the engine. While there is one, the worker is
    /// not eligible. Returns true if it changed.
    pub(crate) fn set_contradiction(&self, contradiction: Option<Contradiction>) -> bool {
        self.state.misconfigured.store(contradiction.is_some(), Ordering::Release);
        self.tell_ranks();
        let new = contradiction.map(Arc::new);
        let changed = new != self.state.contradiction.swap(new.clone());
        if changed {
            self.set_problem(new.map(|contradiction| contradiction.to_string()));
        }
        changed
    }

    /// Returns whether the engine contradicts the worker's description.
    #[must_use]
    pub fn is_misconfigured(&self) -> bool {
        self.state.misconfigured.load(Ordering::Acquire)
    }

    /// Returns the problem that the last probe found, for operators.
    #[must_use]
    pub fn problem(&self) -> Option<Arc<String>> {
        self.state.problem.load_full()
    }

    /// Stores the problem that a probe found.
    pub(crate) fn set_problem(&self, problem: Option<String>) {
        self.state.problem.store(problem.map(Arc::new));
    }
}
