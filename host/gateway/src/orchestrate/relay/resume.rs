//! Continues a stream whose engine failed: decides whether that is safe, finds workers for the rest of the
//! answer, and joins their events to the client's stream (I14).

use std::pin::pin;

use http::Response;
use pointsman_orchestration::{Event, Failed};
use pointsman_workers::Leg;
use tokio::time::Instant;

use super::{
    Relay,
    eligible::OFF,
    moves::Moving,
    seam::{Began, Seam},
};
use crate::{
    connectors::{Connector, connector_for},
    openai::{
        chunk::Reason,
        continuation::{self, Form, Rest},
        error::ApiError,
        request::Endpoint,
        sse::Splitter,
        transcript::Transcript,
    },
    orchestrate::{Drive, executor::Reached},
    upstream::{self, CallError},
};

/// The engine broke on this stream alone: its request may be the reason.
const ALONE: Reason = "alone";

/// What a relay keeps to continue its stream.
pub(super) struct Resumption {
    /// What the client has, or why the stream is never continued.
    pub(super) transcript: Result<Box<Transcript>, Reason>,
    /// The request for the rest, until the legs are to send it.
    pub(super) rest: Option<Box<Rest>>,
    /// Where the continuation begins.
    pub(super) seam: Option<Seam>,
    /// How the engine failed.
    pub(super) cause: Option<ApiError>,
    /// Output tokens that the client had then.
    delivered: u32,
    /// Whether the engine may have broken on this stream alone.
    pub(super) is_suspect: bool,
    /// Whether it has.
    is_blamed: bool,
    /// Workers for the rest are being found; none of its events arrived.
    pub(super) is_pending: bool,
    pub(super) moving: Moving,
}

impl Resumption {
    pub(super) fn of(drive: &Drive) -> Self {
        let is_chat = drive.request.endpoint == Endpoint::ChatCompletions;
        let transcript = drive.form.and_then(|form| {
            let ids = match form {
                Form::Text(why) => Err(why),
                Form::Exact(stop) => Ok(stop),
            };
            Transcript::new(is_chat, ids, &drive.state.transcripts).ok_or("memory")
        });
        Self {
            transcript,
            rest: None,
            seam: None,
            cause: None,
            delivered: 0,
            is_suspect: false,
            is_blamed: false,
            is_pending: false,
            moving: Moving::default(),
        }
    }

    /// Removes the transcript: no client reads the stream.
    pub(super) fn forget_transcript(&mut self) {
        self.transcript = Err(OFF);
    }
}

impl Relay {
    /// Whether workers for the rest of the answer have to be found. Comments may follow then, so the client
    /// first gets the whole event before them.
    pub(super) fn is_to_be_continued(&self) -> bool {
        self.resumption.is_pending && !self.over && !self.detached && self.out.is_empty()
    }

    /// Ends the leg that answers. The rest of the answer is generated elsewhere where that is safe.
    pub(super) fn fail(&mut self, error: CallError) {
        self.stop_reading();
        self.move_arrived();
        let is_whole = self.client_has_nothing();
        if is_whole {
            self.drive.legs.begin_again();
        }
        // The legs of a rest without a token are retried with the request that they have. Its failure is
        // counted when no worker generates it.
        let again = (is_whole || self.resumption.seam.is_some()) && self.drive.legs.awaits_rest();
        let rest = (!again).then(|| self.rest(&error));
        if let Some(Err(reason)) = &rest
            && self.is_begun()
        {
            self.drive.not_continued(reason);
        }
        self.resumption.rest = rest.and_then(Result::ok);
        // A worker that is silent to all, or down, did not break on one stream.
        let is_silent = matches!(error, CallError::Timeout(_) | CallError::Down);
        self.resumption.is_suspect = error.breaks_engine() && !is_silent;
        let event = self.drive.stream_failed(error, self.resumption.rest.is_some(), self.has_output);
        self.report(event);
        if self.resumption.rest.take().is_some() {
            self.drive.not_continued("exhausted");
        }
        let again = again && !self.over && !self.detached && self.incoming.is_none();
        (self.resumption.is_pending, self.resumption.is_suspect) =
            (self.resumption.is_pending || again, self.resumption.is_suspect && !again);
    }

