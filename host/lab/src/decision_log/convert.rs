//! Turns logged requests into a trace.

use std::{
    collections::{HashMap, hash_map::Entry},
    time::Duration,
};

use pointsman_decision_log::{FileHeader, LoggedRequest};

use crate::trace::{Targets, Trace, TraceRequest};

/// Requests that were left out of a trace, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LeftOut {
    /// Requests of another model, or from another time.
    pub(super) filtered: u64,
    /// Requests without a chosen worker: their answers are not known.
    pub(super) unserved: u64,
    /// Requests that failed before the first token.
    pub(super) failed: u64,
    /// Records without prompt tokens, such as those of WebSocket sessions.
    pub(super) no_prompt: u64,
    /// Requests with several prompts: the length of each is not known.
    pub(super) several_prompts: u64,
}

/// Requests of a trace that are not exactly those of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Inexact {
    /// Prompts whose length was estimated from bytes.
    pub(super) estimated: u64,
    /// Requests with several choices, of which the trace has one.
    pub(super) several_choices: u64,
    /// Answers without output tokens, which have one in the trace.
    pub(super) no_output: u64,
}

/// A request of the trace whose blocks have no numbers yet.
struct Kept {
    arrived_at_us: u64,
    ended_at_us: u64,
    request: LoggedRequest,
    /// Prompt tokens, as the engine reported them if it did.
    prompt_tokens: u32,
    /// Tokens of a logged block.
    block_tokens: u32,
}

/// Collects the requests of a trace.
#[derive(Default)]
pub(super) struct Converter {
    kept: Vec<Kept>,
    pub(super) left_out: LeftOut,
    pub(super) inexact: Inexact,
}

impl Converter {
    /// Adds a request, unless a rule leaves it out.
    pub(super) fn add_request(&mut self, header: &FileHeader, request: LoggedRequest) {
        let left_out = &mut self.left_out;
        let chosen = request.decisions.iter().any(|decision| decision.worker.is_some());
        if !chosen {
            left_out.unserved += 1;
        } else if request.outcome.status >= 400 && request.output_tokens == 0 {
            left_out.failed += 1;
        } else if request.input_tokens == 0 {
            left_out.no_prompt += 1;
        } else if request.prompts.is_some() {
            left_out.several_prompts += 1;
        } else {
            let counted = request.counted_tokens();
            self.inexact.estimated += u64::from(counted.is_none());
            self.inexact.several_choices += u64::from(request.choices.is_some());
            self.inexact.no_output += u64::from(request.output_tokens == 0);
            let took = Duration::try_from_secs_f64(request.outcome.e2e_ms / 1e3).unwrap_or_default();
            let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
            self.kept.push(Kept {
                arrived_at_us: request.arrived_at_us,
                ended_at_us: request.arrived_at_us.saturating_add(took_us),
                prompt_tokens: counted.unwrap_or(request.input_tokens),
                block_tokens: header.block_tokens,
                request,
            });
        }
    }

    /// Returns the largest block size of the requests.
    pub(super) fn largest_block(&self) -> Option<u32> {
        self.kept.iter().map(|kept| kept.block_tokens).max()
    }

    /// Returns a block size that does not divide `block_tokens`, if there is one.
    pub(super) fn unfit_block(&self, block_tokens: u32) -> Option<u32> {
        self.kept.iter().map(|kept| kept.block_tokens).find(|own| !block_tokens.is_multiple_of(*own))
    }

