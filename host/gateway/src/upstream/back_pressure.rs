//! Back-pressure of engines: answers that say that the engine has too much to do.

use std::time::{Duration, SystemTime};

use http::{HeaderValue, StatusCode};
use pointsman_workers::Refusal;

use super::CallError;

/// Largest time of an engine's `Retry-After` that counts.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

impl CallError {
    /// Returns the refusal of an engine that has too much to do: 503, 429, or the 529 of a gateway
    /// that is called like an engine. Such an engine works, and the request is not to blame.
    #[must_use]
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        let Self::Status { status, retry_after, .. } = self else { return None };
        let is_too_many = *status == StatusCode::TOO_MANY_REQUESTS;
        let refuses = is_too_many || *status == StatusCode::SERVICE_UNAVAILABLE || status.as_u16() == 529;
        let retry_after = || retry_after.as_ref().and_then(|value| time_of(value, SystemTime::now()));
        refuses.then(|| Refusal { retry_after: retry_after(), is_too_many })
    }
}

/// Returns the time that a `Retry-After` names: seconds, or a date (RFC 9110, section 10.2.3).
fn time_of(value: &HeaderValue, now: SystemTime) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let time = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default(),
    };
    Some(time.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_retry_after_is_read_as_seconds_or_as_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:30 GMT").unwrap();
        let seconds = |text| time_of(&HeaderValue::from_static(text), now).map(|time| time.as_secs());
        assert_eq!(seconds("3"), Some(3));
        assert_eq!(seconds(" 0 "), Some(0));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(7));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:20 GMT"), Some(0), "a date in the past");
        assert_eq!(seconds("18446744073709551615"), Some(86_400));
        for bad in ["", "-1", "1.5", "soon", "18446744073709551616"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }

    #[test]
    fn overloaded_engines_answer_429_503_or_529() {
        for (status, refuses) in
            [(429, true), (503, true), (529, true), (500, false), (502, false), (400, false)]
        {
            let status = StatusCode::from_u16(status).unwrap();
            let error = CallError::Status {
                status,
                content_type: None,
                retry_after: None,
                body: Bytes::new(),
                in_body: false,
            };
            assert_eq!(error.refusal().is_some(), refuses, "{status}");
            // I2.4
            assert_eq!(error.retryable(), refuses || status.is_server_error(), "{status}");
            // I13.5
            assert!(!(refuses && (error.is_fault() || error.breaks_engine())), "{status}");
            // E5.2
            assert_eq!(error.began(), status.is_server_error() && !refuses, "{status}");
        }
    }
}
