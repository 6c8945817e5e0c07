//! Reserves a place for the decode leg before its prefill runs. A prefill whose result no decode worker takes
//! would hold blocks for nothing.

use pointsman_workers::{Candidate, Leg, Reservation, Worker, WorkerId};
use tokio::time::Instant;

use super::{RouteError, Router, eligible::candidate_rows};
use crate::{
    buffers::BufferPool,
    config::RouterConfigOverride,
    context::Purpose,
    query::{Pairing, Query},
    receipt::RefusedDecision,
    slot::{NativeMode, Program, Slot, SlotKind},
};

/// Reserved place of a worker for a leg. Dropping it gives the place back.
#[derive(Debug)]
pub struct ReservedPlace {
    worker: WorkerId,
    _reservation: Reservation,
}

impl ReservedPlace {
    fn on(worker: &Worker) -> Self {
        Self { worker: worker.id(), _reservation: worker.reserve() }
    }

    /// Returns the worker that has the place.
    #[must_use]
    pub fn worker(&self) -> WorkerId {
        self.worker
    }
}

impl Router {
    /// Checks that a leg could be routed now, and reserves a place on the worker that it would get; `None`
    /// when no worker has a limit. Books and records nothing. Puts the decision of a slot that refuses the
    /// request into `refused`.
    ///
    /// # Errors
    /// Same as [`Router::route`].
    pub fn reserve(
        &self,
        query: &Query<'_>,
        refused: &mut Option<RefusedDecision>,
    ) -> Result<Option<ReservedPlace>, RouteError> {
        let started = Instant::now();
        let pool = query.snapshot.pool(query.model, query.leg);
        if pool.all_surely_eligible() && !self.may_refuse(query) {
            return BufferPool::with_buffers(|buffers| {
                candidate_rows(query, &self.busy, pool, &mut buffers.rows).map(|()| None)
            });
        }
        let over = match query.leg {
            Leg::Decode => self.decode_config(query, Purpose::Preview).0,
            Leg::Prefill | Leg::Aggregated => RouterConfigOverride::default(),
        };
        let config = self.config.with(&query.request.config).with(&over);
        BufferPool::with_buffers(|buffers| {
            let quiet = Query { explain: false, ..*query };
            match self.choose(&quiet, config, Purpose::Preview, buffers) {
                Ok(chosen) => {
                    let worker = &chosen.candidate.worker;
                    Ok(worker.spec().max_concurrency.map(|_| ReservedPlace::on(worker)))
                }
                Err(not_chosen) => {
                    *refused = self.refused(&quiet, config, &not_chosen, buffers, started);
                    Err(not_chosen.error)
                }
            }
        })
    }

    /// Reserves a place on a worker that may serve a leg and takes it at once; `None` when one of them has no
    /// limit. Asks no policy, and reads only the conditions of the request (see
    /// [`RoutingRequest::conditions`](crate::RoutingRequest::conditions)).
    ///
    /// # Errors
    /// No worker takes the leg at once.
    pub fn reserve_free(&self, query: &Query<'_>) -> Result<Option<ReservedPlace>, RouteError> {
        let pool = query.snapshot.pool(query.model, query.leg);
        BufferPool::with_buffers(|buffers| {
            candidate_rows(query, &self.busy, pool, &mut buffers.rows)?;
            let rows = buffers.rows.iter().filter_map(|row| pool.get(*row as usize));
            let is_free = |candidate: &&Candidate| {
                candidate.ineligible().is_none() && !candidate.worker.is_at_learned_limit()
            };
            let has_limit = |candidate: &&Candidate| candidate.worker.spec().max_concurrency.is_some();
            let free = rows.filter(is_free).min_by_key(has_limit);
            let free = free.ok_or(RouteError::AllBusy(query.leg))?;
            Ok(has_limit(&free).then(|| ReservedPlace::on(&free.worker)))
        })
    }

    /// Asks the policies of the slot `prefill` about a request that its decode worker is planned to prefill:
    /// no leg asks them. Returns whether they refuse it. `query` is the decode leg's.
    #[must_use]
    pub fn prefill_refuses(&self, query: &Query<'_>, purpose: Purpose) -> bool {
        let pairing = Pairing::default();
        let prefill =
            Query { leg: Leg::Prefill, pin: None, session: None, pairing, request_id: None, ..*query };
        if !self.may_refuse(&prefill) {
            return false;
        }
        let config = self.config.with(&query.request.config);
        BufferPool::with_buffers(|buffers| {
            let chosen = self.choose(&prefill, config, purpose, buffers);
            chosen.is_err_and(|not_chosen| matches!(not_chosen.error, RouteError::Shed(_)))
        })
    }

    /// Returns the slot that decides about a request.
    pub(super) fn slot(&self, query: &Query<'_>, kind: SlotKind) -> &Slot {
        self.slots.get_or_parent(query.model, query.snapshot.parent_of(query.model), kind)
    }

    /// Returns whether the program of the leg's slot may refuse a request that workers are eligible for.
    fn may_refuse(&self, query: &Query<'_>) -> bool {
        let slot = self.slot(query, SlotKind::of(query.leg)).snapshot();
        match &slot.serving(query.request).program {
            Program::Native(mode) => *mode == NativeMode::Direct,
            Program::Scorers { filters, .. } => !filters.is_empty(),
            Program::Selector { .. } | Program::DecodeOverride(_) => true,
        }
    }
}
