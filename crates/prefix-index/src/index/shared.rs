//! State that lookups, the writer and metrics share.

use std::sync::Arc;

use super::{holders::HolderDirectory, segments::Tree};
use crate::sync::{ArcSwap, atomic::AtomicU64};

/// State that the writer publishes to lookups.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) tree: Arc<Tree>,
    pub(super) directory: ArcSwap<HolderDirectory>,
    pub(super) counters: Counters,
}

/// The counters behind [`super::IndexStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) blocks: AtomicU64,
    pub(super) records: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) evicted: AtomicU64,
    pub(super) expired: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) orphans: AtomicU64,
    pub(super) holders: AtomicU64,
}
