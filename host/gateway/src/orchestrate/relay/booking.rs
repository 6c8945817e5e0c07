//! Keeps a booking up to the tokens of its stream.

use pointsman_workers::Booking;
use tokio::time::{Duration, Instant};

use crate::telemetry::{
    account::Account,
    metrics::{Metrics, seconds},
};

/// Brings a booking up to the tokens that `account` has counted by `now`. `first`: these are the first, after
/// this time, and whether their worker computed the prompt. A new block yields the mean inter-token latency
/// (F4).
pub(in crate::orchestrate) fn book(
    booking: &mut Booking,
    account: &mut Account,
    metrics: &Metrics,
    now: Instant,
    first: Option<(Duration, bool)>,
) {
    if let Some((took, computed_prompt)) = first {
        booking.first_token(took, computed_prompt);
    }
    let begins = booking.output_tokens(account.tokens());
    if (first.is_some() || begins)
        && let Some(itl) = account.block_begins(now)
    {
        booking.load().observe_itl(itl);
        metrics.itl.observe(seconds(itl));
    }
}
