//! Ids of the blocks of a prompt.

use std::{fmt, ops::Deref, sync::Arc};

/// Ids of the blocks of a prompt. The turns of a session can share one list; each turn uses the beginning of
/// it.
#[derive(Clone, Default)]
pub struct BlockIds {
    all: Arc<[u64]>,
    count: usize,
}

impl BlockIds {
    /// Returns the first `count` ids of a list.
    pub(crate) fn first(all: &Arc<[u64]>, count: usize) -> Self {
        Self { all: all.clone(), count: count.min(all.len()) }
    }
}

impl Deref for BlockIds {
    type Target = [u64];

    fn deref(&self) -> &[u64] {
        self.all.get(..self.count).unwrap_or_default()
    }
}

impl PartialEq for BlockIds {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl fmt::Debug for BlockIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.deref().fmt(f)
    }
}

impl From<Vec<u64>> for BlockIds {
    fn from(ids: Vec<u64>) -> Self {
        Self { count: ids.len(), all: ids.into() }
    }
}

impl FromIterator<u64> for BlockIds {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> Self {
        ids.into_iter().collect::<Vec<_>>().into()
    }
}
