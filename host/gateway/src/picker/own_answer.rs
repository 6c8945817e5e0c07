//! Answers what no engine answers, such as the list of models, with the clients' endpoints of this gateway.

use axum::{Router, body::Body};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use pointsman_endpoint_picker::{Refusal, RequestHead};

use crate::{
    http::{arrival::Arrival, peer::Sender},
    openai::error::ApiError,
};

/// Largest answer, bytes.
const MAX_ANSWER: usize = 4 * 1024 * 1024;

/// Answers a request with the gateway's own endpoint for it.
pub(super) async fn own_answer(own: Router, head: &RequestHead, body: Bytes, sender: Sender) -> Refusal {
    let request = Request::builder().method(head.method.as_str()).uri(head.path.as_str());
    let Ok(mut request) = request.body(Body::from(body)) else {
        let error = ApiError::InvalidRequest("the request has no valid method and path".to_owned());
        return refusal(error.response(""), error.code());
    };
    *request.headers_mut() = head.headers.clone();
    request.extensions_mut().insert(Arrival::now(sender));
    // A router answers in any case.
    let Ok(answer) = TowerToHyperService::new(own).call(request).await;
    let (parts, body) = answer.into_parts();
    match Limited::new(body, MAX_ANSWER).collect().await {
        Ok(body) => refusal(Response::from_parts(parts, body.to_bytes()), "own"),
        Err(_) => {
            let mut answer = Response::new(Bytes::new());
            *answer.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            refusal(answer, "own")
        }
    }
}

/// Returns an answer for the proxy to send.
pub(super) fn refusal(answer: Response<Bytes>, code: &'static str) -> Refusal {
    let (mut parts, body) = answer.into_parts();
    // The proxy counts the bytes itself.
    parts.headers.remove(header::CONTENT_LENGTH);
    // The protocol has 429 for requests that are dropped because of load; proxies know no 529.
    let status = if parts.status.as_u16() == 529 { 429 } else { parts.status.as_u16() };
    let headers = parts.headers.into_iter().filter_map(|(name, value)| Some((name?, value))).collect();
    Refusal { status, code, headers, body }
}
