//! Aborts requests by the id in their body (SGLang's `rid`).
//!
//! An id that no request in progress has is ignored. Otherwise every request whose id begins with it ends:
//! the engine's front looks for the id itself, its scheduler for the beginning.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Requests in flight, by id.
#[derive(Default)]
pub(crate) struct Aborts {
    live: Mutex<HashMap<String, CancellationToken>>,
}

/// Entries of the items of a request, removed on drop.
pub(crate) struct AbortGuard {
    engine: Arc<super::Engine>,
    ids: Vec<String>,
    tokens: Vec<CancellationToken>,
}

impl Aborts {
    /// Enters the items of a request by their ids; `None` when one of them is in use.
    pub(crate) fn enter(engine: &Arc<super::Engine>, ids: Vec<String>) -> Option<AbortGuard> {
        let mut live = engine.aborts.live.lock();
        if ids.iter().any(|id| live.contains_key(id)) {
            return None;
        }
        let tokens: Vec<CancellationToken> = ids.iter().map(|_| CancellationToken::new()).collect();
        live.extend(ids.iter().cloned().zip(tokens.iter().cloned()));
        drop(live);
        Some(AbortGuard { engine: Arc::clone(engine), ids, tokens })
    }

    /// Aborts the items whose id begins with `id`, if one has exactly this id, or all. Returns their number.
    pub(crate) fn abort(&self, id: &str, all: bool) -> usize {
        let live = self.live.lock();
        if !all && !live.contains_key(id) {
            return 0;
        }
        let hit = live.iter().filter(|(other, _)| all || other.starts_with(id));
        hit.map(|(_, token)| token.cancel()).count()
    }
}

impl AbortGuard {
    /// Token of an item. An item without an id of its own cannot be aborted.
    pub(crate) fn token(&self, item: usize) -> CancellationToken {
        self.tokens.get(item).cloned().unwrap_or_default()
    }
}

impl Drop for AbortGuard {
    fn drop(&mut self) {
        let mut live = self.engine.aborts.live.lock();
        for id in &self.ids {
            live.remove(id);
        }
    }
}
