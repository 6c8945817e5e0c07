//! Measured speeds of a rank, from which the progress of answers that are not streamed is estimated.

use std::sync::{
    OnceLock,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use tokio::time::Duration;

/// Recent values whose median counts.
const RECENT: usize = 7;
/// Number of size classes of prompts: powers of two of uncached tokens.
const SIZES: usize = 18;
/// Assumed until something was measured: an 8B model on an H100 (docs/behaviour.md F4.10).
const COLD_OVERHEAD: Duration = Duration::from_millis(30);
const COLD_PREFILL_PER_TOKEN: Duration = Duration::from_micros(200);
const COLD_ITL: Duration = Duration::from_millis(15);

/// The speeds of one rank. The first measurement makes them.
#[derive(Debug, Default)]
pub(super) struct Speeds(OnceLock<Box<Measured>>);

#[derive(Debug, Default)]
struct Measured {
    /// Time to the first token in microseconds, and tokens, by size of the uncached prompt.
    prefill: [Recent; SIZES],
    /// Time between tokens in microseconds.
    itl: Recent,
    /// Time to the first token of prompts that another worker computed, microseconds.
    transferred: Recent,
}

/// The last values of one kind: two numbers each; 0: none.
#[derive(Debug, Default)]
struct Recent {
    values: [AtomicU64; RECENT],
    next: AtomicU32,
}

impl Speeds {
    /// Adds the time to a first token that arrived after `new_tokens` uncached prompt tokens; 0: another
    /// worker computed the prompt.
    pub(super) fn observe_first_token(&self, took: Duration, new_tokens: u32) {
        let measured = self.0.get_or_init(Box::default);
        let of_size = measured.prefill.get(size(new_tokens)).filter(|_| new_tokens > 0);
        of_size.unwrap_or(&measured.transferred).push(took, new_tokens);
    }

    /// Adds a time between tokens.
    pub(super) fn observe_itl(&self, itl: Duration) {
        self.0.get_or_init(Box::default).itl.push(itl, 1);
    }

    /// Returns the estimated time to the first token after `new_tokens` uncached prompt tokens.
    pub(super) fn prefill(&self, new_tokens: u32) -> Duration {
        let scaled = |recent: &Recent| {
            // Scales with the prompt. The fixed part of the time does not scale, but is small for large
            // prompts.
            recent.median(|took, tokens| took * f64::from(new_tokens) / f64::from(tokens.max(1)))
        };
        let measured = self.0.get().and_then(|measured| {
            let own = size(new_tokens);
            // The nearest size that was measured, larger ones first.
            let nearest = (0..SIZES).flat_map(|away| [own.checked_add(away), own.checked_sub(away)]);
            nearest.flatten().find_map(|size| scaled(measured.prefill.get(size)?))
        });
        measured.unwrap_or(COLD_OVERHEAD + COLD_PREFILL_PER_TOKEN * new_tokens)
    }

    /// Returns the estimated time to the first token of a prompt that another worker computed.
    pub(super) fn transferred(&self) -> Duration {
        let measured = self.0.get().and_then(|measured| measured.transferred.median(|took, _| took));
        measured.unwrap_or(COLD_OVERHEAD)
    }

    /// Returns the estimated time between two tokens.
    pub(super) fn itl(&self) -> Duration {
        self.0.get().and_then(|measured| measured.itl.median(|took, _| took)).unwrap_or(COLD_ITL)
    }
}

impl Recent {
    fn push(&self, took: Duration, tokens: u32) {
        let micros = u64::from(u32::try_from(took.as_micros()).unwrap_or(u32::MAX).max(1));
        let at = self.next.fetch_add(1, Ordering::Relaxed) as usize % RECENT;
        if let Some(value) = self.values.get(at) {
            value.store(micros << 32 | u64::from(tokens), Ordering::Relaxed);
        }
    }

    /// Returns the median of `of` over the values, as microseconds and tokens.
    fn median(&self, of: impl Fn(f64, u32) -> f64) -> Option<Duration> {
        let mut values = [0.0; RECENT];
        let mut count = 0;
        for (value, place) in self.values.iter().map(|value| value.load(Ordering::Relaxed)).zip(&mut values) {
            if value == 0 {
                break;
            }
            let (micros, tokens) = ((value >> 32) as u32, (value & u64::from(u32::MAX)) as u32);
            *place = of(f64::from(micros), tokens);
            count += 1;
        }
        let values = values.get_mut(..count)?;
        values.sort_by(f64::total_cmp);
        values.get(count / 2).map(|micros| Duration::from_secs_f64(micros / 1e6))
    }
}

/// Returns which size a prompt has.
fn size(new_tokens: u32) -> usize {
    (new_tokens.max(1).ilog2() as usize).min(SIZES - 1)
}
