//! `[traces]`, validated.

use std::{collections::BTreeMap, time::Duration};

use http::Uri;

use crate::config::{Secret, SemconvVersion};

settings! {
    /// Traces of requests.
    TraceSettings {
        /// URL that exports are posted to; `None` if nothing is recorded.
        "traces.endpoint" endpoint: Option<Uri>,
        /// Headers of each export.
        "traces.headers" headers: BTreeMap<String, Secret>,
        /// Share of the requests without a sampled parent that are recorded.
        "traces.sample_ratio" sample_ratio: f64,
        /// Whether the sampled flag of a client's `traceparent` decides.
        "traces.parent_based" parent_based: bool,
        /// Resource attribute `service.name`.
        "traces.service_name" service_name: String,
        /// Further resource attributes.
        "traces.resource_attributes" resource_attributes: BTreeMap<String, String>,
        /// Version of the semantic conventions.
        "traces.semconv" semconv: SemconvVersion,
        /// Limit of one export with its retries.
        "traces.timeout" timeout: Duration,
        /// How long a finished span waits for others at most.
        "traces.interval" interval: Duration,
        /// Number of finished spans that may wait.
        "traces.queue_spans" queue_spans: usize,
        /// Number of spans from which an export is sent without waiting.
        "traces.batch_spans" batch_spans: usize,
    }
}
