//! Series that exist at zero before anything is counted: a rate would miss the first event of a series that
//! begins with it.

use pointsman_workers::ModelName;

use super::{Metrics, Name, RequestLabels, SourceLabels};
use crate::openai::request::Endpoint;

/// Endpoints whose series exist before the first request of a model.
const EXPECTED_ENDPOINTS: [Endpoint; 2] = [Endpoint::ChatCompletions, Endpoint::Completions];

impl Metrics {
    /// Creates the series for requests of a model.
    pub(crate) fn expect_model(&self, model: &ModelName) {
        for endpoint in EXPECTED_ENDPOINTS {
            let model = Name(model.0.clone());
            let labels = RequestLabels { endpoint: endpoint.label(), model, status: 200, code: "ok" };
            drop(self.requests.get_or_create(&labels));
        }
    }

    /// Creates the series of lengths and shares.
    pub(crate) fn expect_lengths(&self) {
        let sources = [
            (&self.isl, &["usage", "tokens", "estimate"][..]),
            (&self.osl, &["usage", "counted"]),
            (&self.hit_rate, &["usage", "predicted"]),
        ];
        for (family, sources) in sources {
            for source in sources.iter().copied() {
                drop(family.get_or_create(&SourceLabels { source }));
            }
        }
    }
}