    /// Whether the stream is to be continued, and the client has nothing of the rest.
    fn rest_is_due(&self) -> bool {
        self.resumption.seam.as_ref().is_some_and(|seam| !seam.has_begun())
    }

    /// Whether the client reads a stream that has a token and could be continued.
    pub(super) fn is_begun(&self) -> bool {
        let reads = !self.detached && !self.drive.gone.is_cancelled();
        let is_off = matches!(self.resumption.transcript, Err(OFF));
        reads && !is_off && self.drive.account.tokens() > 0
    }

    /// Returns the request for the rest of the answer.
    fn rest(&self, error: &CallError) -> Result<Box<Rest>, Reason> {
        if !self.is_begun() {
            return Err("not_begun");
        }
        let transcript = self.resumption.transcript.as_ref().map_err(|reason| *reason)?;
        if self.finish_seen {
            return Err("finished");
        }
        if !says_that_the_engine_is_down(error) {
            return Err(error.kind());
        }
        self.safe_rest(transcript)
    }

    /// Returns the request for the rest of an answer of which the client got this.
    pub(super) fn safe_rest(&self, transcript: &Transcript) -> Result<Box<Rest>, Reason> {
        let mut delivered = transcript.delivered()?;
        if self.drive.wants_ids() && !self.drive.all_engines(|engine| engine.takes_token_ids()) {
            delivered.ids = Err("engine");
        }
        let bodies = &self.drive.state.body_bytes;
        let rest = continuation::rest_of(&self.drive.request, &delivered, bodies)?;
        let is_chat = rest.request.endpoint == Endpoint::ChatCompletions;
        // Engines that take token ids continue messages, too.
        if is_chat && !self.drive.all_engines(|engine| engine.continues_messages()) {
            return Err("engine");
        }
        Ok(Box::new(rest))
    }

    /// From now on, the legs generate the rest of the answer.
    pub(super) fn continue_elsewhere(&mut self) {
        let Some(rest) = self.resumption.rest.take() else { return };
        let Ok(transcript) = &mut self.resumption.transcript else { return };
        let Ok(delivered) = transcript.delivered() else { return };
        let is_chat = rest.request.endpoint == Endpoint::ChatCompletions;
        self.resumption.delivered = delivered.tokens;
        let origin = rest.origin.as_ref().ok();
        self.resumption.seam = Some(Seam::new(is_chat, &delivered, origin, self.drive.cached_tokens));
        if let Some(start) = delivered.ids.ok().map(|ids| ids.start).filter(|_| origin.is_some()) {
            transcript.goes_back(start);
        }
        let failed = (!self.resumption.moving.is_under_way()).then_some(self.resumption.delivered);
        self.resumption.cause = Some(self.drive.begin_rest(rest, failed));
        self.resumption.is_pending = true;
    }

    /// Finds workers for the rest of the answer, and waits until its stream begins or the request ends.
    pub(super) async fn resume(mut self: Box<Self>) -> Box<Self> {
        let state = self.drive.state.clone();
        let mut drain_end = pin!(state.drain_end.passed());
        // The client's connection does not wake this task.
        let _ = futures_util::poll!(drain_end.as_mut());
        if self.resumption.is_suspect
            && let Some(event) = self.drive.blames_stream().await
        {
            self.resumption.is_blamed = true;
            self.report(event);
        }
        while self.resumption.is_pending && !self.over && !self.detached {
            let reached = self.drive.step().await;
            if let Some(Reached::Stream(head)) = reached {
                self.attach(head);
            }
            self.perform_all();
            // Legs of a rest that is tried again are routed as always.
            self.drive.end_plan();
        }
        self
    }

