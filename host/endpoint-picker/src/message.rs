//! Messages of `ext_proc`: heads that come in, answers that go out.

use bytes::Bytes;
use envoy_types::pb::envoy::{
    config::core::v3::{
        HeaderMap as EnvoyHeaders, HeaderValue as EnvoyHeader, HeaderValueOption,
        header_value_option::HeaderAppendAction,
    },
    service::ext_proc::v3::{
        BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpHeaders,
        ImmediateResponse, ProcessingResponse, StreamedBodyResponse, TrailersResponse,
        body_mutation::Mutation, processing_response::Response,
    },
    r#type::v3::HttpStatus,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::{Pick, Refusal, metadata};

/// Largest chunk of a body that is sent to Envoy, bytes: below the 64 KiB that data planes accept.
pub(crate) const CHUNK: usize = 62_000;

/// Maximum number of headers of a request, and of those that are read of an answer.
pub(crate) const MAX_HEADERS: usize = 256;

/// Largest head of a request, bytes of names and values. Envoy's own limit is 60 KiB.
pub(crate) const MAX_HEAD: usize = 64 * 1024;

/// Half of an exchange that a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Request,
    Answer,
}

/// A head as Envoy sends it.
#[derive(Debug, Default)]
pub struct Head {
    /// `:method` of a request.
    pub method: String,
    /// `:path` of a request, with its query.
    pub path: String,
    /// `:status` of an answer; 0: it has none.
    pub status: u16,
    /// The other fields.
    pub headers: HeaderMap,
}

impl Head {
    /// Reads a list of headers. Fields that HTTP does not allow are left out.
    #[must_use]
    pub fn of(headers: Option<EnvoyHeaders>) -> Self {
        let mut head = Self::default();
        for EnvoyHeader { key, value, raw_value } in
            headers.unwrap_or_default().headers.into_iter().take(MAX_HEADERS)
        {
            let value = if raw_value.is_empty() { value.into_bytes() } else { raw_value };
            match key.as_str() {
                ":method" => head.method = text(value),
                ":path" => head.path = text(value),
                ":status" => head.status = text(value).parse().unwrap_or(0),
                _ => {
                    let name = HeaderName::try_from(key).ok();
                    let value = HeaderValue::from_maybe_shared(Bytes::from(value)).ok();
                    if let (Some(name), Some(value)) = (name, value) {
                        head.headers.append(name, value);
                    }
                }
            }
        }
        head
    }
}

/// Returns whether a request has more or longer headers than are read.
pub(crate) fn is_too_large(message: &HttpHeaders) -> bool {
    let Some(EnvoyHeaders { headers }) = &message.headers else { return false };
    let bytes = headers.iter().map(|field| field.key.len() + field.value.len() + field.raw_value.len());
    headers.len() > MAX_HEADERS || bytes.sum::<usize>() > MAX_HEAD
}

fn text(value: Vec<u8>) -> String {
    String::from_utf8(value).unwrap_or_default()
}

/// Answers the headers of one half: with changes, or without.
pub(crate) fn headers(half: Half, mutation: Option<HeaderMutation>) -> ProcessingResponse {
    let clear_route_cache = half == Half::Request && mutation.is_some();
    let common = CommonResponse { header_mutation: mutation, clear_route_cache, ..CommonResponse::default() };
    let answer = HeadersResponse { response: Some(common) };
    of(match half {
        Half::Request => Response::RequestHeaders(answer),
        Half::Answer => Response::ResponseHeaders(answer),
    })
}

/// Answers the headers of the request with the endpoint.
pub(crate) fn picked_headers(pick: &Pick) -> ProcessingResponse {
    ProcessingResponse {
        dynamic_metadata: Some(metadata::destination(&pick.endpoint)),
        ..headers(Half::Request, Some(mutation(pick)))
    }
}

/// Answers the buffered body of the request with the endpoint. `changed`: the body differs from Envoy's.
pub(crate) fn picked_buffered(pick: &Pick, changed: bool) -> ProcessingResponse {
    let body = BodyMutation { mutation: Some(Mutation::Body(pick.body.to_vec())) };
    let common = CommonResponse {
        header_mutation: Some(mutation(pick)),
        body_mutation: changed.then_some(body),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        dynamic_metadata: Some(metadata::destination(&pick.endpoint)),
        ..of(Response::RequestBody(BodyResponse { response: Some(common) }))
    }
}

/// Passes bytes of a body on, in chunks. `ends`: they are the last.
pub(crate) fn chunks(half: Half, body: &[u8], ends: bool) -> impl Iterator<Item = ProcessingResponse> {
    let count = body.len().div_ceil(CHUNK).max(1);
    (0..count).map(move |place| {
        let from = place * CHUNK;
        let chunk = body.get(from..body.len().min(from + CHUNK)).unwrap_or_default().to_vec();
        chunk_of(half, chunk, ends && place + 1 == count)
    })
}

/// Passes one chunk on.
pub(crate) fn chunk_of(half: Half, body: Vec<u8>, end_of_stream: bool) -> ProcessingResponse {
    let streamed = StreamedBodyResponse { body, end_of_stream, ..StreamedBodyResponse::default() };
    let mutation = BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) };
    body_answer(half, CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() })
}

/// Lets a chunk pass as it is.
pub(crate) fn unchanged_chunk(half: Half) -> ProcessingResponse {
    body_answer(half, CommonResponse::default())
}

fn body_answer(half: Half, common: CommonResponse) -> ProcessingResponse {
    let answer = BodyResponse { response: Some(common) };
    of(match half {
        Half::Request => Response::RequestBody(answer),
        Half::Answer => Response::ResponseBody(answer),
    })
}

/// Lets trailers pass as they are.
pub(crate) fn trailers(half: Half) -> ProcessingResponse {
    let answer = TrailersResponse::default();
    of(match half {
        Half::Request => Response::RequestTrailers(answer),
        Half::Answer => Response::ResponseTrailers(answer),
    })
}

/// Ends the request with an answer of the picker.
pub(crate) fn refusal(refusal: Refusal) -> ProcessingResponse {
    let Refusal { status, code, headers, body } = refusal;
    of(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(status) }),
        headers: Some(set_headers(&headers)),
        body: body.to_vec(),
        grpc_status: None,
        details: format!("pointsman_{code}"),
    }))
}

/// The changes of a request's headers: the endpoint, and what the picker sets and removes.
fn mutation(pick: &Pick) -> HeaderMutation {
    let endpoint = EnvoyHeader {
        key: metadata::DESTINATION.to_owned(),
        raw_value: pick.endpoint.clone().into_bytes(),
        ..EnvoyHeader::default()
    };
    let mut changes = set_headers(&pick.set_headers);
    changes.set_headers.push(option(endpoint));
    changes.remove_headers = pick.remove_headers.iter().map(ToString::to_string).collect();
    changes
}

/// The change that sets headers.
pub(crate) fn set_headers(headers: &[(HeaderName, HeaderValue)]) -> HeaderMutation {
    let set_headers = headers.iter().map(|(name, value)| set_header(name, value)).collect();
    HeaderMutation { set_headers, remove_headers: Vec::new() }
}

fn set_header(name: &HeaderName, value: &HeaderValue) -> HeaderValueOption {
    option(EnvoyHeader {
        key: name.to_string(),
        raw_value: value.as_bytes().to_vec(),
        ..EnvoyHeader::default()
    })
}

fn option(header: EnvoyHeader) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(header),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

fn of(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}
