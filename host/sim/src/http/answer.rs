//! Formats sequences as a complete body or as a stream of events, with the faults that damage a body.

use std::{collections::VecDeque, io, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::{
    StreamExt,
    stream::{self, BoxStream, SelectAll},
};

use super::{json, refuse_as};
use crate::{
    engine::{AbortGuard, Engine, Finish, InFlight, Outcome, Sequence, Step, monotonic_nanos},
    failure::Failure,
    faults::Break,
    wire::{Choice, Meta, Shape, Usage},
};

pub(super) const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Time in which the bytes before a cut are sent, because a failed body loses the bytes that are not flushed.
const FLUSH: Duration = Duration::from_millis(20);

type Steps = SelectAll<BoxStream<'static, Result<Step, Failure>>>;

/// Sequences of a request in progress. Dropping this stops them all.
pub(super) struct Answer {
    engine: Arc<Engine>,
    shape: &'static dyn Shape,
    meta: Meta,
    steps: Steps,
    /// Number of tokens of each output so far.
    completion: Vec<u32>,
    /// Number of cached prompt tokens of each output.
    cached: Vec<u32>,
    /// The outputs so far, for the APIs that repeat them.
    said: Vec<Choice>,
    aborted: bool,
    _abort: AbortGuard,
}

/// A response as a stream of events.
struct Events {
    answer: Answer,
    flight: InFlight,
    broken: Option<(Break, u32)>,
    tokens: u32,
    queue: VecDeque<Bytes>,
    end: Option<End>,
}

/// What follows when the queue is empty.
#[derive(Clone, Copy)]
enum End {
    Close(Outcome),
    Cut,
}

impl Answer {
    pub(super) fn new(engine: &Arc<Engine>, meta: Meta, sequences: Vec<Sequence>, abort: AbortGuard) -> Self {
        let count = sequences.len();
        let steps = sequences.into_iter().map(|sequence| {
            stream::unfold(sequence, |mut sequence| async move {
                let step = sequence.next().await?;
                Some((step, sequence))
            })
            .boxed()
        });
        Self {
            engine: Arc::clone(engine),
            shape: engine.config.dialect.shape_of(meta.api),
            meta,
            steps: stream::select_all(steps),
            completion: vec![0; count],
            cached: vec![0; count],
            said: choices(count),
            aborted: false,
            _abort: abort,
        }
    }

    fn note(&mut self, step: &Step) {
        let at = step.index as usize;
        if let (Some(completion), Some(cached)) = (self.completion.get_mut(at), self.cached.get_mut(at)) {
            (*completion, *cached) = (step.completion, step.cached);
        }
        if let Some(said) = self.said.get_mut(at).filter(|_| self.meta.api.repeats()) {
            said.add(step);
        }
        self.aborted |= step.finish == Some(Finish::Abort);
    }

    fn outcome(&self) -> Outcome {
        if self.aborted { Outcome::Aborted } else { Outcome::Ok }
    }

    /// Returns the usage, in which each prompt counts once and every output counts.
    fn usage(&self) -> Usage {
        let size = self.engine.config.block_size;
        let per_prompt = self.cached.iter().step_by(self.meta.n.max(1) as usize);
        let full = self.meta.prompts.iter().map(|prompt| prompt.isl() / size * size);
        let created = full.zip(per_prompt.clone()).map(|(full, cached)| full.saturating_sub(*cached)).sum();
        Usage {
            prompt: self.meta.prompts.iter().map(crate::core::Prompt::isl).sum(),
            completion: self.completion.iter().sum(),
            cached: per_prompt.sum(),
            created_cache: created,
        }
    }

    /// Returns the usage in a chunk, which covers only the chunk's own output.
    fn running_usage(&self, index: u32, completion: u32) -> Option<Usage> {
        let prompt = self.meta.prompts.get((index / self.meta.n.max(1)) as usize)?;
        self.meta.continuous_usage.then_some(Usage { prompt: prompt.isl(), completion, ..Usage::default() })
    }

    pub(super) async fn whole(mut self, mut flight: InFlight, broken: Option<(Break, u32)>) -> Response {
        let mut choices = choices(self.completion.len());
        let mut params = None;
        while let Some(step) = self.steps.next().await {
            let step = match step {
                Ok(step) => step,
                Err(failure) => {
                    flight.end(outcome_of(&failure));
                    return refuse_as(self.shape, &failure);
                }
            };
            self.note(&step);
            if let Some(choice) = choices.get_mut(step.index as usize) {
                choice.add(&step);
            }
            params = params.or(step.params);
        }
        let body = self.shape.whole(&self.meta, &choices, self.usage(), params.as_deref());
        match broken {
            None => {
                flight.end(self.outcome());
                json(StatusCode::OK, body)
            }
            Some((Break::Stall, _)) => std::future::pending().await,
            Some((Break::Garbage, _)) => {
                flight.end(Outcome::Fault);
                json(StatusCode::OK, "{\"id\": <<<garbage>>>".to_owned())
            }
            Some((Break::Cut, _)) => {
                flight.end(Outcome::Fault);
                cut_body(&body)
            }
        }
    }

    pub(super) fn stream(self, flight: InFlight, broken: Option<(Break, u32)>) -> Response {
        let events = Events { answer: self, flight, broken, tokens: 0, queue: VecDeque::new(), end: None };
        let body = stream::unfold(events, |mut events| async move {
            let event = events.next().await?;
            Some((event, events))
        });
        ([(header::CONTENT_TYPE, EVENT_STREAM)], Body::from_stream(body)).into_response()
    }
}

/// Returns outputs without a token.
fn choices(count: usize) -> Vec<Choice> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    (0..count).map(|index| Choice { index, ..Choice::default() }).collect()
}

