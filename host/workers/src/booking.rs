//! Bookings: the load that a decision puts on a candidate, from its selection until the stream ends (F4).
//!
//! Dropping the [`Booking`] releases it, exactly once on every path, unless a [`BookingHandle`] did before.
//! Booked blocks are a tree of sequence hashes (`booked`) behind a short lock that only bookings on the same
//! rank share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prefix_index::Prefix;

use crate::{
    columns::{Position, RankView},
    id::Leg,
};

mod booked;
mod booked_load;
mod estimate;
mod held;
mod journal;
mod rank_blocks;
mod remote;
mod speeds;

pub use booked_load::BookingHandle;
use booked_load::{BookedLoad, BookingLoad};
pub use estimate::Estimate;
pub use held::HeldTokens;
pub(crate) use journal::RankJournal;
pub use journal::{Journal, JournalEntry, LoadValues, WorkerKey};
use rank_blocks::RankBlocks;
pub use remote::{RemoteBooking, RemoteFigures};
use speeds::Speeds;

/// Load that a decision books.
#[derive(Clone, Debug)]
pub struct BookingRequest {
    /// Leg of the request.
    pub leg: Leg,
    /// Number of prompt tokens.
    pub prompt_tokens: u32,
    /// Number of prompt tokens that are not cached on the candidate.
    pub new_prefill_tokens: u32,
    /// Prefix of the prompt.
    pub prefix: Prefix,
    /// Number of blocks of the prompt, including a partial last one.
    pub total_prompt_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Expected number of output tokens.
    pub expected_output_tokens: Option<u32>,
    /// Whether equal blocks of several bookings count once.
    pub assume_kv_reuse: bool,
    /// Whether prefill tokens count as load.
    pub track_prefill_tokens: bool,
}

impl BookingRequest {
    /// Returns a request with nothing cached whose whole prompt counts as load.
    #[must_use]
    pub fn new(leg: Leg, prefix: Prefix, prompt_tokens: u32, block_size: u32) -> Self {
        Self {
            leg,
            prompt_tokens,
            new_prefill_tokens: prompt_tokens,
            prefix,
            total_prompt_blocks: prompt_tokens.div_ceil(block_size.max(1)),
            block_size,
            expected_output_tokens: None,
            assume_kv_reuse: true,
            track_prefill_tokens: true,
        }
    }
}

/// Load booked on one rank of a worker. Its figures are in the columns that decisions read.
#[derive(Debug)]
pub struct RankLoad {
    position: Position,
    blocks: Mutex<RankBlocks>,
    /// Number of bookings here since the worker joined.
    booked: AtomicU64,
    /// Number of legs that failed here since the worker joined. It wraps around.
    failed: AtomicU32,
    /// Speed of the rank, as measured by this gateway.
    speeds: Speeds,
    /// Journal of the bookings for other gateways; `None` if this gateway is the only one.
    journal: Option<RankJournal>,
}

/// The load of one request on one candidate. Dropping it frees the candidate.
#[derive(Debug)]
pub struct Booking {
    booked: BookingLoad,
    prompt_tokens: u32,
    block_size: u32,
    /// Prompt tokens that were not cached, whether or not they count as load.
    new_prompt_tokens: u32,
    /// The same as the engine reported it.
    reported_new_tokens: Option<u32>,
    expected_output_tokens: Option<u32>,
    /// Blocks of the prompt.
    prompt_blocks: u32,
    /// Blocks of prompt and output so far.
    reached_blocks: u32,
    /// Load of the output's blocks, thousandths.
    output_millis: i64,
}

const MILLIS: i64 = 1_000;

impl RankLoad {
    /// Creates the load of a rank whose bookings are noted for other gateways.
    pub(crate) fn noted(position: Position, journal: Option<RankJournal>) -> Self {
        Self {
            position,
            blocks: Mutex::default(),
            booked: AtomicU64::new(0),
            failed: AtomicU32::new(0),
            speeds: Speeds::default(),
            journal,
        }
    }

