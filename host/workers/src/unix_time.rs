//! The time since the Unix epoch; 0 if the machine's clock is before it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the time since the Unix epoch.
#[must_use]
pub fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the milliseconds since the Unix epoch.
#[must_use]
pub fn unix_ms() -> u64 {
    millis(unix_time())
}

/// Returns the microseconds since the Unix epoch.
#[must_use]
pub fn unix_us() -> u64 {
    u64::try_from(unix_time().as_micros()).unwrap_or(u64::MAX)
}

/// Returns a duration in milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
