//! OpenTelemetry traces: which requests are recorded, their spans, and the queue to the exporter.
//!
//! A request that is not recorded costs one branch. A recorded request has its spans in a [`RequestTrace`],
//! which its account owns. Threads share nothing until the request ends. Then the whole trace goes to the
//! exporter in one message. When the queue is full, the trace is dropped and counted.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use http::HeaderMap;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Duration, Instant};

use super::metrics::{DropReason, Metrics};
use crate::{
    config::{SemconvVersion, Traces as TraceSettings},
    openai::{hints::HintTrust, trace_context::TraceContext},
};

#[cfg(feature = "otel")]
mod export;
#[cfg(feature = "otel")]
mod otlp;
mod request_trace;
mod span;

pub(crate) use request_trace::{Ending, RequestTrace};
pub(crate) use span::{Attributes, LegTarget};

/// Decides which requests are recorded, and receives their traces.
#[derive(Debug)]
pub(crate) struct Traces {
    /// A request is recorded when the lower 63 bits of its trace id are below this.
    threshold: u64,
    parent_based: bool,
    semconv: SemconvVersion,
    queue: Queue,
}

/// The queue to the exporter.
#[derive(Debug)]
struct Queue {
    sender: mpsc::UnboundedSender<Message>,
    /// Number of spans in the queue and in the current export.
    waiting: Arc<AtomicUsize>,
    /// Limit of `waiting`.
    limit: usize,
    metrics: Arc<Metrics>,
}

/// Messages to the exporter.
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "there is no exporter"))]
enum Message {
    Trace(Box<RequestTrace>),
    /// Exports everything queued before this message, then answers.
    Flush(oneshot::Sender<()>),
}

impl Traces {
    /// Starts an exporter with these settings, for the gateway that listens on `address`. Returns `None` when
    /// they name no endpoint.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(
        settings: &TraceSettings,
        address: SocketAddr,
        metrics: &Arc<Metrics>,
    ) -> std::io::Result<Option<Arc<Self>>> {
        if settings.endpoint.is_none() {
            return Ok(None);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        #[cfg(feature = "otel")]
        export::start(settings, address, receiver, waiting.clone(), metrics.clone())?;
        #[cfg(not(feature = "otel"))]
        drop((receiver, address));
        let queue = Queue { sender, waiting, limit: settings.queue_spans, metrics: metrics.clone() };
        Ok(Some(Arc::new(Self {
            threshold: threshold(settings.sample_ratio),
            parent_based: settings.parent_based,
            semconv: settings.semconv,
            queue,
        })))
    }

    /// Begins the trace of a request whose first byte arrived at `started`. Returns `None` if it is not
    /// recorded. The trace of an untrusted client has no influence on this.
    pub(crate) fn begin(
        self: &Arc<Self>,
        headers: &HeaderMap,
        trust: HintTrust,
        started: Instant,
    ) -> Option<Box<RequestTrace>> {
        let given = (trust == HintTrust::Trusted).then(|| TraceContext::given(headers)).flatten();
        let follows = self.parent_based && given.is_some();
        let context = given.unwrap_or_else(TraceContext::begin);
        let sampled = if follows { context.is_sampled() } else { context.ratio_bits() < self.threshold };
        sampled.then(|| Box::new(RequestTrace::new(self.clone(), context.sampled(), started)))
    }

    /// Queues a finished trace, or drops it and counts its spans.
    fn submit(&self, trace: Box<RequestTrace>) {
        let Queue { sender, waiting, limit, metrics } = &self.queue;
        let spans = trace.len();
        if waiting.fetch_add(spans, Ordering::Relaxed) + spans > *limit {
            waiting.fetch_sub(spans, Ordering::Relaxed);
            metrics.spans_dropped(DropReason::Queue, spans);
        } else if sender.send(Message::Trace(trace)).is_err() {
            waiting.fetch_sub(spans, Ordering::Relaxed);
            metrics.spans_dropped(DropReason::Stopped, spans);
        }
    }

    /// Waits until everything that was queued is exported or dropped, for at most `limit`.
    pub(crate) async fn flush(&self, limit: Duration) {
        let (done, exported) = oneshot::channel();
        let sent = self.queue.sender.send(Message::Flush(done));
        if sent.is_ok() && tokio::time::timeout(limit, exported).await.is_err() {
            tracing::warn!("traces not exported to their end: the collector is too slow");
        }
    }
}

/// Returns the number below which this share of the 63-bit numbers lies.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the cast saturates, as it should"
)]
fn threshold(share: f64) -> u64 {
    (share * (1_u64 << 63) as f64) as u64
}

#[cfg(test)]
mod tests;
