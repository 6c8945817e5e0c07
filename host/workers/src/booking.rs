//! Bookings: the load that a decision puts on a candidate, from its selection until the stream ends (F4).
//!
//! Dropping the [`Booking`] releases it, exactly once on every path. Booked blocks are a tree of sequence
//! hashes (`booked`) behind a short lock that only bookings on the same rank share.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{average::Average, id::Leg, prefix::Prefix};

mod booked;

use booked::Booked;

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

/// Load booked on one rank of a worker.
#[derive(Debug, Default)]
pub struct RankLoad {
    requests: AtomicU32,
    prefill_tokens: AtomicU32,
    /// Thousandths of blocks without a hash: partial prompt blocks, output blocks, blocks booked without
    /// reuse. Signed, because additions and releases of different bookings interleave.
    unnamed_millis: AtomicI64,
    /// Number of distinct blocks with a hash.
    named: AtomicU32,
    blocks: Mutex<Booked>,
    ttft: Average,
    itl: Average,
    errors: Average,
}

/// The load of one request on one candidate. Dropping it frees the candidate.
#[derive(Debug)]
pub struct Booking {
    load: Arc<RankLoad>,
    /// Blocks with a hash, to be released.
    blocks: Option<Prefix>,
    unnamed_millis: i64,
    prefill_tokens: u32,
    prompt_tokens: u32,
    block_size: u32,
    expected_output_tokens: Option<u32>,
    reached_blocks: u32,
}

const MILLIS: i64 = 1_000;

impl RankLoad {
    /// Returns the number of booked requests.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns the number of prompt tokens whose prefill has not completed.
    #[must_use]
    pub fn active_prefill_tokens(&self) -> u32 {
        self.prefill_tokens.load(Ordering::Relaxed)
    }

    /// Returns the number of booked blocks.
    #[must_use]
    pub fn decode_blocks(&self) -> u32 {
        let unnamed = self.unnamed_millis.load(Ordering::Relaxed).max(0);
        let unnamed = u32::try_from((unnamed + MILLIS / 2) / MILLIS).unwrap_or(u32::MAX);
        self.named.load(Ordering::Relaxed).saturating_add(unnamed)
    }

    /// Returns the number of booked blocks if a request with these blocks were added. A shared prefix counts
    /// once (G).
    #[must_use]
    pub fn blocks_after_admission(&self, prefix: &Prefix, total: u32, assume_kv_reuse: bool) -> u32 {
        let shared = if assume_kv_reuse && self.named.load(Ordering::Relaxed) > 0 {
            self.blocks.lock().shared(prefix.hashes())
        } else {
            0
        };
        let new = total.saturating_sub(prefix.blocks(u32::try_from(shared).unwrap_or(u32::MAX)));
        self.decode_blocks().saturating_add(new)
    }

    /// Adds a time to first token.
    pub fn observe_ttft(&self, ttft: Duration) {
        self.ttft.observe(micros(ttft));
    }

    /// Adds a request's mean inter-token latency.
    pub fn observe_itl(&self, itl: Duration) {
        self.itl.observe(micros(itl));
    }

    /// Adds the outcome of a leg.
    pub fn observe_outcome(&self, ok: bool) {
        self.errors.observe_share(if ok { 0 } else { 1_000_000 });
    }

    /// Returns the moving average of the time to first token in microseconds; 0 if there was none.
    #[must_use]
    pub fn ttft_ewma_us(&self) -> u32 {
        self.ttft.get()
    }

    /// Returns the moving average of the inter-token latency in microseconds; 0 if there was none.
    #[must_use]
    pub fn itl_ewma_us(&self) -> u32 {
        self.itl.get()
    }

    /// Returns the moving average of the fraction of failed legs, in parts per million.
    #[must_use]
    pub fn error_ppm(&self) -> u32 {
        self.errors.get()
    }

    fn add_blocks(&self, prefix: &Prefix) {
        let mut booked = self.blocks.lock();
        booked.add(prefix);
        self.named.store(booked.blocks(), Ordering::Relaxed);
    }

    fn release_blocks(&self, prefix: &Prefix) {
        let mut booked = self.blocks.lock();
        booked.release(prefix);
        self.named.store(booked.blocks(), Ordering::Relaxed);
    }
}

impl Booking {
    pub(crate) fn new(load: Arc<RankLoad>, request: &BookingRequest) -> Self {
        let prefill_tokens = if request.track_prefill_tokens { request.new_prefill_tokens } else { 0 };
        load.requests.fetch_add(1, Ordering::Relaxed);
        load.prefill_tokens.fetch_add(prefill_tokens, Ordering::Relaxed);
        let (blocks, unnamed) = if request.assume_kv_reuse {
            load.add_blocks(&request.prefix);
            let named = request.prefix.named_blocks();
            (Some(request.prefix.clone()), request.total_prompt_blocks.saturating_sub(named))
        } else {
            (None, request.total_prompt_blocks)
        };
        let unnamed_millis = i64::from(unnamed) * MILLIS;
        load.unnamed_millis.fetch_add(unnamed_millis, Ordering::Relaxed);
        Self {
            load,
            blocks,
            unnamed_millis,
            prefill_tokens,
            prompt_tokens: request.prompt_tokens,
            block_size: request.block_size.max(1),
            expected_output_tokens: request.expected_output_tokens,
            reached_blocks: request.total_prompt_blocks,
        }
    }

    /// Returns the load of the booking's rank.
    #[must_use]
    pub fn load(&self) -> &RankLoad {
        &self.load
    }

