//! Rate limits in answers: headers and errors as OpenAI's clients read them.

use std::{fmt, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue};

/// A limit that a request exceeds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Exceeded {
    pub(crate) kind: LimitKind,
    pub(crate) limit: u64,
    /// The model that the limit is for; `None`: all.
    pub(crate) model: Option<String>,
    /// When the request fits.
    pub(crate) retry_after: Duration,
    pub(crate) headers: RateHeaders,
}

/// Quantity that is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LimitKind {
    Requests,
    Concurrency,
    InputTokens,
    OutputTokens,
    /// The prompt alone is larger than the limit.
    TooLarge(u64),
}

/// The limits of a request with the smallest share left.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct RateHeaders {
    pub(crate) requests: Tightest,
    pub(crate) tokens: Tightest,
}

/// The limit with the smallest share left; without one, no headers are added.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Tightest(Option<Left>);

#[derive(Clone, Copy, Debug, PartialEq)]
struct Left {
    limit: u64,
    remaining: u64,
    reset: Duration,
}

impl Tightest {
    /// Tells a limit that is not zero.
    pub(crate) fn consider_limit(&mut self, limit: u64, remaining: u64, reset: Duration) {
        // Compares remaining / limit without a division.
        let share = |left: &Left, other: &Left| u128::from(left.remaining) * u128::from(other.limit);
        let left = Left { limit, remaining, reset };
        if self.0.as_ref().is_none_or(|so_far| share(&left, so_far) < share(so_far, &left)) {
            self.0 = Some(left);
        }
    }
}

impl RateHeaders {
    /// Names of the headers: limit, remaining and reset, of requests and of tokens.
    pub(crate) const NAMES: [[HeaderName; 3]; 2] = [
        [
            HeaderName::from_static("x-ratelimit-limit-requests"),
            HeaderName::from_static("x-ratelimit-remaining-requests"),
            HeaderName::from_static("x-ratelimit-reset-requests"),
        ],
        [
            HeaderName::from_static("x-ratelimit-limit-tokens"),
            HeaderName::from_static("x-ratelimit-remaining-tokens"),
            HeaderName::from_static("x-ratelimit-reset-tokens"),
        ],
    ];

    /// Adds the headers.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        for ([limit, remaining, reset], tightest) in Self::NAMES.into_iter().zip([self.requests, self.tokens])
        {
            let Some(left) = tightest.0 else { continue };
            headers.insert(limit, HeaderValue::from(left.limit));
            headers.insert(remaining, HeaderValue::from(left.remaining));
            if let Ok(value) = HeaderValue::try_from(Span(left.reset).to_string()) {
                headers.insert(reset, value);
            }
        }
    }
}

impl Exceeded {
    /// Adds the headers of the limits, and the time to wait in milliseconds.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        self.headers.write(headers);
        let millis = u64::try_from(self.retry_after.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX);
        headers.insert("retry-after-ms", HeaderValue::from(millis));
    }

    /// The `type` of the error: `requests` or `tokens`.
    pub(crate) fn limit_type(&self) -> &'static str {
        match self.kind {
            LimitKind::Requests | LimitKind::Concurrency => "requests",
            LimitKind::InputTokens | LimitKind::OutputTokens | LimitKind::TooLarge(_) => "tokens",
        }
    }
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, limit, model, retry_after, .. } = self;
        let whose = model.as_ref().map(|model| format!(" for the model `{model}`")).unwrap_or_default();
        let what = match kind {
            LimitKind::Requests => "requests per minute",
            LimitKind::Concurrency => "requests at the same time",
            LimitKind::InputTokens => "input tokens per minute",
            LimitKind::OutputTokens => "output tokens per minute",
            LimitKind::TooLarge(tokens) => {
                return write!(
                    f,
                    "Request too large: the prompt has {tokens} tokens, and the limit{whose} is {limit} input tokens \
                     per minute; send a shorter one"
                );
            }
        };
        write!(f, "Rate limit reached{whose}: at most {limit} {what}; try again in {}", Span(*retry_after))
    }
}

/// A time as OpenAI writes it: `120ms`, `1.5s`, `6m0s`.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A client that comes back a fraction early would be refused.
        let millis = self.0.as_micros().div_ceil(1_000);
        let (minutes, rest) = (millis / 60_000, millis % 60_000);
        match (minutes, rest) {
            (0, 1..1_000) => write!(f, "{rest}ms"),
            (0, _) if rest % 1_000 == 0 => write!(f, "{}s", rest / 1_000),
            (0, _) => write!(f, "{}.{:03}s", rest / 1_000, rest % 1_000),
            _ => write!(f, "{minutes}m{}s", rest / 1_000),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn l2_times_are_written_as_openai_writes_them() {
        let shown = |millis| Span(Duration::from_millis(millis)).to_string();
        // L2.3
        assert_eq!([0, 120, 1_000, 1_500, 360_000].map(shown), ["0s", "120ms", "1s", "1.500s", "6m0s"]);
    }
}