impl Events {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        loop {
            if let Some(bytes) = self.queue.pop_front() {
                // The outcome is counted together with the last bytes, because the client may disconnect as
                // soon as it receives them.
                if let (true, Some(End::Close(outcome))) = (self.queue.is_empty(), self.end) {
                    self.flight.end(outcome);
                }
                if self.answer.engine.config.stamp {
                    // hyper writes the bytes that it has when the body is not ready.
                    tokio::task::yield_now().await;
                    return Some(Ok(with_time(&bytes)));
                }
                return Some(Ok(bytes));
            }
            match self.end {
                Some(End::Close(_)) => return None,
                Some(End::Cut) => {
                    tokio::time::sleep(FLUSH).await;
                    self.flight.end(Outcome::Fault);
                    return Some(Err(io::Error::other("injected fault: cut")));
                }
                None => {}
            }
            match self.broken {
                Some((kind, after)) if self.tokens >= after => self.break_off(kind).await,
                _ => self.fill().await,
            }
        }
    }

    /// Queues the bytes of the next step.
    async fn fill(&mut self) {
        match self.answer.steps.next().await {
            Some(Ok(step)) => self.step(&step),
            Some(Err(failure)) => {
                let event = self.answer.shape.error_event(&failure);
                self.push(&event);
                if !self.answer.meta.api.is_named() {
                    self.push("[DONE]");
                }
                self.answer.steps.clear();
                self.end = Some(End::Close(outcome_of(&failure)));
            }
            None => {
                let answer = &self.answer;
                let said = answer.said.first().cloned().unwrap_or_default();
                let last = answer.shape.close(&answer.meta, answer.usage(), &said);
                last.iter().for_each(|event| self.push(event));
                self.end = Some(End::Close(self.answer.outcome()));
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let answer = &mut self.answer;
        let first = answer.completion.get(step.index as usize) == Some(&0);
        answer.note(step);
        self.tokens += u32::from(step.token.is_some());
        let (shape, meta) = (answer.shape, &answer.meta);
        let mut events = Vec::new();
        if first && meta.chat {
            events.extend(shape.open(meta, step.index, answer.running_usage(step.index, 0)));
        }
        let usage = answer.running_usage(step.index, step.completion);
        events.extend(shape.step(meta, step, first, usage));
        events.extend(answer.said.get(step.index as usize).and_then(|said| shape.repeat(meta, said)));
        events.iter().for_each(|event| self.push(event));
    }

    fn push(&mut self, data: &str) {
        self.queue.push_back(Bytes::from(self.answer.shape.frame(data)));
    }

    async fn break_off(&mut self, kind: Break) {
        match kind {
            Break::Stall => std::future::pending().await,
            Break::Garbage => {
                let garbage: [&[u8]; 3] = [b"data: {\"id\":\"cmpl-\n\n", b"\xff\xfe\x00\n\n", b"<html>"];
                self.queue.extend(garbage.map(Bytes::from_static));
                self.answer.steps.clear();
                self.end = Some(End::Close(Outcome::Fault));
            }
            Break::Cut => {
                self.fill().await;
                let event = self.queue.pop_front().unwrap_or_default();
                self.queue.clear();
                self.queue.push_back(event.slice(..event.len() / 2));
                self.answer.steps.clear();
                self.end = Some(End::Cut);
            }
        }
    }
}

/// Returns an event with the time at which it is written as its last field.
fn with_time(event: &Bytes) -> Bytes {
    match event.strip_suffix(b"}\n\n") {
        Some(open) => {
            let stamp = format!(",\"t\":\"{}\"}}\n\n", monotonic_nanos());
            Bytes::from([open, stamp.as_bytes()].concat())
        }
        None => event.clone(),
    }
}

/// Sends half of a body with the full content length, then closes the connection.
pub(super) fn cut_body(body: &str) -> Response {
    let half = Bytes::copy_from_slice(body.as_bytes().get(..body.len() / 2).unwrap_or_default());
    let failing = stream::iter([Ok(half)]).chain(stream::once(async {
        tokio::time::sleep(FLUSH).await;
        Err(io::Error::other("injected fault: cut"))
    }));
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::CONTENT_LENGTH, body.len().to_string()),
    ];
    (headers, Body::from_stream(failing)).into_response()
}

pub(super) fn outcome_of(failure: &Failure) -> Outcome {
    match failure.status {
        503 => Outcome::Refused,
        400..=499 => Outcome::Invalid,
        _ => Outcome::Failed,
    }
}
