//! Heads that a proxy and the gateway may read differently: the host of a request (RFC 9112, 3.2), and where
//! its body ends (6.1), which can hide a second request.

use hyper::{
    Request, Response, Version,
    header::{CONNECTION, CONTENT_LENGTH, HOST, HeaderMap, HeaderValue, TRANSFER_ENCODING},
    http::uri::Authority,
};

use super::{connected::AnswerBody, request_id};
use crate::{openai::error::ApiError, orchestrate::relay::Answer};

/// Refuses a request that does not name one host, or whose body has another coding than chunks or, over
/// HTTP/2, several lengths. Ends its connection, or only its stream of HTTP/2. Lengths that differ do not get
/// here over HTTP/1: the HTTP server refuses them.
pub(super) fn refusal<B>(request: &Request<B>) -> Option<Response<AnswerBody>> {
    let (version, headers) = (request.version(), request.headers());
    let is_http2 = version == Version::HTTP_2;
    let problem = host_problem(version, headers).or_else(|| coding_problem(headers));
    let problem = problem.or_else(|| length_problem(headers).filter(|_| is_http2))?;
    let error = ApiError::InvalidRequest(format!("reading the head: {problem}"));
    let mut response = error.response(&request_id(headers));
    if !is_http2 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    Some(response.map(|text| AnswerBody::Left(Answer::whole(text))))
}

/// HTTP/1.0 does not require the header, and its value may be empty.
fn host_problem(version: Version, headers: &HeaderMap) -> Option<&'static str> {
    let mut hosts = headers.get_all(HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) => {
            (version == Version::HTTP_11).then_some("it has no `Host` header; send one `host: NAME[:PORT]`")
        }
        (Some(_), Some(_)) => Some("it has several `Host` headers; send one `host: NAME[:PORT]`"),
        (Some(host), None) => {
            (!is_valid(host)).then_some("its `Host` header is not valid; send one `host: NAME[:PORT]`")
        }
    }
}

fn is_valid(host: &HeaderValue) -> bool {
    let is_host = |name: &[u8]| !name.contains(&b'@') && Authority::try_from(name).is_ok();
    host.is_empty() || is_host(host.as_bytes())
}

fn coding_problem(headers: &HeaderMap) -> Option<&'static str> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let (first, second) = (codings.next()?, codings.next());
    let is_chunked = second.is_none() && first.as_bytes().eq_ignore_ascii_case(b"chunked");
    (!is_chunked).then_some(
        "its body has another transfer coding than `chunked`; send `transfer-encoding: chunked` or a length",
    )
}

/// HTTP/2 has the length in its frames, and a proxy towards HTTP/1 copies the headers.
fn length_problem(headers: &HeaderMap) -> Option<&'static str> {
    let has_several = headers.get_all(CONTENT_LENGTH).iter().nth(1).is_some();
    has_several.then_some("it has several `Content-Length` headers; send one, or none")
}
