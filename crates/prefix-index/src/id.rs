//! Identifiers of workers, their ranks, and blocks.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Id of an engine endpoint: configured, or the xxh3-64 hash (seed 0) of its base URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

/// Data-parallel rank of a worker. A *candidate* is a pair of worker and rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DpRank(pub u32);

/// Sequence hash of a full block: identifies the block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

impl WorkerId {
    /// Returns the id of a worker without a configured one: a hash of its base URL, which survives restarts.
    #[must_use]
    pub fn of_url(url: &str) -> Self {
        Self(xxh3_64(url.trim_end_matches('/').as_bytes()))
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Display for DpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