    /// Returns the figures.
    #[must_use]
    pub fn view(&self) -> RankView<'_> {
        self.position.view()
    }

    /// Returns where the figures are.
    pub(crate) fn position(&self) -> &Position {
        &self.position
    }

    /// Returns whether the worker is eligible whatever the load. If not, it still may be.
    #[must_use]
    pub(crate) fn surely_eligible(&self) -> bool {
        self.position.is_eligible()
    }

    pub(crate) fn set_surely_eligible(&self, eligible: bool) {
        self.position.set_eligible(eligible);
    }

    /// Returns the number of booked requests, here and by other gateways.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.view().active_requests()
    }

    /// Returns the number of requests that are booked here.
    #[must_use]
    pub fn own_requests(&self) -> u32 {
        self.view().own_requests()
    }

    /// Returns the number of requests that were booked here since the worker joined.
    #[must_use]
    pub fn booked_requests(&self) -> u64 {
        self.booked.load(Ordering::Relaxed)
    }

    /// Returns the load that other gateways book. It is part of the other figures.
    #[must_use]
    pub fn remote(&self) -> RemoteFigures {
        RemoteFigures::of(self.position.remote())
    }

    /// Returns the number of prompt tokens whose prefill has not completed.
    #[must_use]
    pub fn active_prefill_tokens(&self) -> u32 {
        self.view().active_prefill_tokens()
    }

    /// Returns the number of booked blocks. A block that is booked here and by another gateway counts once.
    #[must_use]
    pub fn decode_blocks(&self) -> u32 {
        self.view().decode_blocks()
    }

    /// Returns the number of booked blocks if a request with these blocks were added. A shared prefix counts
    /// once (G).
    #[must_use]
    pub fn blocks_after_admission(&self, prefix: &Prefix, total: u32, assume_kv_reuse: bool) -> u32 {
        let view = self.view();
        let shared = if assume_kv_reuse && view.named_blocks() > 0 {
            self.blocks.lock().shared(prefix.hashes())
        } else {
            0
        };
        let new = total.saturating_sub(prefix.blocks(u32::try_from(shared).unwrap_or(u32::MAX)));
        view.decode_blocks().saturating_add(new)
    }

    /// Returns the number of booked requests whose prompts begin with the blocks of this one up to `last`.
    #[must_use]
    pub fn requests_like(&self, prefix: &Prefix, last: usize) -> u32 {
        if self.view().named_blocks() == 0 {
            return 0;
        }
        self.blocks.lock().bookings(prefix.hashes(), last)
    }

    /// Adds the time from sending a leg to its first token, in which the worker computed `new_tokens` prompt
    /// tokens.
    fn observe_first_token(&self, took: Duration, new_tokens: u32) {
        self.speeds.observe_first_token(took, new_tokens);
        let (took, averages) = (micros(took), self.view().averages);
        averages.ttft.observe(took);
        if new_tokens > 0 {
            let each_thousand = u64::from(took) * 1_000 / u64::from(new_tokens);
            averages.prefill.observe(u32::try_from(each_thousand).unwrap_or(u32::MAX));
        }
    }

    /// Adds a request's mean inter-token latency.
    pub fn observe_itl(&self, itl: Duration) {
        // Tokens that came in one read say nothing about the speed.
        if itl.is_zero() {
            return;
        }
        self.speeds.observe_itl(itl);
        self.view().averages.itl.observe(micros(itl));
    }

    /// Returns the number of legs that failed here since the worker joined. It wraps around.
    pub(crate) fn failed_legs(&self) -> u32 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Adds the outcome of a leg.
    pub fn observe_outcome(&self, ok: bool) {
        if !ok {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
        self.view().averages.errors.observe_share(if ok { 0 } else { 1_000_000 });
    }

    /// Changes the booked blocks of a prompt.
    fn change_blocks(&self, prefix: &Prefix, change: impl FnOnce(&mut RankBlocks)) {
        let mut blocks = self.blocks.lock();
        change(&mut blocks);
        self.tell_blocks(&blocks);
        if let Some(first) = prefix.hashes().first() {
            self.position.set_books(*first, blocks.books_like(*first));
        }
    }

    /// Forgets all blocks of other gateways, with those that wrong hashes left behind.
    fn forget_remote_blocks(&self) {
        let mut blocks = self.blocks.lock();
        let firsts = blocks.forget_remote();
        self.tell_blocks(&blocks);
        for first in firsts {
            self.position.set_books(first, blocks.books_like(first));
        }
    }

    fn tell_blocks(&self, blocks: &RankBlocks) {
        self.position.cell().named.store(blocks.own(), Ordering::Relaxed);
        let only_remote = blocks.only_remote();
        if only_remote != self.position.remote().named() {
            self.position.remote_to_change().set_named(only_remote);
        }
    }
}

