//! Log lines about the workers that join and leave by a source.

use std::{collections::HashMap, sync::Arc, time::Duration};

use pointsman_workers::WorkerId;
use tokio::time::Instant;

use crate::found::Found;

/// Shortest time between two lines about a source. Changes in between are in one line.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of URLs in a line, of workers that joined and of those that left.
const MAX_URLS: usize = 8;

/// The changes of one source that the log does not have yet.
#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    joined: Changed,
    left: Changed,
    logged: Option<Instant>,
}

#[derive(Debug, Default)]
struct Changed {
    count: usize,
    urls: Vec<Arc<str>>,
}

impl ChangeLog {
    /// Notes the workers of a source before and after a reading. One that drains has left.
    pub(super) fn note(&mut self, before: &[Found], after: &[Found]) {
        let (before, after) = (staying(before), staying(after));
        self.joined.add(&after, &before);
        self.left.add(&before, &after);
    }

    /// Writes a line, if there are changes and it is time. Returns when it is time otherwise.
    pub(super) fn write(&mut self, source: &str, workers: &[Found], now: Instant) -> Option<Instant> {
        if self.joined.count + self.left.count == 0 {
            return None;
        }
        let due = self.logged.map(|logged| logged + INTERVAL).filter(|due| *due > now);
        if due.is_some() {
            return due;
        }
        self.logged = Some(now);
        let (joined, left) = (std::mem::take(&mut self.joined), std::mem::take(&mut self.left));
        tracing::info!(
            source,
            joined = joined.count,
            left = left.count,
            workers = staying(workers).len(),
            urls_joined = joined.urls.join(" "),
            urls_left = left.urls.join(" "),
            "workers of a discovery source changed"
        );
        None
    }
}

impl Changed {
    /// Adds the workers of `these` that are not in `others`.
    fn add(&mut self, these: &HashMap<WorkerId, &Arc<str>>, others: &HashMap<WorkerId, &Arc<str>>) {
        let new = these.iter().filter(|(id, _)| !others.contains_key(id));
        let mut urls: Vec<&Arc<str>> = new.map(|(_, url)| *url).collect();
        urls.sort_unstable();
        self.count += urls.len();
        let room = MAX_URLS.saturating_sub(self.urls.len());
        self.urls.extend(urls.into_iter().take(room).cloned());
    }
}

/// Returns the URLs of the workers that do not drain, by id. One that is not ready stays.
fn staying(workers: &[Found]) -> HashMap<WorkerId, &Arc<str>> {
    let staying = workers.iter().filter(|found| found.unready || !found.leaving);
    staying.map(|found| (found.spec.id, &found.spec.url)).collect()
}
