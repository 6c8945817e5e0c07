//! Where a request would run, without running it (spec F2): `POST /v1/route` and the annotation `query_instance_id:`.
//!
//! Nothing changes by asking: no booking, no record in the index, no cursor moved.

use std::sync::Arc;

use pointsman_routing::{Query, Receipt, RouterConfigOverride, Subject, scope::Scope};
use pointsman_workers::{Candidate, Leg, Snapshot};
use serde_json::{Map, Value, json};

use crate::{
    app::App,
    drive::{self, Planning},
    error::Cause,
    legs::Shape,
    request::Request,
};

/// Answers where the legs would run.
///
/// # Errors
/// As routing them would fail.
pub(crate) fn preview(
    app: &App,
    request: &Arc<Request>,
    subject: &Subject,
    snapshot: &Snapshot,
    planning: &Planning,
) -> Result<Value, Cause> {
    let _preview = Scope::preview();
    let question = |leg| Query { explain: true, ..drive::question(app, request, subject, snapshot, leg) };
    let (mut worker_id, mut legs) = (Map::new(), Vec::new());
    if planning.shape == Shape::Remote {
        let (prefill, receipt) = routed(app, &question(Leg::Prefill), &RouterConfigOverride::default())?;
        let query = Query { other_leg: Some(drive::id_of(&prefill)), ..question(Leg::Decode) };
        legs.push(leg(&receipt, &prefill));
        worker_id.insert("prefill_worker_id".to_owned(), json!(prefill.worker.id()));
        worker_id.insert("prefill_dp_rank".to_owned(), json!(prefill.rank));
        let over = app.router.decode_config(&query).0;
        let (decode, receipt) = routed(app, &query, &over)?;
        legs.push(leg(&receipt, &decode));
        worker_id.insert("decode_worker_id".to_owned(), json!(decode.worker.id()));
        worker_id.insert("decode_dp_rank".to_owned(), json!(decode.rank));
    } else {
        let query = Query { planned: planning.planned, ..question(Leg::Aggregated) };
        let (single, receipt) = routed(app, &query, &RouterConfigOverride::default())?;
        legs.push(leg(&receipt, &single));
        worker_id.insert("decode_worker_id".to_owned(), json!(single.worker.id()));
        worker_id.insert("decode_dp_rank".to_owned(), json!(single.rank));
    }
    Ok(json!({
        "worker_id": worker_id,
        "token_ids": request.token_ids.as_deref().unwrap_or_default(),
        "prompt_tokens": subject.prompt_tokens,
        "prompt_tokens_estimated": subject.prompt_tokens_estimated,
        "prompt_blocks": subject.prefix.named_blocks(),
        "legs": legs,
    }))
}

fn routed(app: &App, query: &Query<'_>, over: &RouterConfigOverride) -> Result<(Candidate, Receipt), Cause> {
    app.router.preview(query, over).map_err(|error| Cause::of_route(error, app.settings.busy_status))
}

fn leg(receipt: &Receipt, candidate: &Candidate) -> Value {
    let load = candidate.load();
    json!({ "receipt": receipt, "load": {
        "active_requests": load.active_requests(),
        "active_prefill_tokens": load.active_prefill_tokens(),
        "decode_blocks": load.decode_blocks(),
    } })
}
