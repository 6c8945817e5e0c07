//! Aborts requests by a prefix of the id in their body (SGLang's `rid`).

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Requests in flight with an id.
#[derive(Default)]
pub(crate) struct Aborts {
    live: Mutex<Live>,
}

#[derive(Default)]
struct Live {
    next: u64,
    requests: HashMap<u64, (Vec<String>, CancellationToken)>,
}

/// Entry of a request, removed on drop.
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

    /// Aborts the requests whose id starts with `prefix`, or all. Returns their number.
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
