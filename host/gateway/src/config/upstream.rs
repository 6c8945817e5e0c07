//! `[upstream]`: calls to workers.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::duration;

/// `[upstream]`: calls to workers.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Upstream {
    /// How long an idle connection is kept.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub idle_timeout: Duration,
    /// Number of idle connections that each data thread keeps for a worker; 0: none.
    pub idle_connections: usize,
    /// Whether engines get the client's `authorization` header. A worker's own key takes its place.
    pub forward_authorization: bool,
}

impl Default for Upstream {
    fn default() -> Self {
        Self { idle_timeout: Duration::from_secs(30), idle_connections: 256, forward_authorization: false }
    }
}
