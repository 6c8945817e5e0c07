//! The state machine of one `ext_proc` stream: messages of Envoy go in, answers come out.
//!
//! ```text
//! Head --request headers--> Body --end of the body--> Answer --end of the answer--> Done
//!   |                         |
//!   +-----------refused-------+--> Over
//! ```

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use envoy_types::pb::envoy::{
    extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
    service::ext_proc::v3::{
        HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
        processing_request::Request,
    },
};
use http::Extensions;
use tokio::time::{Duration, Instant};
use tonic::Status;

use crate::{
    AnswerHead, Exchange, Picker, Refusal, RequestHead,
    message::{self, Half, Head, MAX_HEAD, MAX_HEADERS},
    metadata,
    silent::Silent,
};

/// How long a stream may be open without the headers of a request.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How long a stream may be open after the end of the answer.
const LAST_MESSAGE: Duration = Duration::from_secs(10);
/// Number of messages that may come after the end of a body or of its trailers: proxies repeat the end.
const MAX_SURPLUS: u32 = 16;

/// One stream.
pub(crate) struct Conversation<P: Picker> {
    picker: Arc<P>,
    connection: Extensions,
    /// Counts the stream until the headers of its request have come.
    silent: Option<Silent>,
    phase: Phase<P::Exchange>,
    modes: Modes,
    /// When the stream was opened, or the answer ended.
    since: Instant,
    surplus: u32,
    /// Whether the headers of the answer have come.
    is_answered: bool,
    /// Answers that were not sent yet.
    out: VecDeque<ProcessingResponse>,
}

enum Phase<E> {
    /// The headers of the request have not come.
    Head,
    /// The body is being read.
    Body(E, Vec<u8>),
    /// The endpoint is picked. The answer may have begun.
    Answer(E),
    /// The answer has ended. Envoy closes the stream.
    Done,
    /// Nothing more is sent.
    Over,
}

/// Mode in which Envoy sends bodies.
#[derive(Clone, Copy, Debug)]
struct Modes {
    request: BodySendMode,
    answer: BodySendMode,
}

impl Default for Modes {
    /// The modes that the protocol demands, for data planes that do not say theirs.
    fn default() -> Self {
        Self { request: BodySendMode::FullDuplexStreamed, answer: BodySendMode::FullDuplexStreamed }
    }
}

impl Modes {
    fn of(config: ProtocolConfiguration) -> Self {
        let mode = |mode| BodySendMode::try_from(mode).unwrap_or(BodySendMode::FullDuplexStreamed);
        Self { request: mode(config.request_body_mode), answer: mode(config.response_body_mode) }
    }
}

impl<P: Picker> Conversation<P> {
    pub(crate) fn new(picker: Arc<P>, connection: Extensions, silent: Option<Silent>) -> Self {
        Self {
            picker,
            connection,
            silent,
            phase: Phase::Head,
            modes: Modes::default(),
            since: Instant::now(),
            surplus: 0,
            is_answered: false,
            out: VecDeque::new(),
        }
    }

    /// Takes the next answer to send.
    pub(crate) fn next_answer(&mut self) -> Option<ProcessingResponse> {
        self.out.pop_front()
    }

