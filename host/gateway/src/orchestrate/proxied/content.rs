//! What the gateway reads of an answer that passes.

use http::{HeaderMap, HeaderValue, Response, header};
use pointsman_workers::{LogLimit, WorkerId};
use tokio::time::Duration;

use crate::{
    openai::{
        endpoint::Endpoint,
        sse::{self, Splitter},
    },
    orchestrate::answer::first_event::is_json,
    upstream::{METADATA, content_coding},
};

/// Shortest time between two warnings of answers whose tokens cannot be counted.
const WARN_INTERVAL: Duration = Duration::from_hours(1);

pub(super) enum Content {
    /// Before the head.
    Nothing,
    Stream(Splitter, Ends),
    /// A whole answer, with the headers by which it is judged. Its bytes are kept up to a limit.
    Whole(Box<Response<Vec<u8>>>),
    /// The rest is not read: the answer is too large, its outcome is known, or only its end matters.
    Ignored {
        failed: bool,
    },
    /// The answer says nothing of the picked worker.
    Elsewhere(http::StatusCode),
}

/// What has come of the end of a stream of events.
#[derive(Clone, Copy, Default)]
pub(super) struct Ends {
    /// The event that ends the answer.
    pub(super) closed: bool,
    /// A finish reason.
    pub(super) finished: bool,
}

impl Content {
    /// Returns how the body of a successful answer of `worker` is read. `hides_body`: it does not pass here.
    pub(super) fn of(
        headers: &HeaderMap,
        hides_body: bool,
        endpoint: Endpoint,
        worker: Option<WorkerId>,
    ) -> Self {
        if hides_body {
            warn_of_hidden_body();
            return Self::Ignored { failed: false };
        }
        if let Some(coding) = content_coding(headers) {
            warn_of_coding(&coding, worker);
            return Self::Ignored { failed: false };
        }
        let kind = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
        if sse::is_stream(kind) {
            return Self::stream(endpoint);
        }
        // Audio has no type in common. An error about it is JSON.
        if endpoint == Endpoint::Speech && !is_json(kind) {
            return Self::Ignored { failed: false };
        }
        let mut whole = Response::new(Vec::new());
        let kept = [header::CONTENT_TYPE, METADATA].into_iter();
        let kept = kept.filter_map(|name| headers.get(&name).cloned().map(|value| (name, value)));
        whole.headers_mut().extend(kept);
        Self::Whole(Box::new(whole))
    }

    /// Returns the beginning of a stream of events. Those of some endpoints end with the body (I6.16).
    pub(super) fn stream(endpoint: Endpoint) -> Self {
        if endpoint.streams_bytes() {
            return Self::Ignored { failed: false };
        }
        Self::Stream(Splitter::default(), Ends::default())
    }

    /// Returns how many bytes of the answer are kept.
    pub(super) fn kept(&mut self) -> usize {
        match self {
            Self::Stream(splitter, _) => splitter.room().capacity(),
            Self::Whole(whole) => whole.body().capacity(),
            _ => 0,
        }
    }
}

fn warn_of_hidden_body() {
    static LINES: LogLimit = LogLimit::new(WARN_INTERVAL);
    if LINES.due().is_some() {
        tracing::warn!(
            "Envoy's ext_proc filter has response_body_mode NONE, so tokens are not counted and busy engines \
             look idle: set FULL_DUPLEX_STREAMED"
        );
    }
}

fn warn_of_coding(coding: &str, worker: Option<WorkerId>) {
    static LINES: LogLimit = LogLimit::new(WARN_INTERVAL);
    if let Some(suppressed) = LINES.due() {
        let worker = worker.map(tracing::field::display);
        tracing::warn!(
            worker,
            coding,
            suppressed,
            "tokens of an answer are not counted: it has a content coding that was not asked for"
        );
    }
}
