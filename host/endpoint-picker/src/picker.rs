//! Interface for choosing endpoints. The gateway implements it.

use bytes::Bytes;
use http::{Extensions, HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

/// Answers "which endpoint for this request".
pub trait Picker: Send + Sync + 'static {
    /// One request.
    type Exchange: Exchange;
    /// Memory for a message that is being read. Dropping it gives the memory back.
    type Room: Send + Sync + Unpin + 'static;

    /// Reserves memory for a large message; `None`: there is not as much.
    fn reserve(&self, bytes: usize) -> Option<Self::Room>;

    /// Begins a request. It is refused, or its endpoint is picked, later. `connection` has the HTTP server's
    /// data about the proxy's connection.
    fn begin(&self, head: RequestHead, connection: &Extensions) -> Self::Exchange;
}

/// One request and its answer. It ends when it is dropped: then nothing of it may stay booked.
pub trait Exchange: Send + 'static {
    /// Decides whether the request is let in, before its body is read.
    fn admit(&mut self) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Counts bytes of the body that arrived. They are kept until the endpoint is picked.
    ///
    /// # Errors
    /// The body is too large.
    fn receive(&mut self, bytes: usize) -> Result<(), Refusal>;

    /// Records that there is no memory for the next message. Returns the refusal that ends the request.
    fn without_room(&mut self) -> Refusal;

    /// Picks an endpoint for the request with this whole body; empty when it has none.
    fn pick(&mut self, body: Bytes) -> impl Future<Output = Result<Pick, Refusal>> + Send;

    /// Records the head of the answer. Returns headers that are added to it.
    fn answered(&mut self, head: AnswerHead<'_>) -> Vec<(HeaderName, HeaderValue)>;

    /// Records bytes of the answer's body.
    fn answer_bytes(&mut self, bytes: &[u8]);

    /// Records the end of the answer.
    fn ended(&mut self);

    /// Returns until when the next message has to come.
    fn deadline(&self) -> Instant;

    /// Returns whether the request has to end now, before its deadline. What changes that wakes the tasks of
    /// the streams.
    fn must_end(&mut self) -> bool;

    /// Records that the deadline has passed, or that the request has to end. Returns the refusal that ends
    /// it; `None` if it goes on, with another deadline.
    fn time_passed(&mut self) -> Option<Refusal>;
}

/// The head of a request.
#[derive(Clone, Debug)]
pub struct RequestHead {
    /// The method.
    pub method: String,
    /// The path, with the query.
    pub path: String,
    /// The headers, without pseudo headers.
    pub headers: HeaderMap,
    /// Endpoints of which one must be picked; `None` allows any.
    pub subset: Option<Vec<String>>,
    /// Whether a body follows.
    pub has_body: bool,
}

/// An endpoint that was picked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pick {
    /// The endpoint: `IP:PORT`.
    pub endpoint: String,
    /// Headers that are set on the request.
    pub set_headers: Vec<(HeaderName, HeaderValue)>,
    /// Headers that are removed from the request.
    pub remove_headers: Vec<HeaderName>,
    /// The body that the endpoint gets.
    pub body: Bytes,
}

/// The head of an answer.
#[derive(Clone, Debug)]
pub struct AnswerHead<'a> {
    /// HTTP status; 0: the proxy sent none.
    pub status: u16,
    /// The headers, without pseudo headers.
    pub headers: HeaderMap,
    /// The endpoint that answered, if the proxy says so.
    pub served: Option<&'a str>,
    /// How the answer came about, if the proxy says so: Envoy's `response.code_details`.
    pub details: Option<&'a str>,
    /// Whether the proxy shows nothing of the answer but this head.
    pub hides_body: bool,
}

/// An answer in the place of the engine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub status: u16,
    /// Stable code for the proxy's log.
    pub code: &'static str,
    /// Headers of the answer.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// Its body.
    pub body: Bytes,
}
