//! `strftime_now`. The time is an argument; this crate reads no clock.

use std::{fmt::Write, time::SystemTime};

use chrono::DateTime;
use minijinja::{Error, ErrorKind};

/// Formats a time in UTC with Python's `strftime` directives.
pub(crate) fn format(now: SystemTime, format: &str) -> Result<String, Error> {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let invalid = || Error::new(ErrorKind::InvalidOperation, format!("`{format}` is not a time format"));
    let time = DateTime::from_timestamp(seconds, since.subsec_nanos()).ok_or_else(invalid)?;
    let mut out = String::new();
    write!(out, "{}", time.format(format)).map_err(|_| invalid())?;
    Ok(out)
}
