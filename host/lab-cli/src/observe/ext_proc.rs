//! Takes requests with their answers from Envoy's `ext_proc` filter in observability mode. Envoy sends what
//! passes and waits for nothing; the observer sends nothing.
//!
//! Outside that mode Envoy waits for an answer to each message. The observer then ends the call without an
//! error, which Envoy takes as the wish to see no more of this request: it continues at once.
//!
//! An answer tells what a copy of a request cannot: the engine, the output tokens, and whether it failed.

use std::{net::SocketAddr, pin::Pin, sync::Arc};

use envoy_types::pb::{
    envoy::service::ext_proc::v3::{
        HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
        external_processor_server::{ExternalProcessor, ExternalProcessorServer},
        processing_request::Request as Part,
    },
    google::protobuf::{Struct, value::Kind},
};
use futures_util::{Stream, StreamExt as _, stream};
use hyper::Method;
use pointsman_endpoint_picker::{EXT_PROC_SERVICE, Head};
use pointsman_workers::LogLimit;
use tokio::time::{Duration, Instant, timeout_at};
use tonic::{Request, Response, Status, Streaming};

use super::{
    answer_tokens::AnswerTokens,
    answers::Answer,
    counts::Missed,
    intake::{BODY_TIMEOUT, Body, Intake, is_readable},
    request::{Arrived, Endpoint},
};

/// Size of a message: a chunk of a body, or a list of headers, bytes.
const MAX_MESSAGE: usize = 2 * 1024 * 1024;
/// How long an answer may pause.
const ANSWER_SILENCE: Duration = Duration::from_secs(600);
/// Attribute with the address of the engine.
const UPSTREAM: &str = "upstream.address";
/// Log lines about requests for which Envoy waits.
static LINES: LogLimit = LogLimit::new(Duration::from_secs(10));

/// Path of the method.
pub(super) fn is_call(path: &str) -> bool {
    path.strip_prefix('/').and_then(|path| path.strip_suffix("/Process")) == Some(EXT_PROC_SERVICE)
}

/// Returns the gRPC service.
pub(super) fn service(intake: Arc<Intake>) -> ExternalProcessorServer<impl ExternalProcessor> {
    ExternalProcessorServer::new(Observer(intake)).max_decoding_message_size(MAX_MESSAGE)
}

struct Observer(Arc<Intake>);

#[tonic::async_trait]
impl ExternalProcessor for Observer {
    type ProcessStream = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let (intake, messages) = (Arc::clone(&self.0), request.into_inner());
        // The answer is a stream without a message. It ends when Envoy's messages have ended.
        let observing = stream::once(async move { observe(intake, messages).await.err().map(Err) });
        Ok(Response::new(Box::pin(observing.filter_map(std::future::ready))))
    }
}

/// Reads the messages of a request and of its answer.
async fn observe(intake: Arc<Intake>, mut messages: Streaming<ProcessingRequest>) -> Result<(), Status> {
    let mut exchange = Exchange { intake, phase: Phase::Head, answer: Answer::default(), number: None };
    let mut since = Instant::now();
    while !matches!(exchange.phase, Phase::Over) {
        let limit = if exchange.answers() { ANSWER_SILENCE } else { BODY_TIMEOUT };
        let Ok(message) = timeout_at(since + limit, messages.message()).await else { return Ok(()) };
        let Some(message) = message? else { return Ok(()) };
        let waits = !message.observability_mode;
        if exchange.answers() {
            since = Instant::now();
        }
        exchange.on(message);
        if waits {
            exchange.let_pass();
        }
    }
    Ok(())
}

/// A request and its answer. What is known is kept when it is dropped.
struct Exchange {
    intake: Arc<Intake>,
    phase: Phase,
    answer: Answer,
    /// Number of the request, once its copy is with the writer.
    number: Option<u64>,
}

enum Phase {
    /// The head of the request has not come.
    Head,
    /// The body of the request is being read.
    Body {
        number: u64,
        arrived: Arrived,
        body: Body,
    },
    /// The request is copied, or counted as missed. Its answer has not begun.
    Sent,
    Answer(AnswerTokens),
    Over,
}

impl Exchange {
    /// Returns whether the request has come to its end, so that an answer is due.
    fn answers(&self) -> bool {
        matches!(self.phase, Phase::Sent | Phase::Answer(_))
    }

