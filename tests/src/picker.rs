//! A client of the endpoint picker: says what Envoy says, one message at a time.

use std::{collections::HashMap, net::SocketAddr};

use anyhow::Context as _;
use envoy_types::pb::{
    envoy::{
        config::core::v3::{HeaderMap, HeaderValue, Metadata},
        extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode,
        service::ext_proc::v3::{
            HeaderMutation, HttpBody, HttpHeaders, ImmediateResponse, ProcessingRequest, ProcessingResponse,
            ProtocolConfiguration, body_mutation::Mutation,
            external_processor_client::ExternalProcessorClient, processing_request::Request,
            processing_response::Response,
        },
    },
    google::protobuf::{ListValue, Struct, Value, value::Kind},
};
use futures_util::stream;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

/// A connection to the picker.
#[derive(Clone, Debug)]
pub struct PickerClient(Channel);

/// One request that a proxy carries.
#[derive(Debug)]
pub struct Carried {
    messages: Option<UnboundedSender<ProcessingRequest>>,
    answers: Streaming<ProcessingResponse>,
}

/// Answer of the picker to a request.
#[derive(Clone, Debug, Default)]
pub struct Picked {
    /// Headers that are set, by name.
    pub headers: HashMap<String, String>,
    /// Headers that are removed.
    pub removed: Vec<String>,
    /// The endpoint in the metadata.
    pub metadata: Option<String>,
    /// The chunks of the body.
    pub chunks: Vec<Vec<u8>>,
    /// The picker's own answer.
    pub immediate: Option<ImmediateResponse>,
}

impl PickerClient {
    /// Connects to a picker.
    ///
    /// # Errors
    /// Nothing listens there.
    pub async fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        Ok(Self(Endpoint::new(format!("http://{address}"))?.connect().await?))
    }

    /// Returns whether the picker says that a service is serving.
    ///
    /// # Errors
    /// The service is unknown.
    pub async fn is_serving(&self, service: &str) -> Result<bool, Status> {
        let request = HealthCheckRequest { service: service.to_owned() };
        let answer = HealthClient::new(self.0.clone()).check(request).await?;
        Ok(answer.into_inner().status == 1)
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// The picker refuses it.
    pub async fn open(&self) -> anyhow::Result<Carried> {
        let (messages, receiver) = unbounded_channel();
        let requests =
            stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
        let answers = ExternalProcessorClient::new(self.0.clone()).process(Box::pin(requests)).await?;
        Ok(Carried { messages: Some(messages), answers: answers.into_inner() })
    }

    /// Asks for the endpoint of a streamed POST, and returns the answer with the open stream.
    ///
    /// # Errors
    /// The stream failed.
    pub async fn ask(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> anyhow::Result<(Picked, Carried)> {
        let mut carried = self.open().await?;
        carried.head("POST", path, headers, false)?;
        carried.body(body.as_bytes(), true)?;
        let picked = carried.picked().await?;
        Ok((picked, carried))
    }
}

impl Carried {
    /// Sends any message.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn send(&self, message: ProcessingRequest) -> anyhow::Result<()> {
        Ok(self.messages.as_ref().context("the proxy has nothing more to say")?.send(message)?)
    }

    fn say(&self, request: Request) -> anyhow::Result<()> {
        self.send(ProcessingRequest { request: Some(request), ..ProcessingRequest::default() })
    }

    /// Sends the head of a request whose bodies are streamed.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn head(&self, method: &str, path: &str, headers: &[(&str, &str)], end: bool) -> anyhow::Result<()> {
        let mode = BodySendMode::FullDuplexStreamed;
        self.head_with(mode, None, method, path, headers, end)
    }

    /// Sends the head of a POST whose answer's body is not sent.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn head_hiding_answer(&self, path: &str) -> anyhow::Result<()> {
        self.send(ProcessingRequest {
            request: Some(Request::RequestHeaders(fields_of(&[(":method", "POST"), (":path", path)], false))),
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: BodySendMode::FullDuplexStreamed.into(),
                response_body_mode: BodySendMode::None.into(),
                ..ProtocolConfiguration::default()
            }),
            ..ProcessingRequest::default()
        })
    }

    /// Sends the head of a request whose bodies are sent in a mode, with a subset of endpoints.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn head_with(
        &self,
        mode: BodySendMode,
        subset: Option<&[&str]>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        end: bool,
    ) -> anyhow::Result<()> {
        let fields = [&[(":method", method), (":path", path)], headers].concat();
        let metadata = subset.map(|subset| {
            let text = |one: &&str| Value { kind: Some(Kind::StringValue((*one).to_owned())) };
            let values = subset.iter().map(text).collect();
            metadata(
                "envoy.lb.subset_hint",
                "x-gateway-destination-endpoint-subset",
                Kind::ListValue(ListValue { values }),
            )
        });
        self.send(ProcessingRequest {
            request: Some(Request::RequestHeaders(fields_of(&fields, end))),
            metadata_context: metadata,
            protocol_config: Some(ProtocolConfiguration {
                request_body_mode: mode.into(),
                response_body_mode: mode.into(),
                ..ProtocolConfiguration::default()
            }),
            ..ProcessingRequest::default()
        })
    }

    /// Sends a part of the body.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn body(&self, body: &[u8], end: bool) -> anyhow::Result<()> {
        self.say(Request::RequestBody(part(body, end)))
    }

    /// Sends the head of the engine's answer, and which endpoint served it.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn answer_head(&self, status: u16, content_type: &str, served: Option<&str>) -> anyhow::Result<()> {
        self.answer_head_of(status, content_type, served, None)
    }

    /// Sends the head of a successful answer with these headers.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn answer_head_with(&self, headers: &[(&str, &str)]) -> anyhow::Result<()> {
        self.say(Request::ResponseHeaders(fields_of(&[&[(":status", "200")], headers].concat(), false)))
    }

    /// Sends the head of an answer, which endpoint served it, and Envoy's `response.code_details`.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn answer_head_of(
        &self,
        status: u16,
        content_type: &str,
        served: Option<&str>,
        details: Option<&str>,
    ) -> anyhow::Result<()> {
        let status = status.to_string();
        let fields = [(":status", status.as_str()), ("content-type", content_type)];
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let named = |served| metadata("envoy.lb", "x-gateway-destination-endpoint-served", text(served));
        let attributes = |details| {
            metadata("envoy.filters.http.ext_proc", "response.code_details", text(details)).filter_metadata
        };
        self.send(ProcessingRequest {
            request: Some(Request::ResponseHeaders(fields_of(&fields, false))),
            metadata_context: served.map(named),
            attributes: details.map(attributes).unwrap_or_default(),
            ..ProcessingRequest::default()
        })
    }

    /// Sends a part of the engine's answer.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn answer_body(&self, body: &[u8], end: bool) -> anyhow::Result<()> {
        self.say(Request::ResponseBody(part(body, end)))
    }

    /// Ends what the proxy has to say.
    pub fn close(&mut self) {
        self.messages = None;
    }

    /// Returns the next answer; `None` at the end of the stream.
    ///
    /// # Errors
    /// The picker ended the stream with an error.
    pub async fn next(&mut self) -> Result<Option<ProcessingResponse>, Status> {
        self.answers.message().await
    }

    /// Reads the answers to a request: up to the endpoint and the end of the body, or up to an answer of the
    /// picker itself.
    ///
    /// # Errors
    /// The stream ended before.
    pub async fn picked(&mut self) -> anyhow::Result<Picked> {
        let mut picked = Picked::default();
        loop {
            let answer = self.next().await?.context("the stream ended without an answer")?;
            if let Some(metadata) = &answer.dynamic_metadata {
                picked.metadata = destination(metadata);
            }
            let common = match answer.response.context("an answer without content")? {
                Response::ImmediateResponse(immediate) => {
                    picked.immediate = Some(immediate);
                    return Ok(picked);
                }
                Response::RequestHeaders(headers) => headers.response,
                Response::RequestBody(body) => body.response,
                other => anyhow::bail!("unexpected answer {other:?}"),
            };
            let common = common.context("an answer without changes")?;
            picked.take(common.header_mutation);
            match common.body_mutation.and_then(|mutation| mutation.mutation) {
                Some(Mutation::StreamedResponse(chunk)) => {
                    picked.chunks.push(chunk.body);
                    if chunk.end_of_stream {
                        return Ok(picked);
                    }
                }
                Some(Mutation::Body(body)) => {
                    picked.chunks.push(body);
                    return Ok(picked);
                }
                _ => {}
            }
        }
    }
}

