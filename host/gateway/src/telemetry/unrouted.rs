//! The last requests that failed without a recorded decision, for operators: refused before routing, or
//! while the record of decisions is off.

use std::collections::VecDeque;

use parking_lot::Mutex;
use pointsman_routing::Outcome;
use pointsman_workers::ModelName;
use serde::Serialize;

/// Maximum number of requests that are kept.
const MAX_REQUESTS: usize = 64;
/// Maximum length of a client's text that is kept, bytes: the id of a request, or the name of a model.
const MAX_TEXT_BYTES: usize = 128;

/// The last requests that failed without a recorded decision. There are at most 64 of them, with at most 128
/// bytes of each text.
#[derive(Debug, Default)]
pub(crate) struct Unrouted(Mutex<VecDeque<UnroutedRequest>>);

/// A request that failed without a recorded decision.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct UnroutedRequest {
    request_id: String,
    model: String,
    outcome: Outcome,
}

impl Unrouted {
    /// Adds a failed request. The request is left out if another thread adds or reads one at the same time.
    pub(crate) fn push(&self, id: &str, model: &ModelName, outcome: &Outcome) {
        let Some(mut requests) = self.0.try_lock() else { return };
        if requests.len() == MAX_REQUESTS {
            requests.pop_front();
        }
        let (request_id, model) = (beginning(id), beginning(model.as_str()));
        requests.push_back(UnroutedRequest { request_id, model, outcome: *outcome });
    }

    /// Returns the requests, newest first.
    pub(crate) fn newest(&self) -> Vec<UnroutedRequest> {
        self.0.lock().iter().rev().cloned().collect()
    }
}

fn beginning(text: &str) -> String {
    text.get(..text.floor_char_boundary(MAX_TEXT_BYTES)).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use tokio::time::Duration;

    use super::*;

    #[test]
    fn the_last_64_requests_are_kept_with_short_ids() {
        let unrouted = Unrouted::default();
        let outcome = Outcome {
            status: 429,
            code: "rate_limited",
            retried: false,
            moved: false,
            ttft: None,
            itl: None,
            output_tokens: 0,
            output_source: None,
            ended_at_ms: 5,
            duration: Duration::from_millis(1),
            cached_predicted: None,
            cached_reported: None,
            prompt_tokens: 0,
            times: pointsman_routing::LegTimes::default(),
            run: None,
            stream_failed: None,
            continues: None,
        };
        let model = ModelName::new(&"m".repeat(1_000));
        for number in 0..100 {
            unrouted.push(&format!("{number}-{}", "ä".repeat(200)), &model, &outcome);
        }
        let newest = unrouted.newest();
        assert_eq!(newest.len(), MAX_REQUESTS);
        assert!(newest[0].request_id.starts_with("99-") && newest[63].request_id.starts_with("36-"));
        assert!(newest.iter().all(|one| one.request_id.len().max(one.model.len()) <= MAX_TEXT_BYTES));
    }
}
