//! The header `via` of requests to engines (RFC 9110, section 7.6.3). It names the gateways that a request
//! passed, so that one that comes back is refused: a worker may be a gateway. And the header `user-agent`.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue, header};

use super::Upstream;
use crate::hex::Hex;

/// Maximum number of gateways that a request may have passed.
pub(crate) const MAX_HOPS: usize = 4;
/// What the entry of a gateway begins with, before its id.
const ENTRY: &str = "1.1 pointsman-";
/// Longest entry that is one of a gateway, bytes.
const MAX_ENTRY: usize = 64;

/// The header, as a request to an engine has it.
pub(crate) type Via = (HeaderName, HeaderValue);

/// The header that names the gateway's program to engines and proxies before them. Some refuse a request
/// without it.
pub(super) static USER_AGENT: (HeaderName, HeaderValue) =
    (header::USER_AGENT, HeaderValue::from_static(concat!("pointsman/", env!("CARGO_PKG_VERSION"))));

/// A request came back, or passed too many gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Looped;

/// Returns the header of requests that passed no gateway before this one. Each call makes another id.
#[must_use]
pub(crate) fn own_via() -> Via {
    let entry = format!("{ENTRY}{}", Hex::of_u64(rand::random()).as_str());
    let value = HeaderValue::from_str(&entry);
    (header::VIA, value.unwrap_or(HeaderValue::from_static("1.1 pointsman")))
}

impl Upstream {
    /// Names the gateways that the client's request passed, as its headers say, in the requests to engines.
    ///
    /// # Errors
    /// It came back to this gateway, or passed too many.
    pub(crate) fn set_via_from(&mut self, headers: &HeaderMap) -> Result<(), Looped> {
        self.via = via_after(headers, &self.pool.context.via)?;
        Ok(())
    }

    /// Returns a client for the gateway's own requests: no client's gateways are named in them.
    #[must_use]
    pub(crate) fn without_client(&self) -> Self {
        Self { via: None, ..self.clone() }
    }

    pub(super) fn via(&self) -> &Via {
        self.via.as_deref().unwrap_or(&self.pool.context.via)
    }
}

/// Returns the header for a request that arrived with `headers` at the gateway with the header `own`; `None`
/// if it passed no gateway before. Entries of other intermediaries are not passed on.
///
/// # Errors
/// [`Looped`].
fn via_after(headers: &HeaderMap, own: &Via) -> Result<Option<Arc<Via>>, Looped> {
    let values = headers.get_all(header::VIA).into_iter();
    let parts = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let entries = parts.filter_map(|part| std::str::from_utf8(part.trim_ascii()).ok());
    let of_gateways = entries.filter(|entry| entry.starts_with(ENTRY) && entry.len() <= MAX_ENTRY);
    let passed: Vec<&str> = of_gateways.take(MAX_HOPS + 1).collect();
    if passed.is_empty() {
        return Ok(None);
    }
    if passed.len() > MAX_HOPS || passed.iter().any(|entry| own.1 == entry) {
        return Err(Looped);
    }
    let all = [passed.join(", ").as_bytes(), b", ", own.1.as_bytes()].concat();
    HeaderValue::from_bytes(&all).map(|value| Some(Arc::new((header::VIA, value)))).map_err(|_| Looped)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(values: &[&str], own: &Via) -> Result<Option<String>, Looped> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::VIA, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let via = via_after(&headers, own)?;
        Ok(via.map(|via| via.1.to_str().unwrap().to_owned()))
    }

    #[test]
    fn i19_a_request_that_comes_back_or_passed_too_many_gateways_is_found() {
        let own = own_via();
        let text = own.1.to_str().unwrap();
        assert_ne!(text, own_via().1.to_str().unwrap());
        // I19.4
        assert_eq!(after(&[], &own), Ok(None));
        assert_eq!(after(&["1.1 google, 2 squid (x, y)", "HTTP/1.1 pointsman-x"], &own), Ok(None));
        let passed = after(&["1.0 fréd, 1.1 pointsman-a", "1.1 pointsman-b"], &own);
        assert_eq!(passed, Ok(Some(format!("1.1 pointsman-a, 1.1 pointsman-b, {text}"))));
        // I19.1
        assert_eq!(after(&["1.1 pointsman-a", &format!("{text}, 1.1 pointsman-b")], &own), Err(Looped));
        // I19.2
        let of = |count: usize| vec!["1.1 pointsman-a"; count].join(",");
        assert!(after(&[&of(MAX_HOPS)], &own).is_ok());
        assert_eq!(after(&[&of(MAX_HOPS + 1)], &own), Err(Looped));
    }
}
