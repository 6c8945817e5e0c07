//! Trace context (W3C, level 1): taken from the client or begun here, with a span for each leg.

use std::fmt;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::hex::Hex;

/// Maximum length of the client's trace state, bytes: what the standard asks to pass on at least.
const MAX_STATE: usize = 512;
/// Maximum number of members of a trace state.
const MAX_MEMBERS: usize = 32;
/// The flag "sampled".
const SAMPLED: u8 = 1;
/// The gateway's key in the trace state.
const KEY: &str = "pointsman";

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The trace that a request belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    id: u128,
    /// The client's span; 0: the trace begins here.
    parent: u64,
    flags: u8,
    /// The state of other systems, valid and without the gateway's own member.
    state: String,
}

/// A leg's part of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span(u64);

/// The spans of the same trace that a leg follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Links {
    /// The prefill leg that this leg continues.
    pub(crate) prefill: Option<Span>,
    /// The failed leg that this leg is tried after.
    pub(crate) failed: Option<Span>,
}

impl TraceContext {
    /// Returns the client's trace, or a new one when it has none or an invalid one.
    #[must_use]
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        Self::given(headers).unwrap_or_else(Self::begin)
    }

    /// Returns a new trace that is not sampled.
    #[must_use]
    pub(crate) fn begin() -> Self {
        Self { id: rand::random::<u128>().max(1), parent: 0, flags: 0, state: String::new() }
    }

    /// Returns the client's trace, if it has a valid one.
    #[must_use]
    pub(crate) fn given(headers: &HeaderMap) -> Option<Self> {
        let mut parents = headers.get_all(TRACEPARENT).iter();
        let (id, parent, flags) = parse(parents.next()?.to_str().ok()?)?;
        // A request with two parents has no valid one.
        let alone = parents.next().is_none();
        alone.then(|| Self { id, parent, flags, state: state(headers) })
    }

    /// Returns the headers of a leg.
    pub(crate) fn headers(
        &self,
        span: Span,
        links: Links,
    ) -> impl Iterator<Item = (HeaderName, HeaderValue)> + use<> {
        let parent = self.parent_of_leg(span);
        let link = match (links.prefill, links.failed) {
            (Some(prefill), Some(failed)) => format!("{KEY}=prefill:{prefill};after:{failed}"),
            (Some(prefill), None) => [KEY, "=prefill:", Hex::of_u64(prefill.0).as_str()].concat(),
            (None, Some(failed)) => format!("{KEY}=after:{failed}"),
            (None, None) => String::new(),
        };
        let state = match (link.is_empty(), self.state.is_empty()) {
            (true, _) => self.state.clone(),
            (false, true) => link,
            (false, false) => format!("{link},{}", self.state),
        };
        let state = (!state.is_empty()).then(|| HeaderValue::try_from(state).ok()).flatten();
        let headers = [(TRACEPARENT, parent), (TRACESTATE, state)];
        headers.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }

    /// Returns the `traceparent` of a leg.
    fn parent_of_leg(&self, span: Span) -> Option<HeaderValue> {
        let mut parent = *b"00-________________________________-________________-00";
        let (id, own) = (Hex::of_u128(self.id), Hex::of_u64(span.0));
        for (place, digits) in [(3..35, &id.as_bytes()[..]), (36..52, own.as_bytes())] {
            parent.get_mut(place)?.copy_from_slice(digits);
        }
        *parent.last_mut()? = if self.is_sampled() { b'1' } else { b'0' };
        HeaderValue::from_bytes(&parent).ok()
    }

    /// Returns the id of the trace, as it is written.
    #[must_use]
    pub(crate) fn id(&self) -> String {
        Hex::of_u128(self.id).as_str().to_owned()
    }

    /// Returns the id of the trace as its bytes.
    #[must_use]
    #[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "only the exporter reads it"))]
    pub(crate) fn id_bytes(&self) -> [u8; 16] {
        self.id.to_be_bytes()
    }

    /// Returns the client's span that the request belongs to.
    #[must_use]
    pub(crate) fn parent(&self) -> Option<Span> {
        (self.parent != 0).then_some(Span(self.parent))
    }

    /// Returns the trace state of other systems.
    #[must_use]
    #[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "only the exporter reads it"))]
    pub(crate) fn state(&self) -> &str {
        &self.state
    }

    /// Returns whether someone records the trace.
    #[must_use]
    pub(crate) fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the same trace with the sampled flag.
    #[must_use]
    pub(crate) fn sampled(self) -> Self {
        Self { flags: self.flags | SAMPLED, ..self }
    }

    /// Returns the same trace without the sampled flag.
    #[must_use]
    pub(crate) fn unsampled(&self) -> Self {
        Self { flags: self.flags & !SAMPLED, ..self.clone() }
    }

    /// Returns the 63 bits of the id by which OpenTelemetry's ratio sampler decides: all services that see
    /// the trace decide alike.
    #[must_use]
    pub(crate) fn ratio_bits(&self) -> u64 {
        (self.id & u128::from(u64::MAX >> 1)) as u64
    }
}

