//! Requests that can be aborted by the id their body gave them (SGLang's `rid`), by prefix.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// The requests in flight that have an id.
#[derive(Default)]
pub(crate) struct Aborts {
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    next: u64,
    requests: HashMap<u64, (Vec<String>, CancellationToken)>,
}

/// A request's entry; leaves with it.
pub(crate) struct AbortGuard {
    engine: Arc<super::Engine>,
    key: u64,
    pub(crate) token: CancellationToken,
}

impl Aborts {
    pub(crate) fn enter(engine: &Arc<super::Engine>, ids: Vec<String>) -> AbortGuard {
        let token = CancellationToken::new();
        let mut live = engine.aborts.live.lock();
        live.next += 1;
        let key = live.next;
        live.requests.insert(key, (ids, token.clone()));
        drop(live);
        AbortGuard { engine: Arc::clone(engine), key, token }
    }

    /// Stops every request with an id that begins with `prefix`, or all; returns how many.
    pub(crate) fn abort(&self, prefix: &str, all: bool) -> usize {
        let live = self.live.lock();
        let hit = live
            .requests
            .values()
            .filter(|(ids, _)| all || (!prefix.is_empty() && ids.iter().any(|id| id.starts_with(prefix))));
        hit.map(|(_, token)| token.cancel()).count()
    }
}

impl Drop for AbortGuard {
    fn drop(&mut self) {
        self.engine.aborts.live.lock().requests.remove(&self.key);
    }
}
