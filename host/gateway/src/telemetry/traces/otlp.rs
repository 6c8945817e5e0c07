//! Traces as messages of the OpenTelemetry protocol, `opentelemetry/proto/trace/v1/trace.proto` and
//! `collector/trace/v1/trace_service.proto`. The numbers are those of the fields there.

use super::{
    protobuf::{Field, Message, fields},
    request_trace::RequestTrace,
    span::{SpanKind, SpanRecord, Value},
};
use crate::{
    config::{SemconvVersion, Traces as TraceSettings},
    version::VERSION,
};

/// Flags of a span or link: sampled, whether the remote flag is known, and whether the parent is remote.
const SAMPLED: u32 = 0x1;
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;
/// `STATUS_CODE_ERROR`
const ERROR: u64 = 2;

/// Part that all exports have in common.
#[derive(Debug)]
pub(super) struct Envelope {
    resource: Message,
    scope: Message,
    schema_url: &'static str,
}

impl Envelope {
    pub(super) fn new(settings: &TraceSettings) -> Self {
        let own = [
            ("service.name", settings.service_name.as_str()),
            ("service.version", VERSION),
            ("telemetry.sdk.name", "pointsman"),
            ("telemetry.sdk.language", "rust"),
        ];
        let given = settings.resource_attributes.iter();
        let given = given.map(|(key, value)| (key.as_str(), value.as_str()));
        let mut resource = Message::default();
        for (key, value) in own.into_iter().chain(given) {
            attribute(&mut resource, 1, key, |any| any.chosen_bytes(1, value.as_bytes()));
        }
        let mut scope = Message::default();
        scope.bytes(1, "pointsman");
        scope.bytes(2, VERSION);
        let schema_url = match settings.semconv {
            SemconvVersion::V1_36 => "https://opentelemetry.io/schemas/1.36.0",
            SemconvVersion::V1_37 => "https://opentelemetry.io/schemas/1.37.0",
            SemconvVersion::V1_41 => "https://opentelemetry.io/schemas/1.41.0",
        };
        Self { resource, scope, schema_url }
    }

    /// Returns an `ExportTraceServiceRequest` with a batch of traces.
    pub(super) fn request(&self, traces: &[Box<RequestTrace>]) -> Vec<u8> {
        let mut request = Message::default();
        request.message(1, |resource_spans| {
            resource_spans.encoded(1, &self.resource);
            resource_spans.message(2, |scope_spans| {
                scope_spans.encoded(1, &self.scope);
                for trace in traces {
                    for record in &trace.spans {
                        scope_spans.message(2, |span| encode(span, trace, record));
                    }
                }
                scope_spans.bytes(3, self.schema_url);
            });
            resource_spans.bytes(3, self.schema_url);
        });
        request.into_bytes()
    }
}

fn encode(span: &mut Message, trace: &RequestTrace, record: &SpanRecord) {
    let trace_id = trace.context.id_bytes();
    let kind = match record.kind {
        SpanKind::Internal => 1,
        SpanKind::Server => 2,
        SpanKind::Client => 3,
    };
    span.bytes(1, trace_id);
    span.bytes(2, record.id.bytes());
    span.bytes(3, trace.context.state());
    if let Some(parent) = record.parent {
        span.bytes(4, parent.bytes());
    }
    span.bytes(5, record.name.as_bytes());
    span.int(6, kind);
    span.fixed64(7, trace.unix_nanos(record.start));
    span.fixed64(8, trace.unix_nanos(record.end));
    for (key, value) in &record.attributes.0 {
        attribute(span, 9, key, |any| any_value(any, value));
    }
    for (name, moment) in &record.events {
        span.message(11, |event| {
            event.fixed64(1, trace.unix_nanos(*moment));
            event.bytes(2, name);
        });
    }
    for linked in [record.links.prefill, record.links.failed].into_iter().flatten() {
        span.message(13, |link| {
            link.bytes(1, trace_id);
            link.bytes(2, linked.bytes());
            link.fixed32(6, SAMPLED | HAS_IS_REMOTE);
        });
    }
    if record.failed {
        span.message(15, |status| status.int(3, ERROR));
    }
    let remote = if record.kind == SpanKind::Server { IS_REMOTE } else { 0 };
    span.fixed32(16, SAMPLED | HAS_IS_REMOTE | remote);
}

fn attribute(message: &mut Message, field: u32, key: &str, value: impl FnOnce(&mut Message)) {
    message.message(field, |pair| {
        pair.bytes(1, key);
        pair.message(2, value);
    });
}

fn any_value(any: &mut Message, value: &Value) {
    match value {
        Value::Static(value) => any.chosen_bytes(1, value.as_bytes()),
        Value::Shared(value) => any.chosen_bytes(1, value.as_bytes()),
        Value::Text(value) => any.chosen_bytes(1, value.as_bytes()),
        Value::Bool(value) => any.chosen_int(2, u64::from(*value)),
        // Negative numbers are written as those of 64 bits.
        Value::Int(value) => any.chosen_int(3, value.cast_unsigned()),
        Value::Float(value) => any.chosen_double(4, *value),
    }
}

/// Returns the number of spans that the collector rejected, from an `ExportTraceServiceResponse`. An answer
/// that is not one says nothing about single spans.
pub(super) fn rejected_spans(answer: &[u8]) -> usize {
    let partial = fields(answer).find_map(|(field, value)| match (field, value) {
        (1, Field::Bytes(partial)) => Some(partial),
        _ => None,
    });
    let rejected = fields(partial.unwrap_or_default()).find_map(|(field, value)| match (field, value) {
        (1, Field::Int(rejected)) => usize::try_from(rejected).ok(),
        _ => None,
    });
    rejected.unwrap_or(0)
}
