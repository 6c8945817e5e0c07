//! Eligibility: the candidates that may serve a leg (F6). Decided before any policy runs, and no policy can
//! extend it.

use pointsman_workers::{Candidate, Ineligible, Invariant, Leg, Pause, Pool};

use super::{
    RouteError,
    no_worker::{self, Phrase, holder_text, phrase, phrase_of},
};
mod described;
mod free_partners;
mod search;

use described::{PartnerIndex, fits, other, partners, refused_by_description, refused_with};
use free_partners::prefer_free_partners;
use search::Search;

use crate::{
    busy::{BusyRules, LegLimits},
    query::{CandidateId, Pairing, Query},
    receipt::Decider,
};

/// Fills `rows` with the candidates: all eligible ones, or the one that a hint names. Checks the worker that
/// a hint names for the other leg first, so that no leg runs for nothing.
pub(super) fn candidate_rows(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    let committed = query.pairing.committed.unwrap_or_default();
    if committed.beyond_limits {
        last_rows(query, pool, rows);
        if !rows.is_empty() {
            return Ok(());
        }
    }
    check_other_pin(query, busy, rows)?;
    let filled = if query.pin.is_some() {
        pinned_row(query, busy, pool, rows)
    } else if let Some(planned) = query.planned {
        planned_row(query, busy, pool, planned).map(|row| {
            rows.clear();
            rows.push(row);
        })
    } else {
        eligible_rows(query, busy, pool, rows).map(|()| prefer_free_partners(query, busy, pool, rows))
    };
    match filled {
        Err(RouteError::NoWorker { .. }) if let Some(error) = never_pairs(query, pool) => Err(error),
        done => done,
    }
}

/// Checks the worker that a hint names for the other leg as that leg would.
fn check_other_pin(query: &Query<'_>, busy: &BusyRules, rows: &mut Vec<u32>) -> Result<(), RouteError> {
    let Some(pin) = query.pairing.other_pin.filter(|_| query.other_leg.is_none() && !query.probe) else {
        return Ok(());
    };
    if !matches!(query.leg, Leg::Prefill | Leg::Decode) {
        return Ok(());
    }
    let leg = other(query.leg);
    let pairing = Pairing::default();
    let pinned = Query { leg, pin: Some(pin), session: None, planned: None, tried: &[], pairing, ..*query };
    pinned_row(&pinned, busy, query.snapshot.pool(query.model, leg), rows)
}

/// The error of a leg none of whose workers can ever pair with the worker that a hint names for the other
/// leg.
fn never_pairs(query: &Query<'_>, pool: &Pool) -> Option<RouteError> {
    let (worker, _) = query.pairing.other_pin.filter(|_| query.other_leg.is_none())?;
    let others = query.snapshot.pool(query.model, other(query.leg));
    let partner = partners(query, others).next()?.worker.spec();
    let pairs = pool.iter().any(|candidate| fits(query.leg, candidate.worker.spec(), partner));
    let reason = format!("no {} worker can pair with it", query.leg);
    (!pairs).then_some(RouteError::NotEligible(worker, reason))
}

/// Fills `rows` with every live candidate that can take a committed handoff, whatever its load. Workers that
/// drain or are stuck come last.
fn last_rows(query: &Query<'_>, pool: &Pool, rows: &mut Vec<u32>) {
    rows.clear();
    let is_wanted = |candidate: &Candidate| {
        let pinned = query.pin.is_none_or(|(worker, rank)| {
            candidate.worker_id() == worker && rank.is_none_or(|rank| candidate.rank == rank)
        });
        let tried = query.tried.contains(&(candidate.worker_id(), candidate.rank));
        pinned && !tried && is_allowed(query, candidate)
    };
    for is_last in [false, true] {
        let lives = |candidate: &Candidate| match candidate.ineligible() {
            None | Some(Ineligible::AtCapacity | Ineligible::Paused | Ineligible::Failing) => !is_last,
            Some(Ineligible::Draining | Ineligible::Stuck) => is_last,
            Some(_) => false,
        };
        let takes = |candidate: &Candidate| {
            lives(candidate)
                && is_wanted(candidate)
                && refused_by_description(query, candidate.worker.spec()).is_none()
        };
        rows.extend((0_u32..).zip(pool).filter(|(_, candidate)| takes(candidate)).map(|(row, _)| row));
        if !rows.is_empty() {
            return;
        }
    }
}

fn is_allowed(query: &Query<'_>, candidate: &Candidate) -> bool {
    let allowed = query.request.allowed_workers.as_ref();
    query.only_consumes() || allowed.is_none_or(|allowed| allowed.contains(&candidate.worker_id()))
}

