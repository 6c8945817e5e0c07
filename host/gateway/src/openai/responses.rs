//! What a request to `/v1/responses` asks of its engine beside the answer: to store it, to run in the
//! background, to call tools.

use serde::Deserialize;

use super::{
    lax::Flag,
    request::{Endpoint, Request},
    request_error::read,
};
use crate::upstream::CallError;

/// Returns whether an engine answers in the background, whether or not the connection holds.
#[must_use]
pub(crate) fn is_in_background(request: &Request) -> bool {
    request.endpoint == Endpoint::Responses
        && matches!(read(&request.body, "background"), Ok(Some(Flag(true))))
}

/// Returns whether an engine may store the answer to a request, or continue with it in the background, and do
/// so twice if it gets the request twice.
pub(crate) fn may_store(request: &Request) -> bool {
    let is_response = request.endpoint == Endpoint::Responses;
    let is_not_stored = || matches!(read(&request.body, "store"), Ok(Some(Flag(false))));
    is_response && (!is_not_stored() || is_in_background(request))
}

/// Returns whether only one worker can run a response: it continues another one, runs in the background, or
/// has tools of the engine, which generates anew after each call of them.
pub(crate) fn needs_one_worker(request: &Request) -> bool {
    const CALLED_BY_CLIENT: [&str; 3] = ["function", "custom", "namespace"];
    let tools: Result<Option<Vec<Tool>>, _> = read(&request.body, "tools");
    let is_for_client = |tool: &Tool| CALLED_BY_CLIENT.contains(&tool.r#type.as_str());
    let continues = request.body.get("previous_response_id").is_some_and(|id| id != "null");
    continues
        || is_in_background(request)
        || !tools.is_ok_and(|tools| tools.iter().flatten().all(is_for_client))
}

#[derive(Deserialize)]
struct Tool {
    r#type: String,
}

/// Returns whether an engine may continue with a request after this failure: it answers in the background,
/// whether or not the connection holds, and may have got the request.
pub(crate) fn may_run_on(request: &Request, error: &CallError) -> bool {
    let may_have_it = error.began() && !matches!(error, CallError::Status { .. });
    may_have_it && is_in_background(request)
}
