//! A worker whose description changed. The engine is the same, so what the gateway knows of it stays, and
//! what runs on it counts.

use std::sync::Arc;

use super::{Health, Worker, ranks};
use crate::{booking::Journal, columns::Columns, facts::FactName, spec::WorkerSpec};

impl Worker {
    /// Returns whether `spec` describes the engine of this worker. Another engine or address is another
    /// process.
    pub(crate) fn has_engine_of(&self, spec: &WorkerSpec) -> bool {
        self.spec.url == spec.url && self.spec.engine == spec.engine
    }

    /// Creates the worker that takes over from this one, with a new description by the operator. It is as
    /// healthy as this one, unless what is known of the engine does not suffice for the new description.
    pub(crate) fn described_as(
        &self,
        spec: WorkerSpec,
        columns: &Columns,
        journal: Option<&Arc<Journal>>,
    ) -> Self {
        let facts = self.facts();
        let lacks_role = facts.role.is_none() && spec.from_engine.contains(&FactName::Role);
        let completed = if lacks_role { None } else { spec.completed(&facts).ok() };
        let suffices = completed.is_some();
        self.completed_as(completed.unwrap_or(spec), suffices, columns, journal)
    }

    /// Creates the worker that takes over from this one, with a description that the engine completed. If
    /// what is known does not suffice, or the role or the transport is another one, of which other facts
    /// count, its engine is asked before it gets a request.
    pub(crate) fn completed_as(
        &self,
        spec: WorkerSpec,
        suffices: bool,
        columns: &Columns,
        journal: Option<&Arc<Journal>>,
    ) -> Self {
        let is_known = suffices && (spec.role, spec.transport) == (self.spec.role, self.spec.transport);
        let ranks = ranks(&spec, &self.ranks, columns, journal);
        let worker = Self::with(spec, ranks, self.state.clone());
        worker.state.told.lock().follow(&worker.spec, &worker.ranks);
        worker.set_facts((*worker.facts()).clone());
        if !is_known {
            worker.set_health(Health::Unknown);
        }
        worker.tell_ranks();
        worker
    }

    /// Returns whether this worker took over from `earlier`, or is the same one: what the gateway knows of
    /// the engine stays.
    #[must_use]
    pub fn continues(&self, earlier: &Self) -> bool {
        Arc::ptr_eq(&self.state, &earlier.state)
    }

    /// Returns whether no other worker has taken over from this one.
    pub(super) fn is_current(&self) -> bool {
        Arc::ptr_eq(&self.ranks, &self.state.told.lock().ranks)
    }
}