    /// Releases the prefill tokens, because the request's prefill is complete. Further calls change nothing.
    pub fn prefill_done(&mut self) {
        let tokens = std::mem::take(&mut self.prefill_tokens);
        if tokens > 0 {
            self.load.prefill_tokens.fetch_sub(tokens, Ordering::Relaxed);
        }
    }

    /// Sets the number of output tokens so far (`osl`). Returns true if that began a new block.
    ///
    /// A new block counts `max(0, 1 - osl / expected)`: near its expected end, a request will soon release
    /// its blocks.
    pub fn output_tokens(&mut self, osl: u32) -> bool {
        let reached = self.prompt_tokens.saturating_add(osl).div_ceil(self.block_size);
        if reached <= self.reached_blocks {
            return false;
        }
        let new = i64::from(reached - self.reached_blocks);
        let weight = match self.expected_output_tokens.filter(|expected| *expected > 0) {
            Some(expected) => (MILLIS - i64::from(osl) * MILLIS / i64::from(expected)).max(0),
            None => MILLIS,
        };
        self.reached_blocks = reached;
        self.unnamed_millis += new * weight;
        self.load.unnamed_millis.fetch_add(new * weight, Ordering::Relaxed);
        true
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.prefill_done();
        if let Some(blocks) = self.blocks.take() {
            self.load.release_blocks(&blocks);
        }
        self.load.unnamed_millis.fetch_sub(self.unnamed_millis, Ordering::Relaxed);
        self.load.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::id::BlockHash;

    fn request(prompt_tokens: u32, blocks: &[u64], reuse: bool) -> BookingRequest {
        BookingRequest {
            leg: Leg::Decode,
            prompt_tokens,
            new_prefill_tokens: prompt_tokens,
            prefix: blocks.iter().map(|block| BlockHash(*block)).collect::<Vec<_>>().into(),
            total_prompt_blocks: prompt_tokens.div_ceil(16),
            block_size: 16,
            expected_output_tokens: None,
            assume_kv_reuse: reuse,
            track_prefill_tokens: true,
        }
    }

    fn state(load: &RankLoad) -> (u32, u32, u32) {
        (load.active_requests(), load.active_prefill_tokens(), load.decode_blocks())
    }

    #[test]
    fn f4_a_booking_is_added_at_selection_and_released_on_drop() {
        let load = Arc::new(RankLoad::default());
        let mut booking = Booking::new(load.clone(), &request(40, &[1, 2], true));
        assert_eq!(state(&load), (1, 40, 3));
        booking.prefill_done();
        booking.prefill_done();
        assert_eq!(state(&load), (1, 0, 3));
        drop(booking);
        assert_eq!(state(&load), (0, 0, 0));
    }

    #[test]
    fn g_a_shared_prefix_counts_once_and_without_reuse_it_does_not() {
        let load = Arc::new(RankLoad::default());
        let first = Booking::new(load.clone(), &request(64, &[1, 2, 3, 4], true));
        let blocks: Vec<BlockHash> = [1, 2, 30, 40].map(BlockHash).to_vec();
        assert_eq!(load.blocks_after_admission(&blocks.clone().into(), 4, true), 6);
        assert_eq!(load.blocks_after_admission(&blocks.into(), 4, false), 8);
        let second = Booking::new(load.clone(), &request(64, &[1, 2, 30, 40], true));
        assert_eq!(load.decode_blocks(), 6);
        drop(first);
        assert_eq!(load.decode_blocks(), 4);
        drop(second);
        assert_eq!(load.decode_blocks(), 0);
    }

    #[test]
    fn f4_output_blocks_count_less_towards_the_expected_end() {
        let load = Arc::new(RankLoad::default());
        let mut booking = Booking::new(
            load.clone(),
            &BookingRequest { expected_output_tokens: Some(32), ..request(16, &[1], true) },
        );
        assert!(booking.output_tokens(1));
        assert!(!booking.output_tokens(16));
        // Block 2 began at token 1 and counts 1 - 1/32; block 3 began at token 17 and counts 1 - 17/32.
        assert!(booking.output_tokens(17));
        assert_eq!(load.unnamed_millis.load(Ordering::Relaxed), 969 + 469);
        assert!(booking.output_tokens(400));
        assert_eq!(
            load.unnamed_millis.load(Ordering::Relaxed),
            969 + 469,
            "beyond the expected end nothing is added"
        );
    }

    proptest! {
        #[test]
        fn invariant_8_any_interleaving_ends_at_zero(
            steps in proptest::collection::vec((0_u8..4, 0_usize..6, 1_u32..200), 1..80),
        ) {
            let load = Arc::new(RankLoad::default());
            let mut bookings: Vec<Booking> = Vec::new();
            for (step, place, amount) in steps {
                let place = place.min(bookings.len().saturating_sub(1));
                match step {
                    0 => {
                        let blocks: Vec<u64> = (0..u64::from(amount / 16)).collect();
                        bookings.push(Booking::new(load.clone(), &request(amount, &blocks, amount % 2 == 0)));
                    }
                    1 => if let Some(booking) = bookings.get_mut(place) { booking.prefill_done(); },
                    2 => if let Some(booking) = bookings.get_mut(place) { booking.output_tokens(amount); },
                    _ => if !bookings.is_empty() { drop(bookings.remove(place)); },
                }
                prop_assert_eq!(load.active_requests() as usize, bookings.len());
            }
            bookings.clear();
            prop_assert_eq!(state(&load), (0, 0, 0));
            prop_assert_eq!(load.blocks.lock().blocks(), 0);
        }
    }
}
