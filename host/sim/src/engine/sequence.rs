//! A sequence from submission to its last token.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Engine, steps::Ticket};
use crate::{
    core::{Job, JobId, Output, Prompt, PromptKv},
    failure::Failure,
};

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Length,
    Stop,
    Abort,
}

/// Output of a sequence.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) prompt: Prompt,
    /// Number of this output among the outputs of the same prompt.
    pub(crate) choice: u32,
    /// Index in the response.
    pub(crate) index: u32,
    /// Number of words; 0 for an immediate EOS.
    pub(crate) words: u32,
    pub(crate) finish: Finish,
    /// Whether the answer stalls: the sequence keeps its blocks until the client disconnects.
    pub(crate) stalls: bool,
}

/// A token, or the end of a sequence without a token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub(crate) index: u32,
    pub(crate) text: &'static str,
    pub(crate) token: Option<u32>,
    pub(crate) finish: Option<Finish>,
    /// Number of tokens so far, including this one.
    pub(crate) completion: u32,
    /// Number of prompt tokens that were not computed by this engine.
    pub(crate) cached: u32,
    /// Handoff parameters for the response, as JSON; only with the last token.
    pub(crate) params: Option<String>,
}

/// Source of a prompt's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Compute,
    /// Transferred from another engine, with or without the first token.
    Transfer {
        first_token: bool,
    },
}

/// A finished sequence that still holds its blocks.
pub(crate) struct Given<'a> {
    pub(crate) job: JobId,
    pub(crate) prompt: &'a Prompt,
    pub(crate) cached: u32,
    pub(crate) finish: Finish,
}

/// A sequence's part of a handoff. One implementation per protocol.
pub(crate) trait Link: Send {
    /// Returns where the KV of the prompt comes from.
    fn kv(&self) -> PromptKv {
        PromptKv::Computed
    }

    /// Returns how many of the prompt's tokens are transferred if the cache of this engine had `cached` of
    /// them when it allocated the sequence's blocks.
    fn transferred(&self, isl: u32, _cached: u32) -> u32 {
        isl
    }

    /// Returns whether another engine reads the KV after the last token.
    fn gives(&self) -> bool {
        false
    }

    /// Returns whether [`Link::arrive`] must finish before the sequence is submitted.
    fn defers(&self) -> bool {
        false
    }

    /// Returns whether [`Link::fetch`] determines the status, so that the headers wait for it.
    fn decides_status(&self) -> bool {
        false
    }

    /// Runs before the sequence is submitted.
    fn arrive(&mut self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Runs after admission. Determines the source of the KV and pulls the KV. `transfer` is the duration of
    /// the transfer.
    fn fetch<'a>(
        &'a mut self,
        prompt: &'a Prompt,
        transfer: Duration,
    ) -> BoxFuture<'a, Result<Source, Failure>>;

    /// Runs after the last token. Hands over the KV. Returns handoff parameters for the response, as JSON.
    fn give<'a>(&'a mut self, given: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>>;
}

/// A sequence without a handoff.
pub(crate) struct Local;

impl Link for Local {
    fn fetch<'a>(&'a mut self, _: &'a Prompt, _: Duration) -> BoxFuture<'a, Result<Source, Failure>> {
        Box::pin(std::future::ready(Ok(Source::Compute)))
    }

    fn give<'a>(&'a mut self, _: Given<'a>) -> BoxFuture<'a, Result<Option<String>, Failure>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// A sequence in the engine. Dropping it frees its resources at any point.
pub(crate) struct Sequence {
    engine: Arc<Engine>,
    plan: Plan,
    /// Tokens that were not sent yet.
    output: Output,
    link: Box<dyn Link>,
    ticket: Option<Ticket>,
    stop: CancellationToken,
    source: Option<(Source, Duration)>,
    sent: u32,
    cached: u32,
    params: Option<String>,
    over: bool,
    /// Time of the last token; before the first one, of the submission.
    last: Instant,
}

impl Sequence {
    /// Submits the sequence, after its link has arrived if the protocol requires it.
    pub(crate) fn submit(
        engine: &Arc<Engine>,
        plan: Plan,
        link: Box<dyn Link>,
        stop: CancellationToken,
    ) -> Result<Self, Failure> {
        let mut sequence = Self {
            engine: Arc::clone(engine),
            output: plan.prompt.output(plan.choice),
            plan,
            link,
            ticket: None,
            stop,
            source: None,
            sent: 0,
            cached: 0,
            params: None,
            over: false,
            last: Instant::now(),
        };
        if !sequence.link.defers() {
            sequence.take_place()?;
        }
        Ok(sequence)
    }