impl Span {
    /// Returns a new span.
    #[must_use]
    pub(crate) fn fresh() -> Self {
        Self(rand::random::<u64>().max(1))
    }

    /// Returns the span's id as its bytes.
    #[must_use]
    #[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "only the exporter reads it"))]
    pub(crate) fn bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Hex::of_u64(self.0).as_str())
    }
}

/// The trace, the span and the flags of a `traceparent`; a version to come may have more fields.
fn parse(text: &str) -> Option<(u128, u64, u8)> {
    let mut fields = text.trim().split('-');
    let version = hex(fields.next()?, 2)?;
    let id = u128::from_str_radix(hex_text(fields.next()?, 32)?, 16).ok()?;
    let parent = hex(fields.next()?, 16)?;
    let flags = hex(fields.next()?, 2)?;
    let whole = version != 0 || fields.next().is_none();
    let valid = version != 0xFF && id != 0 && parent != 0 && whole;
    // Only the flag "sampled" is known.
    valid.then_some((id, parent, u8::try_from(flags).unwrap_or(0) & SAMPLED))
}

fn hex(text: &str, digits: usize) -> Option<u64> {
    u64::from_str_radix(hex_text(text, digits)?, 16).ok()
}

fn hex_text(text: &str, digits: usize) -> Option<&str> {
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (text.len() == digits && text.bytes().all(lower)).then_some(text)
}

/// The client's trace state, without a member of ours; empty when it is too long or not valid.
fn state(headers: &HeaderMap) -> String {
    let values: Option<Vec<&str>> =
        headers.get_all(TRACESTATE).iter().map(|value| value.to_str().ok()).collect();
    let joined = values.unwrap_or_default().join(",");
    let members: Vec<&str> = joined.split(',').map(str::trim).filter(|member| !member.is_empty()).collect();
    let is_member = |member: &&str| member.split_once('=').is_some_and(|(key, _)| !key.is_empty());
    if joined.len() > MAX_STATE || members.len() > MAX_MEMBERS || !members.iter().all(is_member) {
        return String::new();
    }
    let others = members.into_iter().filter(|member| member.split('=').next() != Some(KEY));
    others.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn given(parent: &str, state: &[&str]) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        headers.append(TRACEPARENT, parent.parse().unwrap());
        for state in state {
            headers.append(TRACESTATE, state.parse().unwrap());
        }
        TraceContext::given(&headers)
    }

    #[test]
    fn a3_a_trace_goes_on_and_each_leg_has_a_span_of_its_own() {
        let trace = given(PARENT, &["a=1,pointsman=old", "b=2"]).unwrap();
        let (prefill, decode) = (Span(7), Span(8));
        let text = |span, links| -> Vec<String> {
            let headers = trace.headers(span, links);
            headers.map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect()
        };
        assert_eq!(
            text(prefill, Links::default()),
            ["traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000007-01", "tracestate: a=1,b=2"]
        );
        let state = |links: Links| text(decode, links)[1].replace("tracestate: pointsman=", "");
        let (prefill, failed) = (Some(prefill), Some(Span(9)));
        assert_eq!(state(Links { prefill, failed: None }), "prefill:0000000000000007,a=1,b=2");
        assert_eq!(state(Links { prefill: None, failed }), "after:0000000000000009,a=1,b=2");
        assert_eq!(
            state(Links { prefill, failed }),
            "prefill:0000000000000007;after:0000000000000009,a=1,b=2"
        );
        assert_ne!(Span::fresh(), Span::fresh());
    }

    #[test]
    fn a3_what_is_no_trace_begins_a_new_one() {
        for bad in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert_eq!(given(bad, &[]), None, "{bad}");
        }
        assert!(given(&PARENT.replace("00-4", "01-4").replace("-01", "-09-more"), &[]).is_some());
        let mut twice = HeaderMap::new();
        twice.append(TRACEPARENT, PARENT.parse().unwrap());
        twice.append(TRACEPARENT, PARENT.parse().unwrap());
        assert_eq!(TraceContext::given(&twice), None);
        assert_ne!(TraceContext::of(&HeaderMap::new()).id(), TraceContext::of(&HeaderMap::new()).id());
        assert_eq!(given(PARENT, &[&"x=y,".repeat(200)]).unwrap().state, "");
        assert_eq!(given(PARENT, &["no member"]).unwrap().state, "");
    }
}