    /// Goes on with the stream of the rest.
    pub(super) fn attach(&mut self, head: Response<upstream::Body>) {
        let now = Instant::now();
        self.incoming = Some(head.into_body());
        self.splitter = Splitter::default();
        self.room_wait.end();
        (self.read_at, self.event_at) = (now, now);
        (self.begun, self.waiting, self.has_output) = (false, 0, false);
        self.resumption.is_pending = false;
        self.resumption.moving.changes_worker();
        self.resumption.seam.iter_mut().for_each(Seam::asks_again);
        self.keep_cached_tokens();
        self.tell_booking();
        self.set_timer();
    }

    /// Keeps the cached tokens of the first prefill: that of the rest found its prompt in a cache.
    pub(super) fn keep_cached_tokens(&mut self) {
        if let Some(cached) = self.resumption.seam.as_ref().and_then(|seam| seam.cached_tokens) {
            self.drive.prefill_reported(Some(cached));
        }
    }

    /// Frees the request for the rest, if there is one: its engine generates, and no other one will get it.
    pub(super) fn free_rest(&mut self) {
        self.drive.rest = None;
        self.resumption.seam.iter_mut().for_each(Seam::forget_origin);
    }

    /// Records from what the rest of the answer began, once its engine told.
    pub(super) fn note_origin(&mut self) {
        let Some(began) = self.resumption.seam.as_mut().and_then(Seam::began) else { return };
        let is_move = self.resumption.moving.is_under_way();
        if began == Began::Text
            && let Ok(transcript) = &mut self.resumption.transcript
        {
            transcript.forget_ids();
        }
        if is_move {
            return;
        }
        if began == Began::Tokens {
            self.drive.note_continued("continued_exact", None);
            return;
        }
        let why = self.drive.rest.as_ref().map(|rest| rest.origin.as_ref().err().unwrap_or(&"engine"));
        self.drive.note_continued("continued", why.copied());
    }

    /// The rest of the answer ended in its prefill leg.
    pub(super) fn take_prefill_answer(&mut self) {
        let Some(whole) = self.drive.whole.take() else { return };
        // What failed before was retried.
        self.drive.runs.answering.failure = None;
        let Some(seam) = &mut self.resumption.seam else {
            // The client has nothing yet: this is the whole answer.
            self.out.extend_from_slice(whole.body());
            (self.closed, self.finish_seen, self.resumption.is_pending) = (true, true, false);
            return;
        };
        let (events, problem) = seam.join(whole.body());
        self.out.extend_from_slice(&events);
        if let Some(problem) = problem {
            self.fail_client(problem.into());
            return;
        }
        self.note_origin();
        (self.closed, self.finish_seen, self.resumption.is_pending) = (true, true, false);
        self.move_succeeded();
    }

    /// Returns the error of a stream, with what the client got if it was to be continued.
    pub(super) fn cause_with_delivered(&mut self, cause: ApiError) -> ApiError {
        let Some(first) = self.resumption.cause.take() else { return cause };
        let was_pending = std::mem::take(&mut self.resumption.is_pending);
        let was_moving = self.move_failed();
        if (was_pending || self.rest_is_due()) && !was_moving {
            self.drive.rest_failed(self.resumption.is_blamed, &cause);
        }
        if !was_pending || was_moving || matches!(cause, ApiError::Deadline | ApiError::Draining) {
            let transcript = self.resumption.transcript.as_ref().ok();
            let delivered = transcript.and_then(|transcript| transcript.delivered().ok());
            let delivered = delivered.map_or(self.drive.account.tokens(), |delivered| delivered.tokens);
            // Tokens may be generated again.
            let delivered = delivered.max(self.resumption.delivered);
            let why = format!("the answer was being continued after: {}", first.message());
            return ApiError::NotContinued { cause: Box::new(cause), delivered, why };
        }
        let (delivered, why) = (self.resumption.delivered, cause.message());
        ApiError::NotContinued { cause: Box::new(first), delivered, why }
    }
}

