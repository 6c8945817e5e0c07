//! `[traces]`: OpenTelemetry traces of requests.

use std::{collections::BTreeMap, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Secret, duration};

/// `[traces]`: where spans go, and which requests have them.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Traces {
    /// URL of an OTLP receiver (protobuf over HTTP); without it, nothing is recorded.
    pub endpoint: Option<String>,
    /// Headers of each export, such as an API key.
    pub headers: BTreeMap<String, Secret>,
    /// Share of the requests without a sampled parent that are recorded, 0 to 1.
    pub sample_ratio: f64,
    /// Whether the sampled flag of a client's `traceparent` decides.
    pub parent_based: bool,
    /// Resource attribute `service.name`.
    pub service_name: String,
    /// Further resource attributes.
    pub resource_attributes: BTreeMap<String, String>,
    /// Version of the semantic conventions for `gen_ai.*`.
    pub semconv: SemconvVersion,
    /// Limit of one export with its retries.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub timeout: Duration,
    /// How long a finished span waits for others at most.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
    /// Number of finished spans that may wait.
    pub queue_spans: usize,
    /// Number of spans from which an export is sent without waiting.
    pub batch_spans: usize,
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

impl Default for Traces {
    fn default() -> Self {
        Self {
            endpoint: None,
            headers: BTreeMap::new(),
            sample_ratio: 0.01,
            parent_based: true,
            service_name: "pointsman".to_owned(),
            resource_attributes: BTreeMap::new(),
            semconv: SemconvVersion::default(),
            timeout: Duration::from_secs(10),
            interval: Duration::from_secs(5),
            queue_spans: 8_192,
            batch_spans: 512,
        }
    }
}
