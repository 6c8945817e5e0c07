//! Changes of sequences between steps: KV arrives from another engine, a sequence leaves, and blocks are
//! released after another engine has read them.

use super::{
    BatchEngine,
    sequence::{Running, Token},
};
use crate::core::block_pool::BlockId;

impl BatchEngine {
    /// Adds an admitted sequence to the batch, after the KV that it awaited has arrived. Returns the first
    /// token if the transfer contains it.
    pub fn receive(&mut self, tag: u64, first_token: bool) -> Option<Token> {
        let place = self.fetching.iter().position(|fetching| fetching.sequence.tag == tag)?;
        let mut arrived = self.fetching.remove(place);
        if !first_token {
            self.running.push(arrived);
            return None;
        }
        (arrived.produced, arrived.computed) = (1, arrived.sequence.isl);
        let token = Token { tag, number: 1, last: arrived.sequence.osl <= 1 };
        if token.last {
            self.end(arrived);
        } else {
            self.running.push(arrived);
        }
        Some(token)
    }

    /// Adds every admitted sequence to the batch, as if the KV that it awaits had arrived. For predictions on
    /// a copy of the engine.
    pub fn receive_all(&mut self) {
        self.running.append(&mut self.fetching);
    }

    /// Releases the blocks of a sequence after its last token, or keeps them for another engine.
    pub(super) fn end(&mut self, ended: Running) {
        if ended.sequence.keeps_blocks {
            self.pinned.insert(ended.sequence.tag, ended.blocks);
        } else {
            self.pool.release(&ended.blocks);
        }
    }

    /// Removes a sequence in any phase and releases its blocks.
    pub fn leave(&mut self, tag: u64) {
        let is = |one: &Running| one.sequence.tag == tag;
        self.waiting.retain(|one| !is(one));
        for list in [&mut self.running, &mut self.fetching] {
            if let Some(place) = list.iter().position(is) {
                let gone = list.remove(place);
                self.pool.release(&gone.blocks);
            }
        }
        self.unpin(tag);
    }

    /// Releases the blocks of a finished prefill, after another engine has read them or its lease ended.
    pub fn unpin(&mut self, tag: u64) {
        if let Some(blocks) = self.pinned.remove(&tag) {
            self.pool.release(&blocks);
        }
    }

    /// Returns the blocks of a finished prefill's prompt, and releases its other blocks. The caller has to
    /// release the returned blocks.
    pub fn take_pinned(&mut self, tag: u64, prompt_tokens: u32) -> Option<Vec<BlockId>> {
        let mut blocks = self.pinned.remove(&tag)?;
        let prompt = prompt_tokens.div_ceil(self.limits.block_size) as usize;
        let rest = blocks.split_off(prompt.min(blocks.len()));
        self.pool.release(&rest);
        Some(blocks)
    }

    /// Releases blocks that [`Self::take_pinned`] returned.
    pub fn release(&mut self, blocks: &[BlockId]) {
        self.pool.release(blocks);
    }
}
