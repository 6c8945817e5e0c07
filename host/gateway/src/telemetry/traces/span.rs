//! One span, kept until the exporter writes it.

use std::{borrow::Cow, sync::Arc};

use pointsman_workers::{Candidate, Leg};
use tokio::time::Instant;

use crate::openai::trace_context::{Links, Span};

/// Maximum length of a text in an attribute, bytes. Normal names of models, workers and policies are shorter.
const MAX_TEXT: usize = 256;

/// A finished span.
#[derive(Debug)]
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "only the exporter reads it"))]
pub(super) struct SpanRecord {
    pub(super) id: Span,
    pub(super) parent: Option<Span>,
    pub(super) name: Cow<'static, str>,
    pub(super) kind: SpanKind,
    pub(super) start: Instant,
    pub(super) end: Instant,
    pub(super) attributes: Attributes,
    pub(super) links: Links,
    /// Named points in time within the span.
    pub(super) events: Vec<(&'static str, Instant)>,
    pub(super) failed: bool,
}

/// The side of a call on which a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpanKind {
    Server,
    Client,
    Internal,
}

/// Attributes of a span.
#[derive(Debug, Default)]
pub(crate) struct Attributes(pub(super) Vec<(&'static str, Value)>);

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Static(&'static str),
    Shared(Arc<str>),
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl Attributes {
    pub(crate) fn label(&mut self, key: &'static str, value: &'static str) {
        self.0.push((key, Value::Static(value)));
    }

    pub(crate) fn shared(&mut self, key: &'static str, value: &Arc<str>) {
        if value.len() > MAX_TEXT {
            self.text(key, value);
        } else {
            self.0.push((key, Value::Shared(value.clone())));
        }
    }

    /// Adds a text, shortened to the maximum length.
    pub(crate) fn text(&mut self, key: &'static str, value: &str) {
        let end = value.floor_char_boundary(MAX_TEXT.min(value.len()));
        self.0.push((key, Value::Text(value.get(..end).unwrap_or_default().to_owned())));
    }

    pub(crate) fn int(&mut self, key: &'static str, value: impl Into<i64>) {
        self.0.push((key, Value::Int(value.into())));
    }

    /// Adds an id, which may exceed the integers of the protocol.
    pub(crate) fn id(&mut self, key: &'static str, value: impl ToString) {
        self.0.push((key, Value::Text(value.to_string())));
    }

    pub(crate) fn float(&mut self, key: &'static str, value: f64) {
        self.0.push((key, Value::Float(value)));
    }

    pub(crate) fn bool(&mut self, key: &'static str, value: bool) {
        self.0.push((key, Value::Bool(value)));
    }
}

/// Target of a leg.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LegTarget<'a> {
    pub(crate) leg: Leg,
    pub(crate) candidate: &'a Candidate,
    /// Number of the attempt; 0 for the first.
    pub(crate) attempt: u32,
    pub(crate) links: Links,
}

impl LegTarget<'_> {
    /// Adds the attributes of the worker.
    pub(super) fn describe(&self, attributes: &mut Attributes) {
        let spec = self.candidate.worker.spec();
        attributes.label("pointsman.leg", self.leg.as_str());
        attributes.id("pointsman.worker", spec.id);
        attributes.int("pointsman.rank", i64::from(self.candidate.rank.0));
        attributes.int("pointsman.attempt", self.attempt);
        if let Some((host, port)) = address(&spec.url) {
            attributes.text("server.address", host);
            attributes.int("server.port", port);
        }
    }
}

/// Returns the host and the port of a worker's URL, which always has a port.
fn address(url: &str) -> Option<(&str, u16)> {
    let authority = url.split("://").nth(1)?.split('/').next()?;
    let (host, port) = authority.rsplit_once(':')?;
    // An IPv6 address has brackets in a URL only.
    Some((host.trim_matches(['[', ']']), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn m2_the_address_of_an_engine_has_no_brackets() {
        // M2.4
        assert_eq!(address("http://[fd00::1]:8000/base"), Some(("fd00::1", 8000)));
        assert_eq!(address("https://engine:443"), Some(("engine", 443)));
    }
}
