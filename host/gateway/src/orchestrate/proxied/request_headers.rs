//! Headers of a request that a proxy carries.

use http::{HeaderName, HeaderValue, header};

use crate::{openai::client_key::API_KEY, orchestrate::executor::RANK};

/// Headers of clients that engines, or the sidecars before them, would obey. The body continues decoded, and
/// the answer has to come without a coding: its events are read.
const OBEYED: [HeaderName; 18] = [
    header::CONTENT_ENCODING,
    header::ACCEPT_ENCODING,
    header::AUTHORIZATION,
    API_KEY,
    HeaderName::from_static(RANK),
    HeaderName::from_static("x-data-parallel-host-port"),
    HeaderName::from_static("x-prefiller-host-port"),
    HeaderName::from_static("x-prefiller-url"),
    HeaderName::from_static("x-encoder-hosts-ports"),
    HeaderName::from_static("x-override-rid"),
    HeaderName::from_static("x-override-bootstrap-host"),
    HeaderName::from_static("x-override-bootstrap-port"),
    HeaderName::from_static("x-override-bootstrap-room"),
    HeaderName::from_static("x-override-routed-dp-rank"),
    HeaderName::from_static("x-override-disagg-prefill-dp-rank"),
    HeaderName::from_static("x-smg-routing-key"),
    HeaderName::from_static("x-gateway-destination-endpoint-subset"),
    HeaderName::from_static("x-gateway-destination-endpoint-served"),
];

/// Returns the headers of a client that are removed from a request, which sets `set` itself.
pub(crate) fn removed_headers(set: &[(HeaderName, HeaderValue)]) -> Vec<HeaderName> {
    OBEYED.into_iter().filter(|name| set.iter().all(|(other, _)| other != name)).collect()
}
