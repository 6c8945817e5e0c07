//! Reads points in time from the command line.

use pointsman_workers::unix_us;

/// Reads a point in time, `2026-01-31T12:00:00Z` or an age of `90s`, `15m`, `2h` or `7d`. Returns
/// microseconds since the Unix epoch.
pub(crate) fn moment(text: &str) -> Result<u64, String> {
    let error = || {
        format!(
            "\"{text}\" is neither a time such as 2026-01-31T12:00:00Z nor an age such as 90s, 15m, 2h or 7d"
        )
    };
    if let Ok(time) = chrono::DateTime::parse_from_rfc3339(text) {
        return u64::try_from(time.timestamp_micros()).map_err(|_| error());
    }
    let unit = text.chars().last().ok_or_else(error)?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3_600,
        'd' => 86_400,
        _ => return Err(error()),
    };
    let count: u64 = text.strip_suffix(unit).and_then(|count| count.parse().ok()).ok_or_else(error)?;
    Ok(unix_us().saturating_sub(count.saturating_mul(seconds * 1_000_000)))
}
