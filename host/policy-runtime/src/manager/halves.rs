//! Fingerprints of the two halves of a lane's content.

use pointsman_routing::Digest;
use sha2::{Digest as _, Sha256};

/// The two halves of content: the filters that the configuration names, and all else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Halves {
    /// Number of the filters, which are the first of the program.
    pub(super) filter_count: usize,
    pub(super) filters: Digest,
    pub(super) rest: Digest,
}

impl Halves {
    /// Returns the fingerprint of both.
    pub(super) fn whole(&self) -> Digest {
        Digest(Sha256::new().chain_update(self.filters.0).chain_update(self.rest.0).finalize().into())
    }
}