    /// Builds the trace with blocks of `block_tokens`, by time of arrival.
    pub(super) fn trace(mut self, name: String, block_tokens: u32, skipped: u64) -> Trace {
        self.kept.sort_by_key(|kept| kept.arrived_at_us);
        let block_ends = BlockEnds::of(&self.kept);
        let mut numbers = Numbers::default();
        // Time at which the newest request of each session ended.
        let mut ends: HashMap<u64, u64> = HashMap::new();
        let mut requests = Vec::with_capacity(self.kept.len());
        for kept in self.kept {
            let blocks = numbers.blocks(&kept, block_tokens, &block_ends);
            let LoggedRequest { model, session_hash, .. } = kept.request;
            let before = session_hash.and_then(|session| {
                let latest = ends.get(&session).copied().unwrap_or_default();
                ends.insert(session, kept.ended_at_us.max(latest))
            });
            // A request that arrived before the previous one ended did not wait for it.
            let delay = before.and_then(|before| kept.arrived_at_us.checked_sub(before));
            let choices = kept.request.choices.unwrap_or(1).max(1);
            requests.push(TraceRequest {
                at: Duration::from_micros(kept.arrived_at_us),
                input_tokens: kept.prompt_tokens,
                output_tokens: kept.request.output_tokens.div_ceil(choices).max(1),
                blocks: blocks.into(),
                session: session_hash.map(|session| format!("{session:x}")),
                delay: delay.map(Duration::from_micros),
                parent: None,
                join: false,
                model: Some(model),
                tenant_hash: kept.request.tenant_hash,
                priority: kept.request.priority,
                targets: Targets::default(),
            });
        }
        let mut trace = Trace { name, block_tokens, requests, skipped, ..Trace::default() };
        trace.sort();
        trace
    }
}

/// End of each block of the prompts of estimated length, in the tokens that the engines counted, by id. A
/// block ends at the same token in all prompts that share it.
struct BlockEnds(HashMap<u64, u32>);

impl BlockEnds {
    /// Scales the blocks of each prompt to its length. A block that several prompts share is scaled by the
    /// shortest of them, because it is the largest part of that one.
    fn of(kept: &[Kept]) -> Self {
        let mut estimated: Vec<&Kept> = kept.iter().filter(|kept| kept.request.input_estimated).collect();
        estimated.sort_by_key(|kept| {
            let is_known = kept.request.counted_tokens().is_some();
            (!is_known, kept.prompt_tokens.max(kept.request.input_tokens))
        });
        let mut ends: HashMap<u64, u32> = HashMap::new();
        for kept in estimated {
            // End of the last shared block, as routing estimated it and in the engine's tokens.
            let (mut from, mut start) = (0, 0);
            for (depth, id) in kept.request.blocks.marks() {
                let estimate = depth.saturating_mul(kept.block_tokens);
                match ends.entry(id) {
                    Entry::Occupied(end) => (from, start) = (estimate, *end.get()),
                    Entry::Vacant(end) => {
                        let rest = u64::from(kept.prompt_tokens.saturating_sub(start));
                        let estimated_rest = u64::from(kept.request.input_tokens.saturating_sub(from));
                        let scaled = u64::from(estimate.saturating_sub(from)) * rest / estimated_rest.max(1);
                        end.insert(start.saturating_add(u32::try_from(scaled).unwrap_or(u32::MAX)));
                    }
                }
            }
        }
        Self(ends)
    }

    /// Returns where a block of a prompt ends.
    fn end(&self, kept: &Kept, depth: u32, id: u64) -> u32 {
        self.0.get(&id).copied().unwrap_or_else(|| depth.saturating_mul(kept.block_tokens))
    }
}

/// Numbers blocks in the order in which they appear: the trace contains no id of the log.
#[derive(Default)]
struct Numbers {
    /// Number of a block, by the id from which its number follows and its position in the prompt.
    known: HashMap<(u64, u32), u64>,
    next: u64,
}

impl Numbers {
    /// Returns the numbers of a prompt's blocks. A block gets its number from the first logged id at or after
    /// its end. Blocks after the last id, and a partial block at the end, are not shared with any request.
    fn blocks(&mut self, kept: &Kept, block_tokens: u32, ends: &BlockEnds) -> Vec<u64> {
        let tokens = kept.prompt_tokens;
        let marks = kept.request.blocks.marks();
        let mut marks = marks.map(|(depth, id)| (ends.end(kept, depth, id), id)).peekable();
        let full = tokens / block_tokens;
        let mut blocks = Vec::with_capacity(tokens.div_ceil(block_tokens) as usize);
        for position in 1..=full {
            let end = position.saturating_mul(block_tokens);
            while marks.next_if(|(mark, _)| *mark < end).is_some() {}
            blocks.push(match marks.peek() {
                Some((_, id)) => *self.known.entry((*id, position)).or_insert_with(|| {
                    self.next += 1;
                    self.next - 1
                }),
                None => self.unshared(),
            });
        }
        if !tokens.is_multiple_of(block_tokens) {
            blocks.push(self.unshared());
        }
        blocks
    }

    fn unshared(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }
}