impl Booking {
    pub(crate) fn new(load: Arc<RankLoad>, request: &BookingRequest) -> Self {
        Self {
            booked: BookingLoad::Own(BookedLoad::new(load, request)),
            prompt_tokens: request.prompt_tokens,
            new_prompt_tokens: request.new_prefill_tokens,
            reported_new_tokens: None,
            block_size: request.block_size.max(1),
            expected_output_tokens: request.expected_output_tokens,
            prompt_blocks: request.total_prompt_blocks,
            reached_blocks: request.total_prompt_blocks,
            output_millis: 0,
        }
    }

    /// Returns the load of the booking's rank.
    #[must_use]
    pub fn load(&self) -> &RankLoad {
        &self.booked.rank
    }

    /// Returns a handle that releases the load while the booking lives.
    #[must_use]
    pub fn handle(&mut self) -> BookingHandle {
        self.booked.handle()
    }

    /// Releases the load. Returns whether it was booked.
    #[must_use]
    pub fn release(self) -> bool {
        self.booked.release()
    }

    /// Returns whether the load is booked: no handle has released it.
    #[must_use]
    pub fn is_booked(&self) -> bool {
        self.booked.is_booked()
    }

    /// Releases the prefill tokens, because the request's prefill is complete. Further calls change nothing.
    pub fn prefill_done(&mut self) {
        self.booked.release_prefill_tokens();
    }

    /// Records the prompt tokens that the engine reported, and how many of them were cached, if it said so:
    /// otherwise as large a part as was expected. The speeds of the rank are learned from them.
    pub fn prompt_reported(&mut self, tokens: u32, cached: Option<u32>) {
        let new_tokens = match cached {
            Some(cached) => tokens.saturating_sub(cached),
            None => {
                let new = u64::from(tokens) * u64::from(self.new_prompt_tokens);
                u32::try_from(new / u64::from(self.prompt_tokens.max(1))).unwrap_or(u32::MAX)
            }
        };
        self.reported_new_tokens = (tokens > 0).then_some(new_tokens);
    }

    /// Returns the number of prompt tokens from which a first token tells the speed of this rank; 0: another
    /// worker computed the prompt.
    fn learned_tokens(&self, computed_prompt: bool) -> u32 {
        if computed_prompt { self.reported_new_tokens.unwrap_or(self.new_prompt_tokens) } else { 0 }
    }

    /// Records that the first token arrived `took` after the leg was sent, and releases the prefill tokens.
    /// `computed_prompt`: whether this worker computed the prompt, and did not receive it from another.
    pub fn first_token(&mut self, took: Duration, computed_prompt: bool) {
        self.load().observe_first_token(took, self.learned_tokens(computed_prompt));
        self.prefill_done();
    }

    /// Sets the number of output tokens so far (`osl`). Returns true if that began a new block, which is
    /// booked. A smaller number than before, as an engine corrects what was counted, releases blocks.
    ///
    /// A new block counts `max(0, 1 - osl / expected)`: near its expected end, a request will soon release
    /// its blocks. An expectation of 0 counts as 1. A request has no more blocks than the rank, or its
    /// prompt.
    pub fn output_tokens(&mut self, osl: u32) -> bool {
        let mut reached = self.prompt_tokens.saturating_add(osl).div_ceil(self.block_size);
        if reached > self.reached_blocks
            && let Some(capacity) = self.load().view().capacity_in_blocks(self.block_size)
        {
            reached = reached.min(capacity).max(self.reached_blocks);
        }
        if reached <= self.reached_blocks {
            self.release_output(reached.max(self.prompt_blocks));
            return false;
        }
        let new = i64::from(reached - self.reached_blocks);
        let weight = match self.expected_output_tokens {
            Some(expected) => (MILLIS - i64::from(osl) * MILLIS / i64::from(expected.max(1))).max(0),
            None => MILLIS,
        };
        self.reached_blocks = reached;
        self.output_millis += new * weight;
        self.booked.add_unnamed(new * weight)
    }

    /// Releases the blocks beyond `reached`. Each counts as the mean of all blocks of the output.
    fn release_output(&mut self, reached: u32) {
        let (all, gone) =
            (self.reached_blocks - self.prompt_blocks, self.reached_blocks.saturating_sub(reached));
        if gone == 0 {
            return;
        }
        let millis = i128::from(self.output_millis) * i128::from(gone) / i128::from(all.max(1));
        // A part of the output's load.
        let millis = i64::try_from(millis).unwrap_or(self.output_millis);
        self.reached_blocks = reached;
        self.output_millis -= millis;
        self.booked.add_unnamed(-millis);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.booked.release();
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
