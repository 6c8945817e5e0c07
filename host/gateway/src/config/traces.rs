//! `[traces]`: OpenTelemetry traces of requests.

use std::{collections::BTreeMap, time::Duration};

use http::{HeaderName, HeaderValue, Uri};
use pointsman_config_file::{Report, duration::secs, section};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Secret;

/// Path of the traces at an OTLP receiver, for an endpoint without a path.
const TRACES_PATH: &str = "/v1/traces";

/// OpenTelemetry traces of requests; see "Traces".
#[section(rules)]
pub struct Traces {
    /// OTLP receiver, protobuf over HTTP; without a path: /v1/traces. Without it: no traces.
    #[key(example = "\"http://127.0.0.1:4318\"")]
    pub endpoint: Option<String>,
    /// Headers of each export, such as authorization = "Bearer …"; no log shows them.
    pub headers: BTreeMap<String, Secret>,
    /// Share of the requests that are recorded, unless their parent decides.
    #[key(default = 0.01, range = 0.0..=1.0, reason = "is not a share")]
    pub sample_ratio: f64,
    /// Whether the sampled flag of the client's traceparent decides; needs server.trust_hints.
    #[key(default = true)]
    pub parent_based: bool,
    /// Resource attribute service.name.
    #[key(default = "pointsman".to_owned())]
    pub service_name: String,
    /// Further resource attributes, such as "deployment.environment.name" = "production".
    pub resource_attributes: BTreeMap<String, String>,
    /// Version of the semantic conventions for gen_ai.*: "1.36", "1.37" or "1.41".
    pub semconv: SemconvVersion,
    /// Time limit of one export with its retries.
    #[key(default = secs(10), positive)]
    pub timeout: Duration,
    /// How long a finished span waits for others, to be exported together.
    #[key(default = secs(5), positive)]
    pub interval: Duration,
    /// Finished spans that wait; more are dropped and counted.
    #[key(default = 8_192, range = 1.., reason = "would drop every span")]
    pub queue_spans: usize,
}

/// Version of OpenTelemetry's semantic conventions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize, JsonSchema)]
pub enum SemconvVersion {
    /// The last version with `gen_ai.system`.
    #[serde(rename = "1.36")]
    V1_36,
    /// `gen_ai.provider.name` takes the place of `gen_ai.system`.
    #[serde(rename = "1.37")]
    V1_37,
    /// Adds cached input tokens, streaming and the time to the first chunk. The last version before the
    /// conventions moved to a repository of their own, where these names are the same.
    #[default]
    #[serde(rename = "1.41")]
    V1_41,
}

impl Traces {
    fn rules(&self, report: &mut Report<'_>) {
        if let Some(Err(message)) = self.endpoint.as_deref().map(parsed) {
            report.add("endpoint", message);
        }
        for (name, value) in &self.headers {
            let key = format!("headers.{name}");
            if HeaderName::try_from(name).is_err() {
                report.add(&key, format!("`{name}` is not the name of an HTTP header"));
            } else if HeaderValue::try_from(value.expose()).is_err() {
                report.add(&key, "the value has characters that an HTTP header must not have");
            }
        }
        if self.service_name.is_empty() {
            report.add("service_name", "the name is empty: spans of several services would mix");
        }
        if self.resource_attributes.contains_key("service.name") {
            let message = "`service.name` is written twice: set traces.service_name instead";
            report.add("resource_attributes", message);
        }
    }

    /// Returns the URL that exports are posted to; `None` if nothing is recorded.
    #[cfg(feature = "otel")]
    #[must_use]
    pub(crate) fn url(&self) -> Option<Uri> {
        parsed(self.endpoint.as_deref()?).ok()
    }
}

/// Parses an endpoint, and gives it its path. No message shows the text, which may contain a password.
fn parsed(endpoint: &str) -> Result<Uri, &'static str> {
    if cfg!(not(feature = "otel")) {
        return Err("this binary was built without traces: build it with the feature `otel`");
    }
    let uri = endpoint.parse::<Uri>().ok();
    let uri = uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
    let uri = uri.filter(|uri| uri.host().is_some_and(|host| !host.is_empty()));
    let uri = uri.ok_or("the value is not a URL: expected one such as `http://127.0.0.1:4318`")?;
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err("the URL contains a user or password, which logs may show: use traces.headers");
    }
    if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Ok(uri);
    }
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(http::uri::PathAndQuery::from_static(TRACES_PATH));
    Uri::from_parts(parts).map_err(|_| "the value is not a URL")
}
