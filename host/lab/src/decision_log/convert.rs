//! Turns logged requests into a trace.

use std::{collections::HashMap, time::Duration};

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
}

/// A request of the trace whose blocks have no numbers yet.
struct Kept {
    arrived_at_us: u64,
    ended_at_us: u64,
    request: LoggedRequest,
    block_tokens: u32,
}

/// Collects the requests of a trace.
#[derive(Default)]
pub(super) struct Converter {
    kept: Vec<Kept>,
    pub(super) left_out: LeftOut,
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
        } else {
            let took = Duration::try_from_secs_f64(request.outcome.e2e_ms / 1e3).unwrap_or_default();
            let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
            self.kept.push(Kept {
                arrived_at_us: request.arrived_at_us,
                ended_at_us: request.arrived_at_us.saturating_add(took_us),
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
        let mut numbers = Numbers::default();
        // Time at which the newest request of each session ended.
        let mut ends: HashMap<u64, u64> = HashMap::new();
        let mut requests = Vec::with_capacity(self.kept.len());
        for kept in self.kept {
            let blocks = numbers.blocks(&kept, block_tokens);
            let LoggedRequest { model, session_hash, .. } = kept.request;
            let before = session_hash.and_then(|session| {
                let latest = ends.get(&session).copied().unwrap_or_default();
                ends.insert(session, kept.ended_at_us.max(latest))
            });
            // A request that arrived before the previous one ended did not wait for it.
            let delay = before.and_then(|before| kept.arrived_at_us.checked_sub(before));
            requests.push(TraceRequest {
                at: Duration::from_micros(kept.arrived_at_us),
                input_tokens: kept.request.input_tokens,
                output_tokens: kept.request.output_tokens.max(1),
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

/// Numbers blocks in the order in which they appear: the trace contains no id of the log.
#[derive(Default)]
struct Numbers {
    known: HashMap<(u64, u32), u64>,
    next: u64,
}

impl Numbers {
    /// Returns the numbers of a prompt's blocks. A block gets its number from the first logged id at or after
    /// its end. Blocks after the last id, and a partial block at the end, are not shared with any request.
    fn blocks(&mut self, kept: &Kept, block_tokens: u32) -> Vec<u64> {
        let tokens = kept.request.input_tokens;
        let own_blocks = block_tokens / kept.block_tokens.max(1);
        let mut marks = kept.request.blocks.marks().peekable();
        let full = tokens / block_tokens;
        let mut blocks = Vec::with_capacity(tokens.div_ceil(block_tokens) as usize);
        for position in 1..=full {
            let depth = position.saturating_mul(own_blocks);
            while marks.next_if(|(mark, _)| *mark < depth).is_some() {}
            let name = marks.peek().map(|(mark, id)| (*id, mark - depth));
            blocks.push(match name {
                Some(name) => *self.known.entry(name).or_insert_with(|| {
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
