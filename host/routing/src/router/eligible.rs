//! Eligibility: the candidates that may serve a leg (F6). Decided before any policy runs, and no policy can
//! extend it.

use pointsman_workers::{Candidate, Ineligible, Pool};

use super::{
    RouteError,
    no_worker::{self, Phrase, phrase},
};
mod described;
mod search;

use described::refused_by_description;
use search::Search;

use crate::{
    busy::{BusyRules, BusyThresholds},
    query::{CandidateId, Query},
    receipt::Decider,
};

/// Fills `rows` with the candidates: all eligible ones, or the one that a hint names.
pub(super) fn candidate_rows(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    let fill = if query.pin.is_some() { pinned_row } else { eligible_rows };
    fill(query, busy, pool, rows)
}

pub(super) fn eligible_rows(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    rows.clear();
    let thresholds = busy.of(query.model, query.leg);
    let mut search = Search::new(query, thresholds, pool);
    search.fill(rows);
    if !rows.is_empty() {
        return Ok(());
    }
    if search.saw_failing {
        search.fill_failing(rows);
    }
    // A retry waits for no worker that others wait for in vain, and a busy worker is about to be free.
    if rows.is_empty() && search.saw_stuck && !search.saw_busy && query.tried.is_empty() {
        search.fill_stuck(rows);
    }
    match (rows.is_empty(), search.saw_busy) {
        (false, _) => Ok(()),
        (true, true) => Err(RouteError::AllBusy(query.leg)),
        (true, false) => Err(no_worker(query, &thresholds, pool)),
    }
}

/// The error of a leg for which no candidate is eligible.
pub(super) fn no_worker(query: &Query<'_>, busy: &BusyThresholds, pool: &[Candidate]) -> RouteError {
    let why = |candidate: &Candidate| {
        if query.tried.contains(&(candidate.worker_id(), candidate.rank)) {
            return Some(("failed this request", "failed this request"));
        }
        ineligible(query, busy, candidate).map(Refused::phrase)
    };
    RouteError::NoWorker { leg: query.leg, text: no_worker::text(query.model, query.leg, pool, why) }
}

fn pinned_row(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    let thresholds = busy.of(query.model, query.leg);
    let Some((worker, rank)) = query.pin else { return Ok(()) };
    rows.clear();
    let known = query.snapshot.get(worker).ok_or(RouteError::UnknownWorker(worker))?;
    if let Some(rank) = rank.filter(|rank| rank.0 >= known.spec().dp_size) {
        let reason = format!("it has no rank {rank}: its ranks are 0 to {}", known.spec().dp_size - 1);
        return Err(RouteError::NotEligible(worker, reason));
    }
    let mut refused = None;
    for (position, candidate) in (0_u32..).zip(pool) {
        let wanted = candidate.worker_id() == worker && rank.is_none_or(|rank| candidate.rank == rank);
        if wanted {
            match ineligible(query, &thresholds, candidate) {
                None => {
                    rows.push(position);
                    return Ok(());
                }
                Some(reason) => refused = Some(reason.phrase().0),
            }
        }
    }
    let reason = match refused {
        Some(reason) => format!("it {reason}"),
        None => format!("it does not serve the {} leg of this model", query.leg),
    };
    Err(RouteError::NotEligible(worker, reason))
}

/// The error of a leg whose eligible candidates were all left out, for a reason.
pub(super) fn none_left(query: &Query<'_>, reason: &str) -> RouteError {
    let text = format!("no worker can serve '{}': {reason}", query.model);
    RouteError::NoWorker { leg: query.leg, text }
}

/// Returns the row that is fixed before any policy runs: by a hint, by the session, or by the decode
/// override's plan.
pub(super) fn preset_row(query: &Query<'_>, pool: &Pool, rows: &[u32]) -> Option<(u32, Decider)> {
    if query.pin.is_some() {
        return Some((rows.first().copied().unwrap_or(0), Decider::Pin));
    }
    let row_of =
        |(worker, rank): CandidateId| pool.row_of(worker, rank).filter(|row| rows.binary_search(row).is_ok());
    let session = query.session.and_then(row_of).map(|row| (row, Decider::Session));
    session.or_else(|| query.planned.and_then(row_of).map(|row| (row, Decider::Plan)))
}

/// Returns why `candidate` may not serve the leg, when it may not (F6).
fn ineligible(query: &Query<'_>, busy: &BusyThresholds, candidate: &Candidate) -> Option<Refused> {
    let request = query.request;
    let allowed =
        request.allowed_workers.is_empty() || request.allowed_workers.contains(&candidate.worker_id());
    if !allowed {
        return Some(Refused::Other(("is not allowed by the request", "are not allowed by the request")));
    }
    if let Some(refused) = refused_by_description(query, candidate.worker.spec()) {
        return Some(Refused::Other(refused));
    }
    match candidate.ineligible() {
        None => busy.exceeded(candidate.load().view()).map(|threshold| Refused::Busy(over(threshold))),
        Some(Ineligible::AtCapacity) => Some(Refused::Busy(phrase(Ineligible::AtCapacity))),
        Some(Ineligible::Failing) => Some(Refused::Failing),
        Some(Ineligible::Stuck) => Some(Refused::Stuck),
        Some(other) => Some(Refused::Other(phrase(other))),
    }
}

/// Returns the phrase for a worker beyond a busy threshold.
fn over(threshold: &str) -> Phrase {
    match threshold {
        "prefill_tokens" => {
            ("has too many prefill tokens in flight", "have too many prefill tokens in flight")
        }
        "engine_queue" => ("has too long a queue in its engine", "have too long a queue in their engine"),
        _ => ("has too little free KV cache", "have too little free KV cache"),
    }
}

#[derive(Clone, Copy)]
enum Refused {
    Busy(Phrase),
    Failing,
    Stuck,
    Other(Phrase),
}

impl Refused {
    fn phrase(self) -> Phrase {
        match self {
            Self::Failing => phrase(Ineligible::Failing),
            Self::Stuck => phrase(Ineligible::Stuck),
            Self::Busy(reason) | Self::Other(reason) => reason,
        }
    }
}

#[cfg(test)]
mod tests;