impl Drive {
    /// Records the failure of the stream that is relayed. `continuable`: its rest may be generated elsewhere.
    /// `has_output`: the engine began, also if it refuses the request now.
    fn stream_failed(&mut self, error: CallError, continuable: bool, has_output: bool) -> Event {
        let began = has_output || error.began();
        match self.note_failed_leg(self.answering(), error, began) {
            Event::Failed(leg, failed) => Event::Failed(leg, Failed { continuable, ..failed }),
            other => other,
        }
    }

    /// Begins the rest of an answer. `failed`: its engine failed when the client had this many tokens.
    /// Returns how.
    fn begin_rest(&mut self, rest: Box<Rest>, failed: Option<u32>) -> ApiError {
        let cause = self.cause(self.answering());
        failed.into_iter().for_each(|delivered| self.account.stream_failed(delivered));
        if let Ok(origin) = &rest.origin {
            self.account.generates_again(origin.kept);
        }
        self.rest = Some(rest);
        // Workers joined and left since the request began.
        self.snapshot = self.state.registry.snapshot();
        tracing::info!(request = self.account.request_id, %cause, "stream is continued elsewhere");
        cause
    }

    /// Whether every worker that may get the rest of the answer can do this.
    fn all_engines(&self, can: impl Fn(&dyn Connector) -> bool) -> bool {
        let snapshot = self.state.registry.snapshot();
        [Leg::Prefill, Leg::Decode, Leg::Aggregated].into_iter().all(|leg| {
            let mut pool = snapshot.pool(&self.request.model, leg).iter();
            pool.all(|candidate| can(connector_for(candidate.worker.spec())))
        })
    }

    /// Whether the engine broke on this stream alone while it serves others: the request may be the reason,
    /// and its rest is not sent elsewhere.
    async fn blames_stream(&mut self) -> Option<Event> {
        let failed = self.candidate(self.answering())?.worker.clone();
        if !failed.broke_alone().await {
            return None;
        }
        self.attempts.stop();
        let why = "the engine continues with its other requests, so this one may have broken it";
        let error = || Some(ApiError::BadUpstream(why.to_owned()));
        (self.runs.prefill.failure, self.runs.answering.failure) = (error(), error());
        Some(Event::Unroutable)
    }

    /// Records that no worker generated the rest of an answer. `is_blamed`: none was asked, because the
    /// request may have broken its engine.
    fn rest_failed(&mut self, is_blamed: bool, cause: &ApiError) {
        let (result, why) = if is_blamed { (ALONE, None) } else { ("failed", Some(cause.code())) };
        self.note_continued(result, why);
        self.account.not_continued(result);
        tracing::warn!(
            request = self.account.request_id,
            reason = result,
            %cause,
            "stream ended: its rest was not generated elsewhere"
        );
    }

    /// Counts a stream whose engine failed, by what followed, and tells its record. `why`: it was continued
    /// from text and not from token ids, or failed with this code.
    fn note_continued(&mut self, result: &'static str, why: Option<Reason>) {
        self.state.metrics.continued(result, "failure");
        self.account.stream_followed(result, why);
    }

    /// Counts a stream that is not continued, and tells its record why.
    fn not_continued(&mut self, reason: Reason) {
        self.account.stream_failed(self.account.tokens());
        self.note_continued(reason, None);
        self.account.not_continued(reason);
    }
}

/// Whether a failure within a stream says that its engine does not continue with it, so that another one may.
fn says_that_the_engine_is_down(error: &CallError) -> bool {
    match error {
        CallError::Closed(_)
        | CallError::Broken(_)
        | CallError::GaveUp(_)
        | CallError::Down
        | CallError::Asleep => true,
        // The worker made no progress. Otherwise it works on others, and this request may be the reason.
        CallError::Timeout(silence) => silence.key == "event_idle",
        CallError::Status { .. } => !error.is_refusal() || error.refusal().is_some(),
        CallError::Connect(_)
        | CallError::Shortage(_)
        | CallError::Protocol(_)
        | CallError::TooLarge(_)
        | CallError::NoRoom(_)
        | CallError::OtherPrompt => false,
    }
}