    pub(crate) fn decides_status(&self) -> bool {
        self.link.decides_status()
    }

    /// Runs until the KV is available or is being transferred. If the sequence is aborted meanwhile,
    /// [`Sequence::next`] reports it.
    pub(crate) async fn prepare(&mut self) -> Result<(), Failure> {
        let stop = self.stop.clone();
        tokio::select! {
            biased;
            () = stop.cancelled() => Ok(()),
            ready = self.ready() => ready,
        }
    }

    /// Returns the next token; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<Result<Step, Failure>> {
        if self.over {
            return None;
        }
        let stop = self.stop.clone();
        let step = tokio::select! {
            biased;
            () = stop.cancelled() => Ok(self.step("", None, Some(Finish::Abort))),
            step = self.advance() => step,
        };
        if step.as_ref().map_or(true, |step| step.finish.is_some()) {
            self.over = true;
            self.ticket = None;
        }
        Some(step)
    }

    fn take_place(&mut self) -> Result<(), Failure> {
        let Plan { prompt, choice, words, stalls, .. } = &self.plan;
        let tokens = prompt.with_answer(*choice, *words);
        let job = Job {
            chain: prompt.chain_with_answer(self.engine.config.block_size, &tokens).into(),
            tokens: tokens.into(),
            objects: prompt.objects(),
            isl: prompt.isl(),
            out: (*words).max(1),
            kv: self.link.kv(),
            keeps_blocks: *stalls || self.link.gives(),
        };
        self.ticket = Some(self.engine.submit(&job)?);
        Ok(())
    }

    async fn ready(&mut self) -> Result<(), Failure> {
        if self.source.is_some() {
            return Ok(());
        }
        if self.ticket.is_none() {
            self.link.arrive().await?;
            self.take_place()?;
        }
        let Some(ticket) = &mut self.ticket else { return Err(Failure::engine_dead()) };
        let cached = ticket.admitted().await.ok_or_else(Failure::engine_dead)?;
        let isl = self.plan.prompt.isl();
        let transfer = match self.link.kv() {
            PromptKv::Awaited => {
                let tokens = self.link.transferred(isl, cached);
                self.engine.with_core(|core| core.transfer(tokens))
            }
            _ => Duration::ZERO,
        };
        let source = self.link.fetch(&self.plan.prompt, transfer).await?;
        // A decode engine reports 0 cached tokens after a transfer, even if it had some.
        self.cached = if source == Source::Compute { cached } else { 0 };
        self.source = Some((source, transfer));
        Ok(())
    }

    async fn advance(&mut self) -> Result<Step, Failure> {
        self.ready().await?;
        let Some(ticket) = &mut self.ticket else { return Err(Failure::engine_dead()) };
        if let (0, Some((Source::Transfer { first_token }, transfer))) = (self.sent, self.source) {
            self.engine.clock.sleep(transfer).await;
            ticket.receive(first_token);
        }
        ticket.token(self.sent + 1).await.ok_or_else(Failure::engine_dead)?;
        let id = ticket.id;
        let (counters, since) = (&self.engine.counters, self.last.elapsed());
        self.last += since;
        if self.sent == 0 {
            counters.first_token(since)
        } else {
            counters.interval(since)
        }
        self.sent += 1;
        let last = self.sent >= self.plan.words.max(1);
        if last {
            self.finish(id).await?;
        }
        let finish = last.then_some(self.plan.finish);
        if self.plan.words == 0 {
            return Ok(self.step("", None, finish));
        }
        let Some((text, token)) = self.output.next() else { return Err(Failure::engine_dead()) };
        Ok(self.step(text, Some(token), finish))
    }

    async fn finish(&mut self, job: JobId) -> Result<(), Failure> {
        let (finish, cached) = (self.plan.finish, self.cached);
        let given = Given { job, prompt: &self.plan.prompt, cached, finish };
        self.params = self.link.give(given).await?;
        Ok(())
    }

    fn step(&mut self, text: &'static str, token: Option<u32>, finish: Option<Finish>) -> Step {
        Step {
            index: self.plan.index,
            text,
            token,
            finish,
            completion: self.sent,
            cached: self.cached,
            params: self.params.take(),
        }
    }
}
