//! The search for the candidates that may serve a leg. It reads columns, and asks a candidate only when they
//! do not decide.

use pointsman_workers::{Candidate, Pause, Pool, RankView};

use super::{
    Refused, RouteError,
    described::{Described, PartnerIndex},
    ineligible_with,
    no_worker::{self, Phrase},
};
use crate::{
    busy::{BusyThresholds, LegLimits},
    query::Query,
};

pub(super) struct Search<'a> {
    query: &'a Query<'a>,
    limits: LegLimits,
    pool: &'a Pool,
    /// The partners, where each candidate is asked.
    index: Option<PartnerIndex<'a>>,
    /// The context that candidates need, if some have less and another may serve the leg.
    context: Option<u32>,
    /// Whether a candidate was only left out because it is busy.
    pub(super) saw_busy: bool,
    /// The shortest pause of the candidates that were only left out because their engines refused more work.
    pub(super) paused: Option<Pause>,
    /// Whether one of them may be tried when no other candidate is left.
    pub(super) saw_trial: bool,
    /// Whether a candidate was only left out because its last requests failed.
    pub(super) saw_failing: bool,
    /// Whether a candidate was only left out because it makes no progress.
    pub(super) saw_stuck: bool,
    /// Whether a candidate was only left out because it just started.
    pub(super) saw_warming: bool,
}

impl<'a> Search<'a> {
    pub(super) fn new(query: &'a Query<'a>, limits: LegLimits, pool: &'a Pool) -> Self {
        Self {
            query,
            limits,
            pool,
            index: None,
            context: None,
            saw_busy: false,
            paused: None,
            saw_trial: false,
            saw_failing: false,
            saw_stuck: false,
            saw_warming: false,
        }
    }

