//! The `Host` header of HTTP/1.1. A proxy and the gateway may read different names from a request with two of
//! them (RFC 9112, 3.2).

use hyper::{
    Request, Response, Version,
    body::Incoming,
    header::{CONNECTION, HOST, HeaderMap, HeaderValue},
    http::uri::Authority,
};

use super::{connected::AnswerBody, request_id};
use crate::{openai::error::ApiError, orchestrate::relay::Answer};

/// Refuses a request that does not name one host, and ends its connection.
pub(super) fn refusal(request: &Request<Incoming>) -> Option<Response<AnswerBody>> {
    let problem = problem(request.version(), request.headers())?;
    let error =
        ApiError::InvalidRequest(format!("reading the head: {problem}; send one `host: NAME[:PORT]`"));
    let mut response = error.response(&request_id(request.headers()));
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    Some(response.map(|text| AnswerBody::Left(Answer::whole(text))))
}

/// Returns what is wrong. HTTP/1.0 does not require the header, and its value may be empty.
fn problem(version: Version, headers: &HeaderMap) -> Option<&'static str> {
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => (version == Version::HTTP_11).then_some("it has no `Host` header"),
        (Some(_), Some(_)) => Some("it has several `Host` headers"),
        (Some(host), None) => (!is_valid(host)).then_some("its `Host` header is not valid"),
    }
}

fn is_valid(host: &HeaderValue) -> bool {
    let is_host = |name: &[u8]| !name.contains(&b'@') && Authority::try_from(name).is_ok();
    host.is_empty() || is_host(host.as_bytes())
}
