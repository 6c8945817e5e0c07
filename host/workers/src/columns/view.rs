//! Figures of one rank, read from the columns.

use std::sync::atomic::Ordering;

use super::{PROGRAM_UNIT, RankView};

const MILLIS: i64 = 1_000;

impl RankView<'_> {
    /// Returns the number of booked requests, here and by other gateways.
    #[must_use]
    pub fn active_requests(&self) -> u32 {
        self.own_requests().saturating_add(self.remote.map_or(0, |remote| remote.requests()))
    }

    /// Returns the number of requests that are booked here.
    #[must_use]
    pub fn own_requests(&self) -> u32 {
        self.cell.requests.load(Ordering::Acquire)
    }

    /// Returns the number of prompt tokens whose prefill has not completed.
    #[must_use]
    pub fn active_prefill_tokens(&self) -> u32 {
        let own = self.cell.prefill_tokens.load(Ordering::Relaxed);
        own.saturating_add(self.remote.map_or(0, |remote| remote.prefill_tokens()))
    }

    /// Returns the number of booked blocks. A block that is booked here and by another gateway counts once.
    #[must_use]
    pub fn decode_blocks(&self) -> u32 {
        let unnamed = in_blocks(self.cell.unnamed_millis.load(Ordering::Relaxed));
        let own = self.cell.named.load(Ordering::Relaxed).saturating_add(unnamed);
        own.saturating_add(self.remote.map_or(0, |remote| remote.blocks()))
    }

    /// Returns the number of tokens that running agent programs are expected to hold here.
    #[must_use]
    pub fn program_tokens(&self) -> u32 {
        self.cell.program_units.load(Ordering::Relaxed).saturating_mul(PROGRAM_UNIT)
    }

    /// Returns the number of booked blocks with a hash.
    pub(crate) fn named_blocks(&self) -> u32 {
        let own = self.cell.named.load(Ordering::Relaxed);
        own.saturating_add(self.remote.map_or(0, |remote| remote.named()))
    }

    /// Returns the moving average of the time to first token in microseconds; 0 if there was none.
    #[must_use]
    pub fn ttft_ewma_us(&self) -> u32 {
        self.averages.ttft.get()
    }

    /// Returns the moving average of the time to first token for each 1,000 uncached prompt tokens, in
    /// microseconds; 0 if there was none.
    #[must_use]
    pub fn prefill_us_per_ktoken(&self) -> u32 {
        self.averages.prefill.get()
    }

    /// Returns the moving average of the inter-token latency in microseconds; 0 if there was none.
    #[must_use]
    pub fn itl_ewma_us(&self) -> u32 {
        self.averages.itl.get()
    }

    /// Returns the moving average of the fraction of failed legs, in parts per million.
    #[must_use]
    pub fn error_ppm(&self) -> u32 {
        self.averages.errors.get()
    }

    /// Returns the number of KV blocks of the rank: as configured, otherwise as the engine reports.
    #[must_use]
    pub fn total_blocks(&self) -> Option<u32> {
        Some(self.cell.total_blocks.load(Ordering::Relaxed)).filter(|blocks| *blocks > 0)
    }

    /// Returns the tokens in a KV block of the engine: as configured, otherwise as the engine reports.
    #[must_use]
    pub fn block_size(&self) -> Option<u32> {
        Some(self.cell.block_size.load(Ordering::Relaxed)).filter(|size| *size > 0)
    }

    /// Returns the number of blocks of `size` tokens in one of the engine's; 1 unless its block size is a
    /// multiple.
    #[must_use]
    pub fn blocks_at_once(&self, size: u32) -> u32 {
        match self.block_size() {
            Some(own) if own > size && own % size.max(1) == 0 => own / size.max(1),
            _ => 1,
        }
    }

    /// Returns how many blocks of `size` tokens fit into the rank's KV cache. An engine with an unknown block
    /// size is taken to have this one.
    #[must_use]
    pub fn capacity_in_blocks(&self, size: u32) -> Option<u32> {
        let blocks = self.total_blocks()?;
        let own = u64::from(self.block_size().unwrap_or(size));
        Some(u32::try_from(u64::from(blocks) * own / u64::from(size.max(1))).unwrap_or(u32::MAX))
    }

    /// Stores the number of KV blocks and their size; 0 if unknown.
    pub(crate) fn set_capacity(&self, total_blocks: u32, block_size: u32) {
        self.cell.total_blocks.store(total_blocks, Ordering::Relaxed);
        self.cell.block_size.store(block_size, Ordering::Relaxed);
    }
}

/// Returns thousandths of blocks as blocks.
pub(super) fn in_blocks(millis: i64) -> u32 {
    u32::try_from(millis.max(0).saturating_add(MILLIS / 2) / MILLIS).unwrap_or(u32::MAX)
}
