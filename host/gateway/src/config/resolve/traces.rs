//! `[traces]`.

use http::{HeaderName, HeaderValue, Uri};

use super::Problems;
use crate::config::{Traces, settings::TraceSettings};

/// Path of the traces at an OTLP receiver, for an endpoint without a path.
const TRACES_PATH: &str = "/v1/traces";
/// Most spans that one export may have: the message stays below the limits of collectors (4 MiB).
const MAX_BATCH: usize = 2_048;

impl Problems {
    pub(super) fn traces(&mut self, traces: &Traces) -> TraceSettings {
        let Traces {
            ref endpoint,
            ref headers,
            sample_ratio,
            parent_based,
            ref service_name,
            ref resource_attributes,
            semconv,
            timeout,
            interval,
            queue_spans,
            batch_spans,
        } = *traces;
        let endpoint = endpoint.as_deref().and_then(|endpoint| self.endpoint(endpoint));
        if !(0.0..=1.0).contains(&sample_ratio) {
            self.add("traces.sample_ratio", format!("`{sample_ratio}` is not a share: expected 0.0 to 1.0"));
        }
        for (name, value) in headers {
            let path = format!("traces.headers.{name}");
            if HeaderName::try_from(name).is_err() {
                self.add(path, format!("`{name}` is not the name of an HTTP header"));
            } else if HeaderValue::try_from(value.expose()).is_err() {
                self.add(path, "the value has characters that an HTTP header must not have");
            }
        }
        if service_name.is_empty() {
            self.add("traces.service_name", "the name is empty: spans of several services would mix");
        }
        if resource_attributes.contains_key("service.name") {
            let message = "`service.name` is written twice: set traces.service_name instead";
            self.add("traces.resource_attributes", message);
        }
        if batch_spans == 0 || batch_spans > MAX_BATCH {
            let message = format!("`{batch_spans}` is out of range: expected 1 to {MAX_BATCH}");
            self.add("traces.batch_spans", message);
        }
        if queue_spans < batch_spans {
            let message = format!(
                "`{queue_spans}` is too small for one export of traces.batch_spans ({batch_spans}): expected that \
                 or more"
            );
            self.add("traces.queue_spans", message);
        }
        TraceSettings {
            endpoint,
            headers: headers.clone(),
            sample_ratio,
            parent_based,
            service_name: service_name.clone(),
            resource_attributes: resource_attributes.clone(),
            semconv,
            timeout: self.limit("traces.timeout", timeout),
            interval: self.limit("traces.interval", interval),
            queue_spans,
            batch_spans,
        }
    }

    /// Returns the URL that exports are posted to.
    fn endpoint(&mut self, endpoint: &str) -> Option<Uri> {
        const PATH: &str = "traces.endpoint";
        if cfg!(not(feature = "otel")) {
            self.add(PATH, "this binary was built without traces: build it with the feature `otel`");
            return None;
        }
        let uri = endpoint.parse::<Uri>().ok();
        let uri = uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
        let Some(uri) = uri.filter(|uri| uri.host().is_some_and(|host| !host.is_empty())) else {
            // The text may contain a password.
            let message = "the value is not a URL: expected one such as `http://127.0.0.1:4318`";
            self.add(PATH, message);
            return None;
        };
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            let message = "the URL contains a user or password, which logs may show: use traces.headers";
            self.add(PATH, message);
            return None;
        }
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Some(uri);
        }
        let mut parts = uri.into_parts();
        parts.path_and_query = Some(http::uri::PathAndQuery::from_static(TRACES_PATH));
        Uri::from_parts(parts).ok()
    }
}