pub(super) fn eligible_rows(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    rows.clear();
    let limits = busy.limits_of(query, query.leg);
    let mut search = Search::new(query, limits, pool);
    search.fill(rows);
    if !rows.is_empty() {
        prefer_others(query, pool, rows);
        return Ok(());
    }
    if search.saw_warming {
        search.fill_warming(rows);
    }
    if rows.is_empty() && search.saw_trial && !busy.requests_wait() {
        search.fill_paused(rows);
    }
    if rows.is_empty() && search.saw_failing {
        search.fill_failing(rows);
    }
    // A retry does not wait for a worker that is stuck; a busy worker will soon be free.
    let is_last = !search.saw_busy && search.paused.is_none() && query.tried.is_empty();
    if rows.is_empty() && search.saw_stuck && is_last {
        search.fill_stuck(rows);
    }
    match (rows.is_empty(), search.saw_busy, search.paused) {
        (false, ..) => Ok(()),
        (true, true, _) => Err(RouteError::AllBusy(query.leg)),
        (true, false, Some(pause)) => Err(RouteError::AllPaused { leg: query.leg, pause }),
        (true, false, None) => Err(search.no_worker()),
    }
}

/// Leaves out the workers that lack the endpoint, and then the spared one, if others are eligible.
fn prefer_others(query: &Query<'_>, pool: &Pool, rows: &mut Vec<u32>) {
    for left_out in [query.lacking, query.spared.as_slice()] {
        let is_other = |row: &u32| {
            let other = pool.get(*row as usize);
            other.is_some_and(|other| !left_out.contains(&other.worker_id()))
        };
        if !left_out.is_empty() && rows.iter().any(is_other) {
            rows.retain(is_other);
        }
    }
}

fn pinned_row(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    let limits = busy.limits_of(query, query.leg);
    let Some((worker, rank)) = query.pin else { return Ok(()) };
    rows.clear();
    let gone = || match query.continues {
        true => none_left(query, "the worker that had what the request continues has left"),
        false => RouteError::UnknownWorker(worker),
    };
    let known = query.snapshot.get(worker).ok_or_else(gone)?;
    if let Some(rank) = rank.filter(|rank| rank.0 >= known.spec().dp_size) {
        let reason = format!("it has no rank {rank}: its ranks are 0 to {}", known.spec().dp_size - 1);
        return Err(RouteError::NotEligible(worker, reason));
    }
    if query.tried.iter().any(|(tried, _)| *tried == worker) {
        if query.continues {
            let reason = format!("worker {worker}, which has what the request continues, failed it");
            return Err(none_left(query, &reason));
        }
        let text = format!("worker {worker}, to which the request pins the {} leg, failed it", query.leg);
        return Err(RouteError::NoWorker { leg: query.leg, text });
    }
    let (mut refused, mut is_busy, mut is_down, mut last) = (None, false, false, None);
    for (position, candidate) in (0_u32..).zip(pool) {
        let wanted = candidate.worker_id() == worker && rank.is_none_or(|rank| candidate.rank == rank);
        if wanted {
            match ineligible(query, &limits, candidate) {
                None => {
                    rows.push(position);
                    return Ok(());
                }
                Some(Refused::Paused(pause)) if pause.may_be_tried && !busy.requests_wait() => {
                    rows.push(position);
                    return Ok(());
                }
                Some(Refused::Paused(pause)) => return Err(RouteError::AllPaused { leg: query.leg, pause }),
                Some(Refused::AtLearnedLimit) => return Err(RouteError::AllBusy(query.leg)),
                Some(Refused::Failing | Refused::Stuck) if query.continues => last = Some(position),
                Some(reason) => {
                    is_busy |= matches!(reason, Refused::Busy(_));
                    is_down |= matches!(reason, Refused::Down(_));
                    refused = Some(reason.phrase().0);
                }
            }
        }
    }
    // The client did not choose the worker of what it continues: it gets what it would get if the model had
    // this worker only [I12.13].
    let is_only = query.continues;
    match (last, refused) {
        _ if is_busy && (query.is_committed() || is_only) => Err(RouteError::AllBusy(query.leg)),
        (Some(last), _) => {
            rows.push(last);
            Ok(())
        }
        _ if is_down && is_only => Err(none_left(query, &holder_text(known))),
        (None, Some(reason)) => Err(RouteError::NotEligible(worker, format!("it {reason}"))),
        (None, None) => {
            let reason = format!("it does not serve the {} leg of this model", query.leg);
            Err(RouteError::NotEligible(worker, reason))
        }
    }
}

