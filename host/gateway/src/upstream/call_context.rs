//! What all calls to engines share.

use std::sync::Arc;

use pointsman_workers::{EngineTls, Resolver};

use super::via::Via;

/// What all calls to engines use.
#[derive(Debug)]
pub(crate) struct CallContext {
    pub(crate) tls: Arc<EngineTls>,
    pub(crate) resolver: Resolver,
    /// Header of requests that passed no gateway before this one.
    pub(crate) via: Via,
}
