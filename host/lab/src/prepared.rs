//! The parts of a trace that do not depend on the arm: hashes of prompts, and the token ids of each block.

use std::sync::Arc;

use pointsman_routing::AgentProgram;
use pointsman_workers::{BlockHash, name_hash};
use prefix_index::{Prefix, Salt, block_hashes};

use crate::trace::{Trace, TraceRequest};

/// A request with its hashes.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    /// Block hashes as routing sees the prompt.
    pub(crate) prefix: Prefix,
    /// The same hashes for the engines. The router does not compare them with its own.
    pub(crate) chain: Arc<[u64]>,
    /// Salted hash of the session.
    pub(crate) session_hash: Option<u64>,
    /// The session's place in an agent program.
    pub(crate) program: Option<Box<AgentProgram>>,
}

/// Hashes the prompts of a trace. `block_tokens` is the block size of engines and routing.
pub(crate) fn prepare(trace: &Trace, block_tokens: u32) -> Vec<Prepared> {
    let mut tokens = Vec::new();
    let requests = (0_u64..).zip(&trace.requests);
    requests
        .map(|(number, request)| {
            prompt_tokens(request, number, trace.block_tokens, &mut tokens);
            let hashes = block_hashes(&tokens, block_tokens as usize, &Salt::default());
            let chain = hashes.iter().map(|BlockHash(hash)| *hash).collect();
            let hash = |name: &Option<String>| name.as_ref().map(|name| name_hash(name.as_bytes(), 0));
            let (session_hash, parent) = (hash(&request.session), hash(&request.parent));
            let program = session_hash.map(|session| {
                Box::new(AgentProgram { session, parent, hash: session, ..AgentProgram::default() })
            });
            Prepared { prefix: hashes.into(), chain, session_hash, program }
        })
        .collect()
}

impl Trace {
    /// Returns the token ids of a request's prompt, for a real engine, which then shares the blocks that are
    /// shared in the trace. Empty when the trace has no such request.
    #[must_use]
    pub fn prompt_token_ids(&self, number: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        if let Some(request) = self.requests.get(number) {
            prompt_tokens(request, number as u64, self.block_tokens, &mut tokens);
        }
        tokens
    }
}

/// Fills `tokens` with the token ids of a prompt. Equal blocks have equal tokens; only their identity
/// matters.
fn prompt_tokens(request: &TraceRequest, number: u64, block_tokens: u32, tokens: &mut Vec<u32>) {
    let length = request.input_tokens as usize;
    tokens.clear();
    for block in request.blocks.iter() {
        let end = (tokens.len() + block_tokens as usize).min(length);
        tokens.resize(end, fold(*block));
    }
    tokens.resize(length, unshared(number));
}

/// Returns the token of a request's blocks that have no id, and that no other request shares.
fn unshared(number: u64) -> u32 {
    fold(number ^ 0x756e_6971_7565)
}

/// Appends the token ids of one engine block of a prompt.
pub(crate) fn block_token_ids(
    request: &TraceRequest,
    number: u64,
    trace_block: u32,
    engine_block: u32,
    position: u32,
    out: &mut Vec<u32>,
) {
    let from = u64::from(position) * u64::from(engine_block);
    let id_of = |token: u64| {
        let block = usize::try_from(token / u64::from(trace_block.max(1))).unwrap_or(usize::MAX);
        request.blocks.get(block).map_or_else(|| unshared(number), |block| fold(*block))
    };
    if trace_block.is_multiple_of(engine_block) {
        out.resize(out.len() + engine_block as usize, id_of(from));
        return;
    }
    out.extend((from..from + u64::from(engine_block)).map(id_of));
}

/// Folds a block's id to a token id. Ids of a trace are small, so two different ids of one trace stay
/// different.
fn fold(id: u64) -> u32 {
    (id ^ (id >> 32)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_s_tokens_hash_to_the_prompt_s_blocks() {
        for (trace_block, engine_block) in [(512, 512), (512, 16), (64, 128)] {
            let request =
                TraceRequest { input_tokens: 1_100, blocks: (0..18).collect(), ..TraceRequest::default() };
            let trace = Trace { block_tokens: trace_block, requests: vec![request], ..Trace::default() };
            let prepared = prepare(&trace, engine_block);
            let first = trace.requests.first().unwrap();
            let mut tokens = Vec::new();
            let blocks = 1_100 / engine_block;
            (0..blocks).for_each(|at| block_token_ids(first, 0, trace_block, engine_block, at, &mut tokens));
            let hashes = block_hashes(&tokens, engine_block as usize, &Salt::default());
            let chain: Vec<u64> = hashes.iter().map(|hash| hash.0).collect();
            assert_eq!(chain, prepared.first().unwrap().chain.to_vec(), "{trace_block} {engine_block}");
        }
    }
}