/// Returns the row of the candidate for which local prefill is planned. Its own prompts and those that other
/// workers prefill share its engine, so it has to be within the limits of both legs.
fn planned_row(
    query: &Query<'_>,
    busy: &BusyRules,
    pool: &Pool,
    planned: CandidateId,
) -> Result<u32, RouteError> {
    let limits = busy.limits_of(query, query.leg);
    let of_decode = busy.limits_of(query, Leg::Decode).thresholds;
    let is_free = |candidate: &&Candidate| {
        !query.tried.contains(&planned)
            && of_decode.exceeded(candidate.load().view()).is_none()
            && ineligible(query, &limits, candidate).is_none()
    };
    let row = pool.row_of(planned.0, planned.1);
    let free = row.filter(|row| pool.get(*row as usize).as_ref().is_some_and(is_free));
    free.ok_or_else(|| none_left(query, "the worker for which local prefill was planned cannot take it now"))
}

/// The error of a leg whose eligible candidates were all left out, for a reason.
pub(super) fn none_left(query: &Query<'_>, reason: &str) -> RouteError {
    let text = format!("no worker can serve '{}': {reason}", query.model);
    RouteError::NoWorker { leg: query.leg, text }
}

/// Returns the row that is fixed before any policy runs: by a hint, by the decode override's plan, or by the
/// session.
pub(super) fn preset_row(query: &Query<'_>, pool: &Pool, rows: &[u32]) -> Option<(u32, Decider)> {
    if query.pin.is_some() {
        Invariant::PinnedRow.check(!rows.is_empty());
        return Some((rows.first().copied().unwrap_or(0), Decider::Pin));
    }
    let row_of =
        |(worker, rank): CandidateId| pool.row_of(worker, rank).filter(|row| rows.binary_search(row).is_ok());
    let planned = query.planned.and_then(row_of).map(|row| (row, Decider::Plan));
    planned.or_else(|| query.session.and_then(row_of).map(|row| (row, Decider::Session)))
}

/// Returns why `candidate` may not serve the leg, when it may not (F6).
fn ineligible(query: &Query<'_>, limits: &LegLimits, candidate: &Candidate) -> Option<Refused> {
    ineligible_with(query, limits, candidate, None)
}

/// Like [`ineligible`]. Looks for partners in `index`, if there is one.
fn ineligible_with(
    query: &Query<'_>,
    limits: &LegLimits,
    candidate: &Candidate,
    index: Option<&PartnerIndex<'_>>,
) -> Option<Refused> {
    if !is_allowed(query, candidate) {
        return Some(Refused::Other(("is not allowed by the request", "are not allowed by the request")));
    }
    if let Some(refused) = refused_with(query, candidate.worker.spec(), index) {
        return Some(Refused::Other(refused));
    }
    // A worker at its limit may still serve this leg if one of its taken places is reserved for it.
    let stands = |reason: &Ineligible| match reason {
        Ineligible::AtCapacity => query.pairing.reserved != Some(candidate.worker_id()),
        _ => true,
    };
    // No other worker has the stored response that the request continues.
    let reason = match query.continues {
        true => candidate.worker.ineligible_although_draining(),
        false => candidate.ineligible(),
    };
    let busy = &limits.thresholds;
    match reason.filter(stands) {
        // Requests wait for a place that they will get, rather than for another refusal.
        None if limits.requests_wait && !query.probe && candidate.worker.is_at_learned_limit() => {
            Some(Refused::AtLearnedLimit)
        }
        None => busy.exceeded(candidate.load().view()).map(|threshold| Refused::Busy(over(threshold))),
        Some(Ineligible::AtCapacity) => Some(Refused::Busy(phrase(Ineligible::AtCapacity))),
        Some(Ineligible::Failing) => Some(Refused::Failing),
        // A probe asks the worker whether it refuses.
        Some(Ineligible::Paused) if query.probe => None,
        Some(Ineligible::Paused) => candidate.worker.pause().map(|pause| {
            let reserved = query.pairing.reserved == Some(candidate.worker_id());
            let is_free = || {
                let has_place = reserved || !candidate.worker.is_at_capacity();
                has_place && busy.exceeded(candidate.load().view()).is_none()
            };
            Refused::Paused(Pause { may_be_tried: pause.may_be_tried && is_free(), ..pause })
        }),
        Some(Ineligible::Stuck) => Some(Refused::Stuck),
        Some(down) => Some(Refused::Down(phrase_of(&candidate.worker, down))),
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
    /// It has as many requests as its engine takes, as it refused others a moment ago.
    AtLearnedLimit,
    Paused(Pause),
    Failing,
    Stuck,
    /// It cannot serve any request now.
    Down(Phrase),
    Other(Phrase),
}

impl Refused {
    fn phrase(self) -> Phrase {
        match self {
            Self::Failing => phrase(Ineligible::Failing),
            Self::Paused(_) => phrase(Ineligible::Paused),
            Self::Stuck => phrase(Ineligible::Stuck),
            Self::AtLearnedLimit => phrase(Ineligible::AtCapacity),
            Self::Busy(reason) | Self::Down(reason) | Self::Other(reason) => reason,
        }
    }
}

#[cfg(test)]
mod tests;