    /// Returns whether nothing will be sent any more.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over) && self.out.is_empty()
    }

    /// Returns whether the endpoint is picked and its answer is watched.
    pub(crate) fn watches(&self) -> bool {
        matches!(self.phase, Phase::Answer(_))
    }

    /// Returns until when the next message has to come.
    pub(crate) fn deadline(&self) -> Instant {
        match &self.phase {
            Phase::Body(exchange, _) | Phase::Answer(exchange) => exchange.deadline(),
            Phase::Head => self.since + FIRST_MESSAGE,
            Phase::Done | Phase::Over => self.since + LAST_MESSAGE,
        }
    }

    /// Returns whether the request has to end before the deadline.
    pub(crate) fn must_end(&mut self) -> bool {
        match &mut self.phase {
            Phase::Body(exchange, _) | Phase::Answer(exchange) => exchange.must_end(),
            Phase::Head | Phase::Done | Phase::Over => false,
        }
    }

    /// Records that the deadline has passed, or that the request has to end.
    ///
    /// # Errors
    /// The stream ends.
    pub(crate) fn time_passed(&mut self) -> Result<(), Status> {
        match &mut self.phase {
            Phase::Head => {
                Err(Status::deadline_exceeded("reading the request headers: none arrived within 10 s"))
            }
            Phase::Done | Phase::Over => {
                self.phase = Phase::Over;
                Ok(())
            }
            Phase::Body(exchange, _) | Phase::Answer(exchange) => {
                if let Some(refusal) = exchange.time_passed() {
                    self.refuse(refusal);
                }
                Ok(())
            }
        }
    }

    /// Records that there is no memory for the next message.
    ///
    /// # Errors
    /// The stream ends with this status: no request is open.
    pub(crate) fn without_room(&mut self, status: Status) -> Result<(), Status> {
        let (Phase::Body(exchange, _) | Phase::Answer(exchange)) = &mut self.phase else {
            return Err(status);
        };
        let refusal = exchange.without_room();
        self.refuse(refusal);
        Ok(())
    }

    /// Takes a message of Envoy.
    ///
    /// # Errors
    /// The message violates the protocol; the stream ends.
    pub(crate) async fn on(&mut self, message: ProcessingRequest) -> Result<(), Status> {
        let ProcessingRequest {
            metadata_context,
            attributes,
            observability_mode,
            protocol_config,
            request,
            ..
        } = message;
        if observability_mode {
            return Err(Status::invalid_argument(
                "observability_mode is on, in which Envoy does not wait for the endpoint: turn it off",
            ));
        }
        if let Some(config) = protocol_config {
            self.modes = Modes::of(config);
        }
        let (metadata, details) = (metadata_context.as_ref(), metadata::details(&attributes));
        match request {
            Some(Request::RequestHeaders(headers)) => {
                self.request_headers(headers, metadata::subset(metadata)).await
            }
            Some(Request::RequestBody(body)) => self.request_body(body).await,
            Some(Request::RequestTrailers(_)) => self.request_trailers().await,
            Some(Request::ResponseHeaders(headers)) => {
                self.answer_headers(headers, metadata::served(metadata), details)
            }
            Some(Request::ResponseBody(body)) => self.answer_body(body),
            Some(Request::ResponseTrailers(_)) => self.answer_trailers(),
            None => Err(Status::invalid_argument("the message has no request")),
        }
    }

    async fn request_headers(
        &mut self,
        message: HttpHeaders,
        subset: Option<Vec<String>>,
    ) -> Result<(), Status> {
        if !matches!(self.phase, Phase::Head) {
            return Err(Status::invalid_argument("the request headers arrived a second time"));
        }
        self.silent = None;
        if message::is_too_large(&message) {
            self.refuse(too_large());
            return Ok(());
        }
        let (has_body, mode) = (!message.end_of_stream, self.modes.request);
        if has_body && !matches!(mode, BodySendMode::FullDuplexStreamed | BodySendMode::Buffered) {
            self.refuse(wrong_mode(mode));
            return Ok(());
        }
        let Head { method, path, headers, .. } = Head::of(message.headers);
        let head = RequestHead { method, path, headers, subset, has_body };
        let mut exchange = self.picker.begin(head, &self.connection);
        let admitted = exchange.admit().await;
        // The exchange belongs to the phase before a refusal, so that its end is recorded once.
        self.phase = Phase::Body(exchange, Vec::new());
        if let Err(refusal) = admitted {
            self.refuse(refusal);
            return Ok(());
        }
        if !has_body {
            self.pick(true).await;
        } else if mode == BodySendMode::Buffered {
            // Envoy sends the body when the headers were answered.
            self.out.push_back(message::headers(Half::Request, None));
        }
        Ok(())
    }

    async fn request_body(&mut self, message: HttpBody) -> Result<(), Status> {
        let HttpBody { body: more, end_of_stream, .. } = message;
        let Phase::Body(exchange, body) = &mut self.phase else { return self.surplus(&more) };
        if let Err(refusal) = exchange.receive(more.len()) {
            self.refuse(refusal);
            return Ok(());
        }
        // A body of one chunk is not copied.
        if body.is_empty() {
            *body = more;
        } else {
            body.extend_from_slice(&more);
        }
        // A buffered body is whole, also when trailers follow.
        if end_of_stream || self.modes.request == BodySendMode::Buffered {
            self.pick(true).await;
        }
        Ok(())
    }

    async fn request_trailers(&mut self) -> Result<(), Status> {
        if matches!(self.phase, Phase::Body(..)) {
            self.pick(false).await;
        } else {
            self.surplus(&[])?;
        }
        if !matches!(self.phase, Phase::Over) {
            self.out.push_back(message::trailers(Half::Request));
        }
        Ok(())
    }

    /// Picks the endpoint for the whole body, and answers with it. `ends`: no trailers follow the body.
    async fn pick(&mut self, ends: bool) {
        let Phase::Body(exchange, body) = &mut self.phase else { return };
        let sent = Bytes::from(std::mem::take(body));
        let pick = match exchange.pick(sent.clone()).await {
            Ok(pick) => pick,
            Err(refusal) => return self.refuse(refusal),
        };
        if let Phase::Body(exchange, _) = std::mem::replace(&mut self.phase, Phase::Over) {
            self.phase = Phase::Answer(exchange);
        }
        if self.modes.request == BodySendMode::Buffered && !sent.is_empty() {
            self.out.push_back(message::picked_buffered(&pick, pick.body != sent));
            return;
        }
        self.out.push_back(message::picked_headers(&pick));
        if !sent.is_empty() {
            self.out.extend(message::chunks(Half::Request, &pick.body, ends));
        }
    }

    fn answer_headers(
        &mut self,
        message: HttpHeaders,
        served: Option<&str>,
        details: Option<&str>,
    ) -> Result<(), Status> {
        let (Phase::Body(exchange, _) | Phase::Answer(exchange)) = &mut self.phase else {
            return Err(Status::invalid_argument(
                "the answer's headers arrived without those of the request: set request_header_mode to SEND",
            ));
        };
        if std::mem::replace(&mut self.is_answered, true) {
            return Err(Status::invalid_argument("the answer's headers arrived a second time"));
        }
        let Head { status, headers, .. } = Head::of(message.headers);
        let hides_body = self.modes.answer == BodySendMode::None;
        let added = exchange.answered(AnswerHead { status, headers, served, details, hides_body });
        if message.end_of_stream || hides_body {
            self.finish();
        }
        let changes = (!added.is_empty()).then(|| message::set_headers(&added));
        self.out.push_back(message::headers(Half::Answer, changes));
        Ok(())
    }

    fn answer_body(&mut self, message: HttpBody) -> Result<(), Status> {
        let HttpBody { body, end_of_stream, .. } = message;
        let (Phase::Body(exchange, _) | Phase::Answer(exchange)) = &mut self.phase else {
            return self.surplus(&body);
        };
        exchange.answer_bytes(&body);
        if end_of_stream {
            self.finish();
        }
        if self.modes.answer != BodySendMode::FullDuplexStreamed {
            self.out.push_back(message::unchanged_chunk(Half::Answer));
        } else if body.len() <= message::CHUNK {
            self.out.push_back(message::chunk_of(Half::Answer, body, end_of_stream));
        } else {
            self.out.extend(message::chunks(Half::Answer, &body, end_of_stream));
        }
        Ok(())
    }

    fn answer_trailers(&mut self) -> Result<(), Status> {
        if matches!(self.phase, Phase::Done) {
            self.surplus(&[])?;
        }
        self.finish();
        self.out.push_back(message::trailers(Half::Answer));
        Ok(())
    }

    /// Ends the exchange with the answer.
    fn finish(&mut self) {
        if let Phase::Body(mut exchange, _) | Phase::Answer(mut exchange) =
            std::mem::replace(&mut self.phase, Phase::Done)
        {
            self.since = Instant::now();
            exchange.ended();
        }
    }

    /// Ignores a message after the end, unless it has content or there are too many.
    fn surplus(&mut self, body: &[u8]) -> Result<(), Status> {
        self.surplus += 1;
        if !body.is_empty() {
            return Err(Status::invalid_argument("a body continues after its end"));
        }
        if self.surplus > MAX_SURPLUS {
            return Err(Status::resource_exhausted("too many messages after the end of a body"));
        }
        Ok(())
    }

    /// Ends the request with an answer of the picker.
    fn refuse(&mut self, refusal: Refusal) {
        self.phase = Phase::Over;
        self.out.clear();
        self.out.push_back(message::refusal(refusal));
    }
}

/// The refusal of a head that is too large.
fn too_large() -> Refusal {
    let text = format!(
        "reading the request headers: more than {MAX_HEADERS}, or more than {MAX_HEAD} bytes; send fewer\n"
    );
    Refusal { status: 431, code: "headers_too_large", headers: Vec::new(), body: text.into() }
}

/// The refusal of a body that arrives in a way in which no endpoint can be picked for it.
fn wrong_mode(mode: BodySendMode) -> Refusal {
    let text = format!(
        "picking an endpoint: ext_proc sends the request body as {}, and the choice needs the whole body; set \
         request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED\n",
        mode.as_str_name()
    );
    tracing::warn!(
        mode = mode.as_str_name(),
        "request refused: request_body_mode of ext_proc has to be changed"
    );
    Refusal { status: 500, code: "ext_proc_mode", headers: Vec::new(), body: text.into() }
}
