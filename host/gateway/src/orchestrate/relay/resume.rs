//! Continues a stream whose engine failed: decides whether that is safe, finds workers for the rest of the
//! answer, and joins their events to the client's stream (I14).

use std::sync::Arc;

use http::Response;
use pointsman_orchestration::{Event, Failed};
use pointsman_workers::Leg;
use tokio::time::{Duration, Instant};

use super::{Relay, moves::Moving, seam::Seam};
use crate::{
    connectors::connector_for,
    openai::{
        chunk::Reason,
        continuation,
        error::ApiError,
        request::{Endpoint, Request},
        sse::Splitter,
        transcript::Transcript,
    },
    orchestrate::{Drive, executor::Reached},
    upstream::{self, CallError},
};

/// How long the other streams of an engine that died have to break, too.
const OTHERS_BREAK: Duration = Duration::from_millis(200);

/// What a relay keeps to continue its stream.
#[derive(Default)]
pub(super) struct Resumption {
    /// `None` if no stream of this kind is continued.
    pub(super) transcript: Option<Box<Transcript>>,
    /// The request for the rest, until the legs are to send it.
    pub(super) rest: Option<Arc<Request>>,
    /// Where the continuation begins.
    pub(super) seam: Option<Seam>,
    /// How the engine failed.
    pub(super) cause: Option<ApiError>,
    /// Output tokens that the client had then.
    delivered: u32,
    /// Whether the engine may have broken on this stream alone.
    pub(super) is_suspect: bool,
    /// Workers for the rest are being found; none of its events came.
    pub(super) is_pending: bool,
    pub(super) moving: Moving,
}

impl Resumption {
    pub(super) fn of(drive: &Drive) -> Self {
        let may = drive.legs.may_ever_continue() && drive.request.is_chat();
        let is_chat = drive.request.endpoint == Endpoint::ChatCompletions;
        Self { transcript: may.then(|| Transcript::new(is_chat)), ..Self::default() }
    }
}

impl Relay {
    /// Whether workers for the rest of the answer have to be found.
    pub(super) fn is_to_be_continued(&self) -> bool {
        self.resumption.is_pending && !self.over && !self.detached
    }

    /// Ends the leg that answers. The rest of the answer is generated elsewhere where that is safe.
    pub(super) fn fail(&mut self, error: CallError) {
        self.incoming = None;
        let rest = self.rest(&error);
        if let (Err(reason), true) = (&rest, self.is_begun()) {
            self.drive.not_continued(reason);
        }
        self.resumption.rest = rest.ok();
        // A worker that is silent to all, or down, did not break on one stream.
        let is_silent = matches!(error, CallError::Timeout(_) | CallError::Down);
        self.resumption.is_suspect = error.breaks_engine() && !is_silent;
        let event = self.drive.stream_failed(error, self.resumption.rest.is_some());
        self.report(event);
        let was_refused = self.resumption.rest.take().is_some();
        if self.drive.legs.awaits_rest() {
            // It failed before its first token, and its legs are retried.
            self.resumption.is_pending = true;
        } else if was_refused {
            self.drive.not_continued("exhausted");
        }
    }

    /// Whether the client reads a stream that has a token and could be continued.
    pub(super) fn is_begun(&self) -> bool {
        let reads = !self.detached && !self.drive.gone.is_cancelled();
        reads && self.resumption.transcript.is_some() && self.drive.account.tokens() > 0
    }

    /// Returns the request for the rest of the answer.
    fn rest(&self, error: &CallError) -> Result<Arc<Request>, Reason> {
        let transcript = self.resumption.transcript.as_ref().ok_or("off")?;
        if !self.is_begun() {
            return Err("not_begun");
        }
        if self.finish_seen {
            return Err("finished");
        }
        if !says_that_the_engine_is_down(error) {
            return Err(error.kind());
        }
        self.safe_rest(transcript)
    }

    /// Returns the request for the rest of an answer of which the client got this.
    pub(super) fn safe_rest(&self, transcript: &Transcript) -> Result<Arc<Request>, Reason> {
        let rest = continuation::rest_of(&self.drive.request, &transcript.delivered()?)?;
        if self.drive.all_engines_continue() { Ok(rest) } else { Err("engine") }
    }

    /// From now on, the legs generate the rest of the answer.
    pub(super) fn continue_elsewhere(&mut self) {
        let Some(rest) = self.resumption.rest.take() else { return };
        let Some(transcript) = &self.resumption.transcript else { return };
        let Ok(delivered) = transcript.delivered() else { return };
        let is_chat = rest.endpoint == Endpoint::ChatCompletions;
        self.resumption.delivered = delivered.tokens;
        self.resumption.seam = Some(Seam::new(is_chat, &delivered, self.drive.cached_tokens));
        self.resumption.cause = Some(self.drive.begin_rest(rest));
        self.resumption.is_pending = true;
    }

    /// Finds workers for the rest of the answer, and waits until its stream begins or the request ends.
    pub(super) async fn resume(mut self: Box<Self>) -> Box<Self> {
        if self.resumption.is_suspect {
            tokio::time::sleep(OTHERS_BREAK).await;
            if let Some(event) = self.drive.blames_stream() {
                self.report(event);
            }
        }
        while self.resumption.is_pending && !self.over && !self.detached {
            let reached = self.drive.step().await;
            if let Some(Reached::Stream(head)) = reached {
                self.attach(head);
            }
            self.perform_all();
        }
        self
    }

