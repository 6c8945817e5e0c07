//! Labels of several parts, and label values that come from outside: names of models and policies.

use std::{
    fmt::{self, Write as _},
    sync::Arc,
};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

/// Name of a model or policy as a label value.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub struct Name(pub Arc<str>);

/// Labels of a result.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ResultLabels {
    /// Result.
    pub result: &'static str,
}

/// Labels of a listener: `clients` or `operators`, or `engines` for connections to engines.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerLabels {
    /// Listener.
    pub listener: &'static str,
}

/// Label of an exemplar.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub(crate) struct TraceLabel {
    /// Id of the trace, 32 hex digits.
    pub(crate) trace_id: String,
}

/// A label value that may contain any character; `prometheus_client` writes values without escaping them.
pub(super) struct Escaped<'a>(pub(super) &'a str);

impl EncodeLabelValue for Name {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        Escaped(&self.0).encode(encoder)
    }
}

impl EncodeLabelValue for Escaped<'_> {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '\\' => encoder.write_str("\\\\")?,
                '"' => encoder.write_str("\\\"")?,
                '\n' => encoder.write_str("\\n")?,
                other => encoder.write_char(other)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text, metrics::counter::Counter, registry::Registry};

    use super::*;
    use crate::telemetry::family::Family;

    #[test]
    fn a_name_with_quotes_backslashes_and_line_breaks_stays_one_label_value() {
        let (mut registry, family) = (Registry::default(), Family::<[(&str, Name); 1], Counter>::default());
        registry.register("pointsman_x", "Number of x", family.clone());
        family.get_or_create(&[("model", Name(Arc::from("a\"b\\c\nd")))]).inc();
        let mut encoded = String::new();
        text::encode(&mut encoded, &registry).unwrap();
        assert!(encoded.contains("pointsman_x_total{model=\"a\\\"b\\\\c\\nd\"} 1\n"), "{encoded}");
    }
}
