//! The decision log: requests with their decisions and outcomes, in files for `pointsman trace export`.
//!
//! A request costs one allocation and one `try_send`. A separate thread salts, formats, compresses and writes
//! the records. When the queue to it is full, or the disk fails, records are dropped and counted. Requests
//! never wait.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc::{SyncSender, TrySendError, sync_channel},
};

use arc_swap::ArcSwapOption;
use tokio::{
    sync::oneshot,
    time::{Duration, Instant},
};

use super::metrics::{Metrics, ReasonLabels};
use crate::config::DecisionLogSettings;

mod entry;
mod files;
mod salt;
mod writer;

pub(crate) use entry::{Entry, OverrideEntry};
use writer::Writer;

/// Maximum number of requests that wait for the writer.
const MAX_QUEUED: usize = 8_192;
/// Maximum size of the requests that wait for the writer, bytes. A prompt may have many blocks.
const MAX_QUEUED_BYTES: usize = 32 * 1024 * 1024;
/// Interval at which a flush is offered to a full queue.
const FLUSH_RETRY: Duration = Duration::from_millis(10);

/// Accepts the requests to log. Dropping this ends the writer after it has written the queued requests.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    queue: SyncSender<Message>,
    queued_bytes: Arc<AtomicUsize>,
    problem: Problem,
    metrics: Arc<Metrics>,
}

/// Why the log cannot be written.
type Problem = Arc<ArcSwapOption<String>>;

/// Messages to the writer.
enum Message {
    Entry(Box<Entry>),
    /// Writes everything queued before this message, then answers.
    Flush(oneshot::Sender<()>),
}

impl DecisionLog {
    /// Starts a writer with these settings. Returns `None` when they name no directory. `block_tokens` is the
    /// size of the blocks of [`Entry::prefix`].
    ///
    /// # Errors
    /// The thread cannot be started. A directory that cannot be written is not an error.
    pub(crate) fn start(
        settings: &DecisionLogSettings,
        block_tokens: u32,
        metrics: &Arc<Metrics>,
    ) -> std::io::Result<Option<Arc<Self>>> {
        let Some(dir) = settings.dir.clone() else { return Ok(None) };
        let (queue, receiver) = sync_channel(MAX_QUEUED);
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let problem = Problem::default();
        let shared = (queued_bytes.clone(), problem.clone());
        let writer = Writer::new(dir, settings, block_tokens, metrics.clone(), shared)?;
        let thread = std::thread::Builder::new().name("pointsman-log".to_owned());
        thread.spawn(move || writer.run(&receiver))?;
        Ok(Some(Arc::new(Self { queue, queued_bytes, problem, metrics: metrics.clone() })))
    }

    /// Returns why the log cannot be written; `None` if it can.
    pub(crate) fn problem(&self) -> Option<Arc<String>> {
        self.problem.load_full()
    }

    /// Queues a request, or drops it and counts the drop.
    pub(crate) fn submit(&self, entry: Box<Entry>) {
        let bytes = entry.bytes();
        let before = self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = before + bytes <= MAX_QUEUED_BYTES;
        if !fits || self.queue.try_send(Message::Entry(entry)).is_err() {
            self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.metrics.log_dropped("queue", 1);
        }
    }

    /// Waits until everything that was queued is written, for at most `limit`.
    pub(crate) async fn flush(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let (done, written) = oneshot::channel();
        let mut message = Message::Flush(done);
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Full(again)) if Instant::now() < deadline => message = again,
                Err(_) => return,
            }
            tokio::time::sleep(FLUSH_RETRY).await;
        }
        if tokio::time::timeout_at(deadline, written).await.is_err() {
            tracing::warn!("decision log not written to its end: the disk is too slow");
        }
    }
}

impl Metrics {
    /// Counts records that were dropped.
    fn log_dropped(&self, reason: &'static str, count: u64) {
        self.decision_log_dropped.get_or_create(&ReasonLabels { reason }).inc_by(count);
    }
}

#[cfg(test)]
mod tests;