    /// Goes on with the stream of the rest.
    fn attach(&mut self, head: Response<upstream::Body>) {
        let now = Instant::now();
        self.incoming = Some(head.into_body());
        self.splitter = Splitter::default();
        (self.read_at, self.event_at, self.begun) = (now, now, false);
        self.resumption.is_pending = false;
        self.resumption.moving.changes_worker();
        self.drive.runs.answering.failure = None;
        if let Some(cached) = self.resumption.seam.as_ref().and_then(|seam| seam.cached_tokens) {
            // The prefill of the rest found the first one's prompt in a cache.
            self.drive.cached_tokens = Some(cached);
        }
        if !self.resumption.moving.is_under_way() {
            self.drive.note_continued("continued");
        }
        let next = self.next_moment();
        self.timer.as_mut().reset(next);
    }

    /// The rest of the answer ended in its prefill leg.
    pub(super) fn take_prefill_answer(&mut self) {
        let (Some(whole), Some(seam)) = (self.drive.whole.take(), &mut self.resumption.seam) else { return };
        let (events, problem) = seam.join(whole.body());
        self.out.extend_from_slice(&events);
        if let Some(problem) = problem {
            self.fail_client(&CallError::Protocol(problem).into());
            return;
        }
        (self.closed, self.finish_seen, self.resumption.is_pending) = (true, true, false);
        if !self.move_succeeded() {
            self.drive.note_continued("continued");
        }
    }

    /// Returns the error of a stream, with what the client got if it was to be continued.
    pub(super) fn cause_with_delivered(&mut self, cause: ApiError) -> ApiError {
        let Some(first) = self.resumption.cause.take() else { return cause };
        let was_pending = std::mem::take(&mut self.resumption.is_pending);
        let was_moving = self.move_failed();
        if was_pending && !was_moving {
            self.drive.note_continued("failed");
        }
        if !was_pending || was_moving || cause == ApiError::Deadline {
            let delivered =
                self.resumption.transcript.as_ref().and_then(|transcript| transcript.delivered().ok());
            let delivered = delivered.map_or(self.drive.account.tokens(), |delivered| delivered.tokens);
            let why = format!("the answer was being continued after: {}", first.message());
            return ApiError::NotContinued { cause: Box::new(cause), delivered, why };
        }
        let (delivered, why) = (self.resumption.delivered, cause.message());
        ApiError::NotContinued { cause: Box::new(first), delivered, why }
    }
}

impl Drive {
    /// Records the failure of the stream that is relayed. `continuable`: its rest may be generated elsewhere.
    fn stream_failed(&mut self, error: CallError, continuable: bool) -> Event {
        match self.answer_failed(error) {
            Event::Failed(leg, failed) => Event::Failed(leg, Failed { continuable, ..failed }),
            other => other,
        }
    }

    /// Begins the rest of an answer. Returns how its engine failed.
    fn begin_rest(&mut self, rest: Arc<Request>) -> ApiError {
        let cause = self.cause(self.answering());
        self.rest = Some(rest);
        // Workers joined and left since the request began.
        self.snapshot = self.state.registry.snapshot();
        tracing::info!(request = self.account.request_id, %cause, "stream is continued elsewhere");
        cause
    }

    /// Whether every worker that may get the rest of the answer can go on with it.
    fn all_engines_continue(&self) -> bool {
        let needs = self.request.endpoint == Endpoint::ChatCompletions;
        let can = |leg: Leg| {
            let snapshot = self.state.registry.snapshot();
            let mut pool = snapshot.pool(&self.request.model, leg).iter();
            pool.all(|candidate| connector_for(candidate.worker.spec()).continues_messages())
        };
        !needs || [Leg::Prefill, Leg::Decode, Leg::Aggregated].into_iter().all(can)
    }

    /// Whether the engine broke on this stream alone while it serves others: the request may be the reason,
    /// and its rest is not sent elsewhere.
    fn blames_stream(&mut self) -> Option<Event> {
        let failed = self.candidate(self.answering())?;
        if !failed.worker.broke_alone() {
            return None;
        }
        self.attempts.stop();
        let why = "the engine goes on with its other requests, so that this one may have broken it";
        let error = || Some(ApiError::BadUpstream(why.to_owned()));
        (self.runs.prefill.failure, self.runs.answering.failure) = (error(), error());
        Some(Event::Unroutable)
    }

    /// Counts a stream whose engine failed, by what followed.
    pub(super) fn note_continued(&self, result: &'static str) {
        self.state.metrics.continued(result, "failure");
    }

    /// Counts a stream that is not continued, and tells its record why.
    fn not_continued(&mut self, reason: Reason) {
        self.note_continued(reason);
        self.account.not_continued(reason);
    }
}

/// Whether a failure within a stream says that its engine does not go on with it, so that another one may.
fn says_that_the_engine_is_down(error: &CallError) -> bool {
    match error {
        CallError::Broken(_) | CallError::Down => true,
        // The worker made no progress. Otherwise it works on others, and this request may be the reason.
        CallError::Timeout(silence) => silence.key == "event_idle",
        CallError::Status { .. } => !error.is_refusal(),
        CallError::Connect(_) | CallError::Shortage(_) | CallError::Protocol(_) => false,
    }
}
