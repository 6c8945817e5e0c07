//! Metadata of the endpoint picker protocol. Envoy sends the subset and the endpoint that served; the picker
//! returns the endpoint that it picked. An attribute of Envoy says how an answer came about.

use std::collections::HashMap;

use envoy_types::pb::{
    envoy::config::core::v3::Metadata,
    google::protobuf::{Struct, Value, value::Kind},
};

/// Header and metadata key of the endpoint that was picked.
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";
/// Namespace of the endpoints that were picked and that served.
const NAMESPACE: &str = "envoy.lb";
const SERVED: &str = "x-gateway-destination-endpoint-served";
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET: &str = "x-gateway-destination-endpoint-subset";
/// Key of the attributes that Envoy's filter sends.
const FILTER: &str = "envoy.filters.http.ext_proc";
const DETAILS: &str = "response.code_details";
/// Maximum number of endpoints that are read from a subset.
const MAX_SUBSET: usize = 4_096;

/// Returns the endpoints of which one must be picked; `None` if the proxy names no subset. The protocol has a
/// list; filters of Envoy that copy a header write one text with commas.
pub(crate) fn subset(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    let kind = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET)?.kind.as_ref();
    let texts: Vec<&str> = match kind {
        Some(Kind::StringValue(text)) => vec![text],
        Some(Kind::ListValue(list)) => list.values.iter().filter_map(text).collect(),
        _ => Vec::new(),
    };
    let endpoints = texts.into_iter().flat_map(|text| text.split(',')).map(str::trim);
    let endpoints = endpoints.filter(|endpoint| !endpoint.is_empty());
    Some(endpoints.take(MAX_SUBSET).map(str::to_owned).collect())
}

/// Returns the endpoint that served the request, if the proxy says so.
pub(crate) fn served(metadata: Option<&Metadata>) -> Option<&str> {
    text(metadata?.filter_metadata.get(NAMESPACE)?.fields.get(SERVED)?)
}

/// Returns how the answer came about, if Envoy says so.
pub(crate) fn details(attributes: &HashMap<String, Struct>) -> Option<&str> {
    text(attributes.get(FILTER)?.fields.get(DETAILS)?)
}

/// Returns the metadata that names the endpoint.
pub(crate) fn destination(endpoint: &str) -> Struct {
    let text = Value { kind: Some(Kind::StringValue(endpoint.to_owned())) };
    let inner = Struct { fields: HashMap::from([(DESTINATION.to_owned(), text)]) };
    let inner = Value { kind: Some(Kind::StructValue(inner)) };
    Struct { fields: HashMap::from([(NAMESPACE.to_owned(), inner)]) }
}

fn text(value: &Value) -> Option<&str> {
    match value.kind.as_ref()? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::google::protobuf::ListValue;

    use super::*;

    fn metadata(namespace: &str, key: &str, kind: Kind) -> Metadata {
        let fields = HashMap::from([(key.to_owned(), Value { kind: Some(kind) })]);
        let filter_metadata = HashMap::from([(namespace.to_owned(), Struct { fields })]);
        Metadata { filter_metadata, ..Metadata::default() }
    }

    #[test]
    fn a_subset_is_a_list_or_a_text_and_an_empty_one_is_not_the_same_as_none() {
        let text = |text: &str| Kind::StringValue(text.to_owned());
        let of = |kind: Kind| subset(Some(&metadata(SUBSET_NAMESPACE, SUBSET, kind)));
        let values = ["10.0.0.1:80", "10.0.0.2:80,10.0.0.3:80"].map(|one| Value { kind: Some(text(one)) });
        let list = Kind::ListValue(ListValue { values: values.to_vec() });
        assert_eq!(of(list).unwrap(), ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"]);
        assert_eq!(of(text("10.0.0.1:80, 10.0.0.2:80")).unwrap(), ["10.0.0.1:80", "10.0.0.2:80"]);
        assert_eq!(of(text("")).unwrap(), [""; 0]);
        assert_eq!(of(Kind::NullValue(0)).unwrap(), [""; 0]);
        assert_eq!(subset(Some(&Metadata::default())), None);
        let many = vec!["10.0.0.1:80"; MAX_SUBSET + 1].join(",");
        assert_eq!(of(text(&many)).unwrap().len(), MAX_SUBSET);
    }

    #[test]
    fn the_endpoint_that_served_is_read() {
        let given = metadata(NAMESPACE, SERVED, Kind::StringValue("10.0.0.1:80".to_owned()));
        assert_eq!(served(Some(&given)), Some("10.0.0.1:80"));
        assert_eq!(served(Some(&Metadata::default())), None);
    }
}
