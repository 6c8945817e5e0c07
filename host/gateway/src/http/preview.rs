//! `POST /v1/route`: where a chat or completion would run (F2).

use axum::{
    body::Body,
    extract::State as Extract,
    http::{Request as HttpRequest, Response},
};
use pointsman_routing::Purpose;

use super::{
    DataThread,
    admit::{Admitted, admit, identify},
    arrival::Arrival,
    find_model::{check_limits, find_model},
    prepare::unnamed_model,
    request_id,
};
use crate::{
    openai::{
        error::ApiError,
        request::{Endpoint, Request, json_object},
    },
    orchestrate::{self, preview},
    state::caller::Tenant,
    tokenization::routing_request::TenantLoad,
};

pub(super) async fn route(thread: Extract<DataThread>, request: HttpRequest<Body>) -> Response<Body> {
    let (state, mut upstream) = thread.context();
    let (parts, body) = request.into_parts();
    let Arrival { sender, first_byte: started, .. } = Arrival::of(&parts.extensions);
    let id = request_id(&parts.headers);
    let answered = async {
        thread.check_page(&parts.headers, &parts.uri)?;
        upstream.set_via_from(&parts.headers)?;
        let caller = identify(&state, &parts.headers, &sender).await?;
        let Admitted { body, caller, held: _held } =
            admit(&state, caller, &parts.headers, body, started).await?;
        let body = json_object(body)?;
        let is_chat = body.get("messages").is_some();
        let endpoint = if is_chat { Endpoint::ChatCompletions } else { Endpoint::Completions };
        let (rules, unnamed) = (&state.settings.request_rules, unnamed_model(&state, endpoint, &body)?);
        let mut request = Request::of_json(endpoint, &parts.headers, body, rules, unnamed)?;
        find_model(&state, &mut request).await;
        check_limits(&request, &state.registry.snapshot())?;
        let tenant = caller.tenant_hash();
        let workers = state.registry.snapshot();
        let mut reservation = None;
        if let Some(limits) = &state.tenant_limits {
            let reserved = limits.reserve(&mut reservation, tenant, &request.model, &workers);
            reserved.map_err(ApiError::TenantLimit)?;
        }
        let tokens = state.tokens.of(&request, tenant, &upstream, &state.metrics, &workers).await;
        let load = |Tenant { hash, .. }| TenantLoad { hash, active_requests: state.tenants.active(hash) };
        let tenant = caller.tenant.map(load);
        let snapshot = state.registry.snapshot();
        let routing_request = state.routing_request((&request, &snapshot), tokens.as_ref(), tenant);
        let plan = orchestrate::plan(&state, &request, &routing_request, &snapshot, Purpose::Preview, None)?;
        let told = preview::preview(&state, &request, tokens.as_ref(), &routing_request, &snapshot, &plan)?;
        Ok(preview::of_route(&request, &told, &id))
    };
    let answered: Result<_, ApiError> = answered.await;
    answered.unwrap_or_else(|error| error.response(&id)).map(Body::from)
}
