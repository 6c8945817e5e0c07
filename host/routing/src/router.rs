//! The router: one path for every leg. Pins a generation, computes facts, runs the program, books the choice.
//!
//! Never waits: no lock that a reload holds, no compile, no I/O.

use std::sync::Arc;

use pointsman_workers::{BookingRequest, Candidate, Pool};
use prefix_index::{Prefix, PrefixIndex, ProvisionalRecord};
use tokio::time::Instant;

use crate::{
    buffers::BufferPool,
    busy::BusyRules,
    config::{RouterConfig, RouterConfigOverride},
    context::Purpose,
    decisions::Decisions,
    native::Cursors,
    policy::OnFailure,
    query::Query,
    receipt::RefusedDecision,
    slot::NativeMode,
    slots::Slots,
};

mod answer;
mod choose;
mod decode_override;
mod eligible;
mod no_worker;
mod record_decision;
mod reserve;
mod shadow;

pub use answer::{RouteError, RoutePreview, Routed};
pub use decode_override::OverrideDecision;
pub use no_worker::{holder_text, no_worker_text};
pub use reserve::ReservedPlace;

/// Routes legs.
#[derive(Debug)]
pub struct Router {
    slots: Slots,
    index: Arc<PrefixIndex>,
    config: RouterConfig,
    on_failure: OnFailure,
    fallback: NativeMode,
    cursors: Arc<Cursors>,
    decisions: Arc<Decisions>,
    busy: Arc<BusyRules>,
}

impl Router {
    /// A router over `slots` that falls back to the native `kv` cost when a policy gives no usable answer.
    #[must_use]
    pub fn new(slots: Slots, index: Arc<PrefixIndex>, config: RouterConfig, on_failure: OnFailure) -> Self {
        let decisions = Arc::new(Decisions::off());
        Self {
            slots,
            index,
            config,
            on_failure,
            fallback: NativeMode::Kv,
            cursors: Arc::default(),
            decisions,
            busy: Arc::default(),
        }
    }

    /// The same router with thresholds beyond which candidates are busy.
    #[must_use]
    pub fn with_busy(mut self, busy: BusyRules) -> Self {
        self.busy = Arc::new(busy);
        self
    }

    /// The thresholds beyond which candidates are busy.
    #[must_use]
    pub fn busy(&self) -> &BusyRules {
        &self.busy
    }

    /// The same router, recording its decisions.
    #[must_use]
    pub fn recording(mut self, decisions: Decisions) -> Self {
        self.decisions = Arc::new(decisions);
        self
    }

    /// Returns a router over the same slots, index and round-robin cursors, with these settings instead of
    /// its own.
    #[must_use]
    pub fn reconfigured(
        &self,
        config: RouterConfig,
        on_failure: OnFailure,
        decisions: Arc<Decisions>,
    ) -> Self {
        Self {
            slots: self.slots.clone(),
            index: self.index.clone(),
            config,
            on_failure,
            fallback: self.fallback,
            cursors: self.cursors.clone(),
            decisions,
            busy: self.busy.clone(),
        }
    }

    /// The recorded decisions.
    #[must_use]
    pub fn decisions(&self) -> &Arc<Decisions> {
        &self.decisions
    }

    /// The slots.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The prefix index, which routing reads and, in approximate mode, writes.
    #[must_use]
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// Chooses and books a worker for one leg. `over` is the decode override's configuration of this leg.
    ///
    /// # Errors
    /// [`RouteError`] when no worker may serve it, or the policy refuses.
    pub fn route(&self, query: &Query<'_>, over: &RouterConfigOverride) -> Result<Routed, RouteError> {
        self.route_noting(query, over, &mut None)
    }

    /// Like [`Router::route`]. Puts the decision of a slot that refused the request into `refused`.
    ///
    /// # Errors
    /// Same as [`Router::route`].
    pub fn route_noting(
        &self,
        query: &Query<'_>,
        over: &RouterConfigOverride,
        refused: &mut Option<RefusedDecision>,
    ) -> Result<Routed, RouteError> {
        let started = Instant::now();
        let config = self.config.with(&query.request.config).with(over);
        BufferPool::with_buffers(|buffers| {
            let chosen = match self.choose(query, config, Purpose::Route, buffers) {
                Ok(chosen) => chosen,
                Err(not_chosen) => {
                    *refused = self.refused(query, config, &not_chosen, buffers, started);
                    return Err(not_chosen.error);
                }
            };
            let candidate = chosen.candidate.clone();
            let request = query.request;
            let [device, host, disk] = chosen.cached;
            let cached = device + host + disk;
            chosen.note_candidate(cached);
            let cached_tokens = cached.saturating_mul(request.block_size);
            let booking = candidate.book(&BookingRequest {
                leg: query.leg,
                prompt_tokens: request.prompt_tokens,
                new_prefill_tokens: request.prompt_tokens.saturating_sub(cached_tokens),
                prefix: request.prefix.clone(),
                total_prompt_blocks: request.request_blocks(),
                block_size: request.block_size,
                expected_output_tokens: request.expected_output_tokens,
                assume_kv_reuse: config.assume_kv_reuse,
                track_prefill_tokens: config.track_prefill_tokens,
            });
            count_decision(query.snapshot.pool(query.model, query.leg), &candidate);
            // Recorded now, and not when the worker accepts: the requests of a burst go where their common
            // prefix is (F5).
            let record = self.record_prefix(&candidate, &request.prefix, started);
            let mut receipt = chosen.receipt(query, started);
            receipt.id = self.record_choice(query, config, &receipt, buffers);
            Ok(Routed { candidate, booking, record, receipt })
        })
    }

    /// Records that the candidate has the prefix cached from now on, unless its engine has no prefix cache.
    fn record_prefix(&self, candidate: &Candidate, prefix: &Prefix, now: Instant) -> ProvisionalRecord {
        let (worker, rank) = (candidate.worker_id(), candidate.rank);
        let record = |prefix| self.index.record_provisionally(worker, rank, prefix, now);
        if candidate.worker.caches_prefixes() { record(prefix) } else { record(&Prefix::default()) }
    }

    /// Chooses as [`Router::route`] would now, and changes no state: no booking, no entry in the index, no
    /// cursor moved (F2).
    ///
    /// # Errors
    /// Same as [`Router::route`].
    pub fn preview(
        &self,
        query: &Query<'_>,
        over: &RouterConfigOverride,
    ) -> Result<RoutePreview, RouteError> {
        let started = Instant::now();
        let config = self.config.with(&query.request.config).with(over);
        let chosen =
            BufferPool::with_buffers(|buffers| self.choose(query, config, Purpose::Preview, buffers));
        let mut chosen = chosen.map_err(|refused| refused.error)?;
        let terms = std::mem::take(&mut chosen.terms);
        let candidate = chosen.candidate.clone();
        Ok(RoutePreview { candidate, receipt: chosen.receipt(query, started), config, terms })
    }
}

/// Counts a decision for workers that just started, which get a growing share of the decisions.
fn count_decision(pool: &Pool, chosen: &Candidate) {
    if chosen.worker.any_warms_up() {
        pool.iter().for_each(|candidate| candidate.worker.count_decision(pool.len()));
        chosen.worker.take_turn();
    }
}

#[cfg(test)]
mod tests;
