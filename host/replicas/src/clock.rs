//! The clocks of gateways: by them the last of several writes wins, and shared limits begin and end.

use pointsman_workers::unix_us;

/// Returns by how many milliseconds a clock that says `at_us` is ahead of this one. Negative: behind.
pub(crate) fn ahead_ms(at_us: u64) -> i64 {
    let ahead = (i128::from(at_us) - i128::from(unix_us())) / 1_000;
    i64::try_from(ahead).unwrap_or(i64::MAX)
}
