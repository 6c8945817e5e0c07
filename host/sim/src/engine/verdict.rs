//! Result of a request from one engine to another.

use serde::{Deserialize, Serialize};

use super::counters::HandoffResult;

/// Result of a pull or a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Pulled,
    Reused,
    Wrong,
    Expired,
    Failed,
}

impl From<Verdict> for HandoffResult {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Pulled => Self::Pulled,
            Verdict::Reused => Self::Reused,
            Verdict::Wrong => Self::Wrong,
            Verdict::Expired => Self::Expired,
            Verdict::Failed => Self::Failed,
        }
    }
}