    /// Leaves out a request for which Envoy waits.
    fn let_pass(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Over) {
            Phase::Head => _ = self.intake.counts.arrive(),
            Phase::Body { .. } => {}
            Phase::Sent | Phase::Answer(_) | Phase::Over => return,
        }
        self.intake.counts.miss(Missed::Waited);
        if let Some(suppressed) = LINES.due() {
            tracing::warn!(
                suppressed,
                "request not observed: Envoy waits for answers; set observability_mode: true in its filter ext_proc, \
                 as in deploy/envoy/observe-answers.yaml"
            );
        }
    }

    fn on(&mut self, message: ProcessingRequest) {
        if let Some(engine) = message.attributes.values().find_map(upstream) {
            self.answer.engine = self.intake.answers.engine(engine);
        }
        match message.request {
            Some(Part::RequestHeaders(head)) => self.request_head(head),
            Some(Part::RequestBody(body)) => self.request_body(&body),
            Some(Part::RequestTrailers(_)) => self.request_ends(),
            Some(Part::ResponseHeaders(head)) => self.answer_head(head),
            Some(Part::ResponseBody(body)) => self.answer_body(&body),
            Some(Part::ResponseTrailers(_)) => self.phase = Phase::Over,
            None => {}
        }
    }

    fn request_head(&mut self, head: HttpHeaders) {
        if !matches!(self.phase, Phase::Head) {
            return;
        }
        let Head { method, path, headers, .. } = Head::of(head.headers);
        let path = path.split('?').next().unwrap_or_default();
        let is_post = method == Method::POST.as_str();
        let endpoint = Endpoint::of(path).filter(|_| is_post);
        if endpoint.is_none() && is_post {
            self.intake.counts.pass_by(path);
        }
        let Some(endpoint) = endpoint.filter(|_| !head.end_of_stream) else {
            self.phase = Phase::Over;
            return;
        };
        let arrived = self.intake.measure.head(self.intake.start.elapsed(), endpoint, &headers);
        let number = self.intake.counts.arrive();
        if !is_readable(&headers) {
            self.intake.counts.miss(Missed::Unreadable);
            self.phase = Phase::Sent;
            return;
        }
        self.phase = Phase::Body { number, arrived, body: Body::default() };
    }

    fn request_body(&mut self, message: &HttpBody) {
        let Phase::Body { body, .. } = &mut self.phase else { return };
        if let Err(why) = body.add(&self.intake, &message.body) {
            self.intake.counts.miss(why);
            self.phase = Phase::Sent;
        } else if message.end_of_stream {
            self.request_ends();
        }
    }

    fn request_ends(&mut self) {
        match std::mem::replace(&mut self.phase, Phase::Sent) {
            Phase::Body { number, arrived, body } => {
                if self.intake.send(body.copied(number, arrived)) {
                    self.number = Some(number);
                }
            }
            other => self.phase = other,
        }
    }

    fn answer_head(&mut self, head: HttpHeaders) {
        // An answer may begin before the request has ended.
        if matches!(self.phase, Phase::Body { .. }) {
            self.intake.counts.miss(Missed::Incomplete);
        }
        let Head { status, headers, .. } = Head::of(head.headers);
        self.answer.has_failed = status >= 400;
        self.phase = if head.end_of_stream || !is_readable(&headers) {
            Phase::Over
        } else {
            Phase::Answer(AnswerTokens::of(&headers))
        };
    }

    fn answer_body(&mut self, message: &HttpBody) {
        let Phase::Answer(tokens) = &mut self.phase else { return };
        tokens.add(&message.body);
        self.answer.output_tokens = tokens.count();
        if message.end_of_stream {
            self.phase = Phase::Over;
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if matches!(self.phase, Phase::Body { .. }) {
            self.intake.counts.miss(Missed::Incomplete);
        }
        if let Some(number) = self.number {
            self.intake.answers.add(number, self.answer);
        }
    }
}

/// Returns the address of the engine among attributes.
fn upstream(attributes: &Struct) -> Option<SocketAddr> {
    match attributes.fields.get(UPSTREAM)?.kind.as_ref()? {
        Kind::StringValue(address) => address.parse().ok(),
        _ => None,
    }
}
