//! Eligibility: the candidates that may serve a leg (F6). Decided before any policy runs, and no policy can
//! extend it.

use pointsman_workers::{Candidate, Ineligible, Leg, WorkerSpec};

use super::RouteError;
use crate::{
    query::{CandidateId, Query},
    receipt::Decider,
};

/// Fills `rows` with the candidates: all eligible ones, or the one that a hint names.
pub(super) fn candidate_rows(
    query: &Query<'_>,
    pool: &[Candidate],
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    if query.pin.is_some() { pinned_row(query, pool, rows) } else { eligible_rows(query, pool, rows) }
}

pub(super) fn eligible_rows(
    query: &Query<'_>,
    pool: &[Candidate],
    rows: &mut Vec<u32>,
) -> Result<(), RouteError> {
    rows.clear();
    let (mut busy, mut failing) = (false, false);
    let mut last = None;
    for (position, candidate) in (0_u32..).zip(pool) {
        if query.tried.contains(&(candidate.worker.id(), candidate.rank)) {
            last = Some("tried already");
            continue;
        }
        match ineligible(query, candidate) {
            None => rows.push(position),
            Some(Refused::Busy) => busy = true,
            Some(Refused::Failing) => failing = true,
            Some(Refused::Other(reason)) => last = Some(reason),
        }
    }
    if rows.is_empty() && failing {
        // Only workers with an open breaker are left: one of them may have recovered, so try them rather than
        // refuse.
        let is_failing = |candidate: &Candidate| {
            let tried = query.tried.contains(&(candidate.worker.id(), candidate.rank));
            !tried && matches!(ineligible(query, candidate), Some(Refused::Failing))
        };
        rows.extend(
            (0_u32..).zip(pool).filter(|(_, candidate)| is_failing(candidate)).map(|(position, _)| position),
        );
    }
    match last {
        _ if !rows.is_empty() => Ok(()),
        _ if busy => Err(RouteError::AllBusy(query.leg)),
        Some(reason) => Err(no_worker(query, format!(" (of {}; last: {reason})", pool.len()))),
        None => Err(no_worker(query, String::new())),
    }
}

fn pinned_row(query: &Query<'_>, pool: &[Candidate], rows: &mut Vec<u32>) -> Result<(), RouteError> {
    let Some((worker, rank)) = query.pin else { return Ok(()) };
    rows.clear();
    let known = query.snapshot.get(worker).ok_or(RouteError::UnknownWorker(worker))?;
    if let Some(rank) = rank.filter(|rank| rank.0 >= known.spec().dp_size) {
        let reason = format!("rank {rank} of {}", known.spec().dp_size);
        return Err(RouteError::NotEligible(worker, reason));
    }
    let mut refused = None;
    for (position, candidate) in (0_u32..).zip(pool) {
        let wanted = candidate.worker.id() == worker && rank.is_none_or(|rank| candidate.rank == rank);
        if wanted {
            match ineligible(query, candidate) {
                None => {
                    rows.push(position);
                    return Ok(());
                }
                Some(reason) => refused = Some(reason.as_str()),
            }
        }
    }
    let reason = refused
        .map_or_else(|| format!("it does not serve the {} leg of this model", query.leg), str::to_owned);
    Err(RouteError::NotEligible(worker, reason))
}

/// Returns the row that is fixed before any policy runs: by a hint, by the session, or by the decode
/// override's plan.
pub(super) fn preset_row(query: &Query<'_>, pool: &[Candidate], rows: &[u32]) -> Option<(u32, Decider)> {
    if query.pin.is_some() {
        return Some((rows.first().copied().unwrap_or(0), Decider::Pin));
    }
    let row_of = |wanted: CandidateId| {
        let is_it = |candidate: &Candidate| (candidate.worker.id(), candidate.rank) == wanted;
        rows.iter().copied().find(|row| pool.get(*row as usize).is_some_and(is_it))
    };
    let session = query.session.and_then(row_of).map(|row| (row, Decider::Session));
    session.or_else(|| query.planned.and_then(row_of).map(|row| (row, Decider::Plan)))
}

/// Returns why `candidate` may not serve the leg, when it may not (F6).
fn ineligible(query: &Query<'_>, candidate: &Candidate) -> Option<Refused> {
    let request = query.request;
    let spec = candidate.worker.spec();
    let allowed =
        request.allowed_workers.is_empty() || request.allowed_workers.contains(&candidate.worker.id());
    if !allowed {
        return Some(Refused::Other("not allowed by the request"));
    }
    if !request.required_taints.iter().all(|taint| spec.taints.contains(taint)) {
        return Some(Refused::Other("lacks a required taint"));
    }
    if let Some(lora) = request.lora.as_deref().filter(|_| !spec.loras.is_empty())
        && !spec.loras.iter().any(|loaded| loaded == lora)
    {
        return Some(Refused::Other("lacks the LoRA"));
    }
    if let Some(peer) = query.peer() {
        if !spec.pairs_with(peer) {
            return Some(Refused::Other("uses another handoff protocol than the other leg"));
        }
        let (prefill, decode) = if query.leg == Leg::Prefill { (spec, peer) } else { (peer, spec) };
        if prefill.forbids_transfer_to(decode) {
            return Some(Refused::Other("is outside the prefill worker's transfer domain"));
        }
    }
    if query.leg == Leg::Prefill && query.other_leg.is_none() && !query.probe && !has_partner(query, spec) {
        return Some(Refused::Other("no decode worker uses its handoff protocol"));
    }
    match candidate.ineligible()? {
        Ineligible::AtCapacity => Some(Refused::Busy),
        Ineligible::Failing => Some(Refused::Failing),
        other => Some(Refused::Other(other.as_str())),
    }
}

/// Whether some decode worker is up that can take over from this prefill worker.
fn has_partner(query: &Query<'_>, spec: &WorkerSpec) -> bool {
    let up = |candidate: &Candidate| candidate.ineligible().is_none_or(|reason| !reason.is_down());
    let fits = |decode: &WorkerSpec| decode.pairs_with(spec) && !spec.forbids_transfer_to(decode);
    let decode = query.snapshot.pool(query.model, Leg::Decode);
    decode.iter().any(|candidate| fits(candidate.worker.spec()) && up(candidate))
}

/// The error of a leg for which no candidate is eligible; `detail` follows the message.
pub(super) fn no_worker(query: &Query<'_>, detail: String) -> RouteError {
    RouteError::NoWorker { leg: query.leg, detail }
}

#[derive(Clone, Copy)]
enum Refused {
    Busy,
    Failing,
    Other(&'static str),
}

impl Refused {
    fn as_str(self) -> &'static str {
        match self {
            Self::Busy => Ineligible::AtCapacity.as_str(),
            Self::Failing => Ineligible::Failing.as_str(),
            Self::Other(reason) => reason,
        }
    }
}
