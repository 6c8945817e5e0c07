//! Traces as messages of the OpenTelemetry protocol.

use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse},
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value},
    resource::v1::Resource,
    trace::v1::{
        ResourceSpans, ScopeSpans, Span, Status,
        span::{self, Event, Link},
        status::StatusCode,
    },
};
use prost::Message as _;

use super::{
    request_trace::RequestTrace,
    span::{SpanKind, SpanRecord, Value},
};
use crate::{
    config::{SemconvVersion, Traces as TraceSettings},
    version::VERSION,
};

/// Flags of a span or link: sampled, remote flag known, parent remote.
const SAMPLED: u32 = 0x1;
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;

/// The part that all exports have in common.
#[derive(Debug)]
pub(super) struct Envelope {
    resource: Resource,
    scope: InstrumentationScope,
    schema_url: &'static str,
}

impl Envelope {
    pub(super) fn new(settings: &TraceSettings, instance: &str) -> Self {
        let own = [
            ("service.name", settings.service_name.as_str()),
            ("service.version", VERSION),
            ("service.instance.id", instance),
            ("telemetry.sdk.name", "pointsman"),
            ("telemetry.sdk.language", "rust"),
        ];
        let own = own.into_iter().filter(|(key, _)| !settings.resource_attributes.contains_key(*key));
        let given = settings.resource_attributes.iter();
        let given = given.map(|(key, value)| (key.as_str(), value.as_str()));
        let attributes = own.chain(given);
        let attributes = attributes.map(|(key, value)| attribute(key, &Value::Text(value.to_owned())));
        let schema_url = match settings.semconv {
            SemconvVersion::V1_36 => "https://opentelemetry.io/schemas/1.36.0",
            SemconvVersion::V1_37 => "https://opentelemetry.io/schemas/1.37.0",
            SemconvVersion::V1_41 => "https://opentelemetry.io/schemas/1.41.0",
        };
        Self {
            resource: Resource { attributes: attributes.collect(), ..Resource::default() },
            scope: InstrumentationScope {
                name: "pointsman".to_owned(),
                version: VERSION.to_owned(),
                ..InstrumentationScope::default()
            },
            schema_url,
        }
    }

    /// Returns an encoded `ExportTraceServiceRequest` with a batch of traces.
    pub(super) fn request(&self, traces: &[Box<RequestTrace>]) -> Vec<u8> {
        let spans = traces.iter().flat_map(|trace| trace.spans.iter().map(|record| message(trace, record)));
        let scope_spans = ScopeSpans {
            scope: Some(self.scope.clone()),
            spans: spans.collect(),
            schema_url: self.schema_url.to_owned(),
        };
        let resource_spans = ResourceSpans {
            resource: Some(self.resource.clone()),
            scope_spans: vec![scope_spans],
            schema_url: self.schema_url.to_owned(),
        };
        ExportTraceServiceRequest { resource_spans: vec![resource_spans] }.encode_to_vec()
    }
}

fn message(trace: &RequestTrace, record: &SpanRecord) -> Span {
    let kind = match record.kind {
        SpanKind::Internal => span::SpanKind::Internal,
        SpanKind::Server => span::SpanKind::Server,
        SpanKind::Client => span::SpanKind::Client,
    };
    let has_remote_parent = record.kind == SpanKind::Server && record.parent.is_some();
    let remote = if has_remote_parent { IS_REMOTE } else { 0 };
    let event = |(name, moment): &(&str, _)| Event {
        time_unix_nano: trace.unix_nanos(*moment),
        name: (*name).to_owned(),
        ..Event::default()
    };
    let link = |linked: crate::openai::trace_context::Span| Link {
        trace_id: trace.context.id_bytes().to_vec(),
        span_id: linked.bytes().to_vec(),
        flags: SAMPLED | HAS_IS_REMOTE,
        ..Link::default()
    };
    Span {
        trace_id: trace.context.id_bytes().to_vec(),
        span_id: record.id.bytes().to_vec(),
        trace_state: trace.context.state().to_owned(),
        parent_span_id: record.parent.map(|parent| parent.bytes().to_vec()).unwrap_or_default(),
        flags: SAMPLED | HAS_IS_REMOTE | remote,
        name: record.name.to_string(),
        kind: kind.into(),
        start_time_unix_nano: trace.unix_nanos(record.start),
        end_time_unix_nano: trace.unix_nanos(record.end),
        attributes: record.attributes.0.iter().map(|(key, value)| attribute(key, value)).collect(),
        events: record.events.iter().map(event).collect(),
        links: [record.links.prefill, record.links.failed].into_iter().flatten().map(link).collect(),
        status: record.failed.then(|| Status { code: StatusCode::Error.into(), ..Status::default() }),
        ..Span::default()
    }
}

fn attribute(key: &str, value: &Value) -> KeyValue {
    let value = match value {
        Value::Static(text) => any_value::Value::StringValue((*text).to_owned()),
        Value::Shared(text) => any_value::Value::StringValue(text.as_ref().to_owned()),
        Value::Text(text) => any_value::Value::StringValue(text.clone()),
        Value::Bool(value) => any_value::Value::BoolValue(*value),
        Value::Int(value) => any_value::Value::IntValue(*value),
        Value::Float(value) => any_value::Value::DoubleValue(*value),
    };
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// Returns the number of spans that the collector rejected, from an `ExportTraceServiceResponse`. An answer
/// of another form counts as 0 rejected spans.
pub(super) fn rejected_spans(answer: &[u8]) -> usize {
    let response = ExportTraceServiceResponse::decode(answer).unwrap_or_default();
    let partial = response.partial_success.unwrap_or_default();
    usize::try_from(partial.rejected_spans).unwrap_or(0)
}