impl Picked {
    fn take(&mut self, mutation: Option<HeaderMutation>) {
        let HeaderMutation { set_headers, remove_headers } = mutation.unwrap_or_default();
        let set = set_headers.into_iter().filter_map(|option| option.header);
        self.headers
            .extend(set.map(|header| (header.key, String::from_utf8_lossy(&header.raw_value).into_owned())));
        self.removed.extend(remove_headers);
    }

    /// The endpoint in the header.
    #[must_use]
    pub fn endpoint(&self) -> Option<&str> {
        self.headers.get("x-gateway-destination-endpoint").map(String::as_str)
    }

    /// The whole body.
    #[must_use]
    pub fn body(&self) -> String {
        String::from_utf8_lossy(&self.chunks.concat()).into_owned()
    }

    /// Status and text of the picker's own answer; 0: it gave none.
    #[must_use]
    pub fn refusal(&self) -> (i32, String) {
        let immediate = self.immediate.clone().unwrap_or_default();
        let status = immediate.status.map_or(0, |status| status.code);
        (status, String::from_utf8_lossy(&immediate.body).into_owned())
    }
}

fn fields_of(fields: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let field = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    let headers = fields.iter().map(field).collect();
    HttpHeaders { headers: Some(HeaderMap { headers }), end_of_stream, ..HttpHeaders::default() }
}

fn part(body: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody { body: body.to_vec(), end_of_stream, ..HttpBody::default() }
}

fn metadata(namespace: &str, key: &str, kind: Kind) -> Metadata {
    let fields = HashMap::from([(key.to_owned(), Value { kind: Some(kind) })]);
    let filter_metadata = HashMap::from([(namespace.to_owned(), Struct { fields })]);
    Metadata { filter_metadata, ..Metadata::default() }
}

/// The endpoint in the metadata of an answer.
fn destination(metadata: &Struct) -> Option<String> {
    let Some(Kind::StructValue(inner)) = &metadata.fields.get("envoy.lb")?.kind else { return None };
    match &inner.fields.get("x-gateway-destination-endpoint")?.kind {
        Some(Kind::StringValue(endpoint)) => Some(endpoint.clone()),
        _ => None,
    }
}