    /// Fills `rows`, which are empty, with the eligible candidates.
    pub(super) fn fill(&mut self, rows: &mut Vec<u32>) {
        let (pool, allowed) = (self.pool, &self.query.request.allowed_workers);
        self.note_context();
        if let Some(allowed) = allowed
            && !self.query.only_consumes()
        {
            rows.extend(allowed.iter().flat_map(|worker| pool.rows_of(*worker)));
            rows.sort_unstable();
            rows.dedup();
            return rows.retain(|row| self.may_serve(*row));
        }
        let described = Described::of(self.query, pool);
        if described == Described::Unknown {
            self.index = PartnerIndex::of(self.query, pool);
        }
        let has_thresholds = self.limits.thresholds != BusyThresholds::default();
        let asks_none = described == Described::All && !has_thresholds && self.context.is_none();
        if asks_none && pool.all_surely_eligible() {
            rows.extend(0..u32::try_from(pool.len()).unwrap_or(u32::MAX));
        } else {
            let mut check = |row, surely, load: Option<RankView<'_>>| {
                let is_busy = || load.is_some_and(|load| self.limits.thresholds.exceeded(load).is_some());
                let may_serve = match described.may_serve(pool, row) {
                    Some(false) => false,
                    Some(true) if surely && self.context.is_none() && !is_busy() => true,
                    _ => self.may_serve(row),
                };
                rows.extend(may_serve.then_some(row));
            };
            if has_thresholds {
                pool.for_each_eligible_load(|row, surely, load| check(row, surely, Some(load)));
            } else {
                // The loads are not read.
                pool.for_each_eligibility(|row, surely| check(row, surely, None));
            }
        }
        for (worker, rank) in self.query.tried {
            let tried = pool.row_of(*worker, *rank).and_then(|row| rows.binary_search(&row).ok());
            tried.map(|position| rows.remove(position));
        }
    }

    /// Fills `rows` with the candidates whose last requests failed, when no other is left: one of them may
    /// have recovered, so they are tried rather than the request refused.
    pub(super) fn fill_failing(&self, rows: &mut Vec<u32>) {
        self.fill_where(rows, |refused| matches!(refused, Some(Refused::Failing)));
    }

    /// Like [`Search::fill_failing`], with the candidates that refused one request among those that they
    /// serve.
    pub(super) fn fill_paused(&self, rows: &mut Vec<u32>) {
        let is_trial = |refused| matches!(refused, Some(Refused::Paused(pause)) if pause.may_be_tried);
        self.fill_where(rows, is_trial);
    }

    /// Like [`Search::fill_failing`], with the candidates that make no progress.
    pub(super) fn fill_stuck(&self, rows: &mut Vec<u32>) {
        self.fill_where(rows, |refused| matches!(refused, Some(Refused::Stuck)));
    }

    /// Like [`Search::fill_failing`], with the candidates that just started.
    pub(super) fn fill_warming(&self, rows: &mut Vec<u32>) {
        self.fill_where(rows, |refused| refused.is_none());
    }

    fn fill_where(&self, rows: &mut Vec<u32>, is_meant: impl Fn(Option<Refused>) -> bool) {
        let is_meant =
            |candidate: &Candidate| !self.was_tried(candidate) && is_meant(self.refused(candidate));
        let meant = (0_u32..).zip(self.pool).filter(|(_, candidate)| is_meant(candidate));
        rows.extend(meant.map(|(row, _)| row));
    }

    /// Notes the context that the request needs if it matters which candidate is chosen: without one that has
    /// it, the engine's own refusal says more.
    fn note_context(&mut self) {
        let needed = self.query.request.context_tokens.filter(|_| !self.query.only_consumes());
        let Some(needed) = needed.filter(|needed| self.pool.shortest_context() < *needed) else { return };
        let may_serve = |candidate: &Candidate| {
            let refused = || self.refused(candidate);
            !self.was_tried(candidate)
                && !matches!(refused(), Some(Refused::Stuck | Refused::Down(_) | Refused::Other(_)))
        };
        let mut pool = self.pool.iter();
        if pool.any(|candidate| !self.has_less_context(candidate, needed) && may_serve(candidate)) {
            self.context = Some(needed);
        }
    }

    fn has_less_context(&self, candidate: &Candidate, needed: u32) -> bool {
        candidate.worker.context_length(self.query.model).is_some_and(|length| length < needed)
    }

    fn refused(&self, candidate: &Candidate) -> Option<Refused> {
        const SHORT: Phrase = ("takes less context than this needs", "take less context than this needs");
        if self.context.is_some_and(|needed| self.has_less_context(candidate, needed)) {
            return Some(Refused::Other(SHORT));
        }
        ineligible_with(self.query, &self.limits, candidate, self.index.as_ref())
    }

    /// The error of a leg for which no candidate is eligible.
    pub(super) fn no_worker(&self) -> RouteError {
        const FAILED: Phrase = ("failed this request", "failed this request");
        let why = |candidate: &Candidate| {
            if self.was_tried(candidate) {
                Some(FAILED)
            } else {
                self.refused(candidate).map(Refused::phrase)
            }
        };
        let (model, leg) = (self.query.model, self.query.leg);
        RouteError::NoWorker { leg, text: no_worker::text(self.query.snapshot, model, leg, why) }
    }

    /// Asks a candidate, and notes why it may not serve.
    fn may_serve(&mut self, row: u32) -> bool {
        let Some(candidate) = self.pool.get(row as usize) else { return false };
        if self.was_tried(candidate) {
            return false;
        }
        match self.refused(candidate) {
            None if self.may_be_chosen(candidate) => return true,
            None => self.saw_warming = true,
            Some(Refused::Busy(_) | Refused::AtLearnedLimit) => self.saw_busy = true,
            Some(Refused::Paused(pause)) => {
                self.saw_trial |= pause.may_be_tried;
                self.paused = Some(shorter(self.paused, pause));
            }
            Some(Refused::Failing) => self.saw_failing = true,
            Some(Refused::Stuck) => self.saw_stuck = true,
            Some(Refused::Down(_) | Refused::Other(_)) => {}
        }
        false
    }

    /// Returns whether a candidate has its turn, if it just started. A session stays where it is.
    fn may_be_chosen(&self, candidate: &Candidate) -> bool {
        candidate.worker.has_turn() || self.query.session == Some((candidate.worker_id(), candidate.rank))
    }

    fn was_tried(&self, candidate: &Candidate) -> bool {
        self.query.tried.contains(&(candidate.worker_id(), candidate.rank))
    }
}

/// Returns the shorter pause. Too many requests came from the client only if all workers say so.
fn shorter(known: Option<Pause>, pause: Pause) -> Pause {
    let Some(known) = known else { return pause };
    Pause {
        left: known.left.min(pause.left),
        is_too_many: known.is_too_many && pause.is_too_many,
        may_be_tried: known.may_be_tried || pause.may_be_tried,
    }
}
