//! Before any leg: does the model exist, may it be served now, and by one worker or by two (spec B, D4).

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use pointsman_routing::{CandidateId, Plan, Query, Subject};
use pointsman_workers::{Candidate, Ineligible, Leg, Snapshot};

use crate::{app::App, connector::connector_for, error::Cause, legs::Shape, request::Request};

/// Decides the request's shape.
///
/// # Errors
/// [`Cause`] when it cannot be served at all.
pub(crate) fn plan(
    app: &App,
    request: &Arc<Request>,
    subject: &Subject,
    snapshot: &Snapshot,
) -> Result<Shape, Cause> {
    let model = &request.model;
    if !snapshot.serves(model) {
        return Err(Cause::ModelNotFound(model.to_string()));
    }
    let up = |leg| snapshot.pool(model, leg).iter().find(|candidate| is_up(candidate));
    let local = !snapshot.pool(model, Leg::Aggregated).is_empty();
    let enforced = app.settings.enforce_disagg;
    // B1: no prefill worker was ever seen, or all are gone.
    let (Some(prefill), Some(_)) = (up(Leg::Prefill), up(Leg::Decode)) else {
        return match (enforced, local) {
            (true, _) => Err(Cause::PrefillUnavailable),
            (false, true) => Ok(Shape::Single),
            (false, false) => Err(Cause::NoWorker("no worker can prefill for this model now".to_owned())),
        };
    };
    if let Some(reason) = connector_for(prefill.worker.spec()).unsplittable(request) {
        app.metrics.handoff("unsplittable");
        return if local && !enforced {
            Ok(Shape::Single)
        } else {
            Err(Cause::InvalidRequest(format!("{reason}: such a request cannot be disaggregated")))
        };
    }
    let query = query(request, subject, snapshot, Leg::Decode, false, None, &[], 1);
    match app.router.plan(&query).plan {
        Plan::Remote => Ok(Shape::Remote),
        Plan::Local if local && !enforced => Ok(Shape::Single),
        Plan::Local => {
            app.metrics.handoff("local_refused");
            Ok(Shape::Remote)
        }
        Plan::Shed(shed) => Err(Cause::Shed(shed)),
    }
}

fn is_up(candidate: &Candidate) -> bool {
    matches!(candidate.ineligible(), None | Some(Ineligible::AtCapacity))
}

/// The question for one leg, with fresh randomness and the time of now.
#[expect(clippy::too_many_arguments, reason = "each is a part of the question")]
pub(super) fn query<'a>(
    request: &'a Request,
    subject: &'a Subject,
    snapshot: &'a Snapshot,
    leg: Leg,
    explain: bool,
    other_leg: Option<CandidateId>,
    tried: &'a [CandidateId],
    attempts: u32,
) -> Query<'a> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Query {
        snapshot,
        model: &request.model,
        leg,
        attempt: attempts.saturating_sub(1),
        subject,
        pin: request.hints.pinned(leg),
        tried,
        other_leg,
        explain,
        seed: rand::random(),
        now_us: u64::try_from(now.as_micros()).unwrap_or(u64::MAX),
    }
}
