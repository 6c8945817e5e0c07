//! Aborts requests by the id in their body (SGLang's `rid`).
//!
//! The engine's front end ignores an id that no current request has. Otherwise its scheduler ends every
//! request whose id begins with this id.

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
    /// Registers the items of a request by their ids. Returns `None` when one of the ids is in use.
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

    /// Aborts all items, or those whose id begins with `id` if one of them has exactly this id. Returns their
    /// number.
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
    /// Returns the token of an item. An item without an id of its own cannot be aborted.
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
