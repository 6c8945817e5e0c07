//! Back-pressure of engines: answers that say that the engine has too much to do.

use std::time::{Duration, SystemTime};

use http::{HeaderValue, StatusCode};
use pointsman_workers::Refusal;

use super::{CallError, retry_advice::number};

/// Largest time of an engine's `Retry-After` that counts, seconds.
const MAX_SECONDS: f64 = 24.0 * 60.0 * 60.0;

/// Returns a `Retry-After` for clients, who know whole seconds.
pub(crate) fn whole_seconds(value: HeaderValue) -> HeaderValue {
    let number = value.to_str().ok().and_then(number).filter(|seconds| seconds.fract() > 0.0);
    number.and_then(|seconds| HeaderValue::try_from(seconds.ceil().to_string()).ok()).unwrap_or(value)
}

impl CallError {
    /// Returns the refusal of an engine that has too much to do: 503, 429, or the 529 of a gateway
    /// that is called like an engine. Such an engine works, and the request is not to blame.
    #[must_use]
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        let Self::Status { status, retry, .. } = self else { return None };
        let is_too_many = *status == StatusCode::TOO_MANY_REQUESTS;
        let refuses = is_too_many || *status == StatusCode::SERVICE_UNAVAILABLE || status.as_u16() == 529;
        let retry_after = || retry.after.as_ref().and_then(|value| time_of(value, SystemTime::now()));
        refuses.then(|| Refusal { retry_after: retry_after(), is_too_many })
    }
}

/// Returns the time that a `Retry-After` names: seconds, or a date (RFC 9110, section 10.2.3). Some servers
/// write fractions of seconds.
fn time_of(value: &HeaderValue, now: SystemTime) -> Option<Duration> {
    let text = value.to_str().ok()?.trim();
    let seconds = match number(text) {
        Some(seconds) => seconds,
        None => httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default().as_secs_f64(),
    };
    Some(Duration::from_secs_f64(seconds.min(MAX_SECONDS)))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderName, header};

    use super::*;
    use crate::upstream::retry_advice::{RETRY_AFTER_MS, RetryAdvice};

    #[test]
    fn a_retry_after_is_read_as_seconds_or_as_a_date() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:30 GMT").unwrap();
        let seconds = |text| time_of(&HeaderValue::from_static(text), now).map(|time| time.as_secs());
        assert_eq!(seconds("3"), Some(3));
        assert_eq!(seconds(" 0 "), Some(0));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(7));
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:20 GMT"), Some(0), "a date in the past");
        assert_eq!(seconds("18446744073709551616"), Some(86_400));
        assert_eq!((seconds("1.5"), seconds(".5")), (Some(1), Some(0)));
        for bad in ["", "-1", "+1", "1e3", "1.5.1", ".", "inf", "nan", "soon"] {
            assert_eq!(seconds(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_time_in_milliseconds_is_taken_first_and_clients_get_whole_seconds() {
        let told = |headers: &[(HeaderName, &'static str)]| {
            let headers =
                headers.iter().cloned().map(|(name, value)| (name, HeaderValue::from_static(value)));
            let value = RetryAdvice::of(&headers.collect()).after?;
            let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
            Some((text(&value), text(&whole_seconds(value))))
        };
        let pair = |one: &str, two: &str| Some((one.to_owned(), two.to_owned()));
        // I13.2, I1.3
        assert_eq!(told(&[(RETRY_AFTER_MS, "2500")]), pair("2.5", "3"));
        assert_eq!(told(&[(header::RETRY_AFTER, "9"), (RETRY_AFTER_MS, "100")]), pair("0.1", "1"));
        assert_eq!(told(&[(header::RETRY_AFTER, "9"), (RETRY_AFTER_MS, "-1")]), pair("9", "9"));
        assert_eq!(told(&[(header::RETRY_AFTER, "soon")]), pair("soon", "soon"));
        assert_eq!(told(&[]), None);
    }

    #[test]
    fn overloaded_engines_answer_429_503_or_529() {
        for (status, refuses) in
            [(429, true), (503, true), (529, true), (500, false), (502, false), (501, false), (400, false)]
        {
            let status = StatusCode::from_u16(status).unwrap();
            let answer = |in_body| {
                let (content_type, retry, body) = (None, RetryAdvice::default(), Bytes::new());
                CallError::Status { status, content_type, retry, body, in_body }
            };
            let error = answer(false);
            assert_eq!(error.refusal().is_some(), refuses, "{status}");
            let breaks = status.is_server_error() && !refuses && status != StatusCode::NOT_IMPLEMENTED;
            // I2.4
            assert_eq!(error.retryable(), refuses || breaks, "{status}");
            // I13.5
            assert_eq!((error.is_fault(), error.breaks_engine()), (breaks, breaks), "{status}");
            // E5.2, E6.16
            assert_eq!([error.began(), answer(true).began()], [breaks; 2], "{status}");
        }
    }
}
