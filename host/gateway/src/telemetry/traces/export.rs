//! The exporter: a thread that sends finished traces to a collector, in batches with a deadline.
//!
//! A collector may fail to answer, so each export has one deadline for all its attempts, and the answer has a
//! size limit. Spans that cannot be sent are dropped and counted.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use http::{HeaderName, HeaderValue, StatusCode, header};
use pointsman_http_client::{BodyError, Roots, Setup, whole, with_causes};
use pointsman_workers::LogLimit;
use reqwest::Client;
use tokio::{
    sync::{mpsc::UnboundedReceiver, oneshot},
    time::{Duration, Instant, sleep_until, timeout_at},
};

use super::{
    DropReason, Message,
    otlp::{self, Envelope},
    request_trace::RequestTrace,
};
use crate::{config::Traces as TraceSettings, instance_name::instance_name, telemetry::metrics::Metrics};

/// Number of spans at which an export is sent at once, so that the message stays below the limit of
/// collectors (4 MiB).
const BATCH_SPANS: usize = 512;
/// Maximum size of a collector's answer, bytes.
const MAX_ANSWER: usize = 64 * 1024;
/// Pause before the first repetition of an export. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Minimum time between two log lines about failed exports.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Sends batches to one collector.
struct Exporter {
    client: Client,
    url: String,
    envelope: Envelope,
    timeout: Duration,
    interval: Duration,
    batch_spans: usize,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
    log: LogLimit,
}

/// Reason for which an attempt failed. The texts are those of the errors, without the URL.
enum Failure {
    Connect(String),
    Broken(String),
    /// An error status.
    Status(StatusCode),
    AnswerTooLarge,
}

/// Starts the exporter's thread. The thread ends when the queue's sender was dropped and everything was sent.
///
/// # Errors
/// The thread, its runtime or the HTTP client cannot be started.
pub(super) fn start(
    settings: &TraceSettings,
    address: SocketAddr,
    queue: UnboundedReceiver<Message>,
    waiting: Arc<AtomicUsize>,
    metrics: Arc<Metrics>,
) -> std::io::Result<()> {
    let url = settings.url().map(|url| url.to_string()).unwrap_or_default();
    let exporter = Exporter {
        client: client(settings, &url)?,
        url,
        envelope: Envelope::new(settings, &instance_name(address)),
        timeout: settings.timeout,
        interval: settings.interval,
        batch_spans: BATCH_SPANS.min(settings.queue_spans),
        waiting,
        metrics,
        log: LogLimit::new(LOG_INTERVAL),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let thread = std::thread::Builder::new().name("pointsman-traces".to_owned());
    thread.spawn(move || runtime.block_on(exporter.run(queue)))?;
    Ok(())
}

fn client(settings: &TraceSettings, url: &str) -> std::io::Result<Client> {
    let headers = settings.headers.iter().filter_map(|(name, value)| {
        let mut value = HeaderValue::try_from(value.expose()).ok()?;
        value.set_sensitive(true);
        Some((HeaderName::try_from(name).ok()?, value))
    });
    let setup = Setup { roots: Roots::of(url), headers: headers.collect(), ..Setup::default() };
    setup.build().map_err(std::io::Error::other)
}

impl Exporter {
    async fn run(self, mut queue: UnboundedReceiver<Message>) {
        let mut open = true;
        while open {
            let (mut batch, mut spans) = (Vec::new(), 0);
            let mut flushed: Vec<oneshot::Sender<()>> = Vec::new();
            let mut due = None;
            while spans < self.batch_spans && flushed.is_empty() {
                let message = tokio::select! {
                    biased;
                    message = queue.recv() => message,
                    () = at(due) => break,
                };
                match message {
                    Some(Message::Trace(trace)) => {
                        due.get_or_insert_with(|| Instant::now() + self.interval);
                        spans += trace.len();
                        batch.push(trace);
                    }
                    Some(Message::Flush(done)) => flushed.push(done),
                    None => {
                        open = false;
                        break;
                    }
                }
            }
            if !batch.is_empty() {
                self.export(&batch, spans).await;
                self.waiting.fetch_sub(spans, Ordering::Relaxed);
            }
            for done in flushed {
                let _: Result<(), ()> = done.send(());
            }
        }
    }

    /// Sends a batch. Repeats this until the deadline if a failure may be temporary.
    async fn export(&self, batch: &[Box<RequestTrace>], spans: usize) {
        let body = bytes::Bytes::from(self.envelope.request(batch));
        let deadline = Instant::now() + self.timeout;
        let mut pause = FIRST_PAUSE;
        let failure = loop {
            let failure = match timeout_at(deadline, self.post(body.clone())).await {
                Ok(Ok(rejected)) => {
                    let rejected = rejected.min(spans);
                    self.metrics.trace_spans_exported.inc_by((spans - rejected) as u64);
                    if rejected > 0 {
                        self.dropped(DropReason::Rejected, None, rejected);
                    }
                    return;
                }
                Ok(Err(failure)) => failure,
                Err(_) => break None,
            };
            if !failure.may_pass() || Instant::now() + pause >= deadline {
                break Some(failure);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_PAUSE);
        };
        let reason = failure.as_ref().map_or(DropReason::Timeout, Failure::reason);
        self.dropped(reason, failure, spans);
    }

    /// Makes one attempt. Returns how many spans the collector rejected.
    async fn post(&self, body: bytes::Bytes) -> Result<usize, Failure> {
        let request = self.client.post(&self.url).header(header::CONTENT_TYPE, "application/x-protobuf");
        let sent = request.body(body).send().await;
        let answer = sent.map_err(Failure::of)?;
        if !answer.status().is_success() {
            return Err(Failure::Status(answer.status()));
        }
        let text = whole(answer, MAX_ANSWER).await.map_err(|error| match error {
            BodyError::Broken(error) => Failure::of(error),
            BodyError::TooLarge(_) => Failure::AnswerTooLarge,
        })?;
        // An answer with status 200 that is not protobuf says nothing about individual spans.
        Ok(otlp::rejected_spans(&text))
    }

    fn dropped(&self, reason: DropReason, failure: Option<Failure>, spans: usize) {
        self.metrics.spans_dropped(reason, spans);
        if let Some(suppressed) = self.log.due() {
            let (status, error) = match failure {
                Some(Failure::Status(status)) => (Some(status.as_u16()), None),
                Some(Failure::Connect(text) | Failure::Broken(text)) => (None, Some(text)),
                Some(Failure::AnswerTooLarge) | None => (None, None),
            };
            let reason = reason.as_str();
            tracing::warn!(
                reason,
                status,
                error,
                spans,
                suppressed,
                "spans not exported: check traces.endpoint"
            );
        }
    }
}

impl Failure {
    fn of(error: reqwest::Error) -> Self {
        let is_connect = error.is_connect();
        // The query of the URL may have a key.
        let text = with_causes(&error.without_url());
        if is_connect { Self::Connect(text) } else { Self::Broken(text) }
    }

    /// Whether the same export may succeed later.
    fn may_pass(&self) -> bool {
        match self {
            Self::Connect(_) | Self::Broken(_) => true,
            Self::Status(status) => matches!(status.as_u16(), 429 | 502 | 503 | 504),
            Self::AnswerTooLarge => false,
        }
    }

    fn reason(&self) -> DropReason {
        match self {
            Self::Connect(_) => DropReason::Connect,
            Self::Broken(_) => DropReason::Broken,
            Self::Status(_) => DropReason::Status,
            Self::AnswerTooLarge => DropReason::Answer,
        }
    }
}

/// Waits until `moment`; for ever if it is `None`.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}
