//! HTTP/1.1 heads as a client writes and reads them, and how the body after one ends (RFC 9112, sections 2
//! to 6).

use std::mem::MaybeUninit;

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};

use crate::{WireError, chunked::Chunked};

/// Headers that an answer may have.
const MAX_HEADERS: usize = 100;
/// Heads that only inform (1xx) before the head of an answer.
const MAX_INFORMATIONAL: usize = 16;
/// Bytes that the head of an answer may have.
pub const MAX_HEAD: usize = 64 * 1024;

/// The head of an answer.
#[derive(Debug)]
pub struct Head {
    /// The status.
    pub status: StatusCode,
    /// The headers that are kept.
    pub headers: HeaderMap,
    /// How the body ends.
    pub framing: Framing,
    /// Whether the connection can serve another request once the body is over.
    pub keep: bool,
}

/// How a body ends, and how much of it is left.
#[derive(Debug)]
pub enum Framing {
    /// The body ends after this many more bytes.
    Length(u64),
    /// The body ends with its last chunk.
    Chunked(Chunked),
    /// The body ends when the server closes the connection.
    ToEnd,
}

/// The head of a request, whose body is JSON unless the headers name another content type; `None` when the
/// address has characters that no request line may have.
#[must_use]
pub fn request<'a>(
    method: &Method,
    authority: &str,
    path: &str,
    headers: impl IntoIterator<Item = &'a (HeaderName, HeaderValue)> + Clone,
    length: usize,
) -> Option<Vec<u8>> {
    let visible = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
    if !visible(authority) || !visible(path) {
        return None;
    }
    let path = if path.is_empty() { "/" } else { path };
    let mut head = Vec::with_capacity(384);
    let mut lines = |parts: &[&[u8]]| parts.iter().for_each(|part| head.extend_from_slice(part));
    lines(&[method.as_str().as_bytes(), b" ", path.as_bytes(), b" HTTP/1.1\r\nhost: ", authority.as_bytes()]);
    let has_content_type = |(name, _): &(HeaderName, HeaderValue)| name == header::CONTENT_TYPE;
    if length > 0 && !headers.clone().into_iter().any(has_content_type) {
        lines(&[b"\r\ncontent-type: application/json"]);
    }
    if length > 0 || *method == Method::POST {
        lines(&[b"\r\ncontent-length: ", length.to_string().as_bytes()]);
    }
    lines(&[b"\r\n"]);
    for (name, value) in headers {
        lines(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"]);
    }
    lines(&[b"\r\n"]);
    Some(head)
}

/// Reads the head of an answer, and how many bytes it took; `None` while it is not whole. Heads that only
/// inform (1xx) are passed over. Keeps the headers in `kept`.
///
/// # Errors
/// [`WireError::Head`], [`WireError::LongHead`].
pub fn response(bytes: &[u8], kept: &[HeaderName]) -> Result<Option<(Head, usize)>, WireError> {
    let mut at = 0;
    for _ in 0..=MAX_INFORMATIONAL {
        let rest = bytes.get(at..).unwrap_or_default();
        let mut headers = [const { MaybeUninit::uninit() }; MAX_HEADERS];
        let mut parsed = httparse::Response::new(&mut []);
        let parser = httparse::ParserConfig::default();
        let length = match parser.parse_response_with_uninit_headers(&mut parsed, rest, &mut headers) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if bytes.len() > MAX_HEAD => {
                return Err(WireError::LongHead(MAX_HEAD));
            }
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => return Err(WireError::Head("too many headers")),
            Err(_) => return Err(WireError::Head("it cannot be parsed")),
        };
        at += length;
        if at > MAX_HEAD {
            return Err(WireError::LongHead(MAX_HEAD));
        }
        let head = head(&parsed, kept)?;
        match head.status {
            StatusCode::SWITCHING_PROTOCOLS => return Err(WireError::Head("it switches protocols")),
            status if status.is_informational() => {}
            _ => return Ok(Some((head, at))),
        }
    }
    Err(WireError::Head("too many heads that only inform"))
}

fn head(parsed: &httparse::Response<'_, '_>, kept: &[HeaderName]) -> Result<Head, WireError> {
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or(WireError::Head("it has no status"))?;
    let (mut headers, mut read) = (HeaderMap::with_capacity(kept.len()), Read::default());
    for header in parsed.headers.iter() {
        read.note(header.name, header.value);
        if let Some(name) = kept.iter().find(|kept| header.name.eq_ignore_ascii_case(kept.as_str())) {
            let value = HeaderValue::from_bytes(header.value);
            headers.append(name, value.map_err(|_| WireError::Head("an invalid header"))?);
        }
    }
    let (framing, sound) = read.framing(status)?;
    let stays = if parsed.version == Some(1) { !read.closes } else { read.stays };
    let keep = sound && stays && !matches!(framing, Framing::ToEnd);
    Ok(Head { status, headers, framing, keep })
}

/// What the headers of an answer say that the client itself reads. They are not kept.
#[derive(Default)]
struct Read {
    /// Whether the transfer coding is the only one, and known.
    chunked: Option<bool>,
    /// The content length, if the head has one. The inner option is `None` if it cannot be used: it is
    /// repeated or not a number.
    length: Option<Option<u64>>,
    /// The connection is to close.
    closes: bool,
    /// The connection is to stay.
    stays: bool,
}

impl Read {
    fn note(&mut self, name: &str, value: &[u8]) {
        if name.eq_ignore_ascii_case("content-length") {
            let length = length(value);
            self.length = Some(length.filter(|_| self.length.is_none_or(|before| before == length)));
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            self.chunked = Some(self.chunked.is_none() && value.eq_ignore_ascii_case(b"chunked"));
        } else if name.eq_ignore_ascii_case("connection") {
            let is = |option: &[u8]| {
                value.split(|byte| *byte == b',').any(|one| one.trim_ascii().eq_ignore_ascii_case(option))
            };
            self.closes |= is(b"close");
            self.stays |= is(b"keep-alive");
        }
    }

    /// Returns how the body ends. Contradictory framing headers are an error.
    fn framing(&self, status: StatusCode) -> Result<(Framing, bool), WireError> {
        if matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            return Ok((Framing::Length(0), true));
        }
        match (self.chunked, self.length) {
            (Some(false), _) => Err(WireError::Head("an unknown transfer coding")),
            (Some(true), length) => Ok((Framing::Chunked(Chunked::default()), length.is_none())),
            (None, Some(Some(length))) => Ok((Framing::Length(length), true)),
            (None, Some(None)) => Err(WireError::Head("an invalid content length")),
            (None, None) => Ok((Framing::ToEnd, true)),
        }
    }
}

fn length(value: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(value).ok()?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

impl Framing {
    /// Appends what `bytes` carry of the body to `out`; how many bytes at the end are not of it any more.
    ///
    /// # Errors
    /// [`WireError::Chunk`].
    pub fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<usize, WireError> {
        match self {
            Self::Length(left) => {
                let length = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                out.extend_from_slice(bytes.get(..length).unwrap_or_default());
                *left -= length as u64;
                Ok(bytes.len() - length)
            }
            Self::Chunked(chunked) => chunked.decode(bytes, out),
            Self::ToEnd => {
                out.extend_from_slice(bytes);
                Ok(0)
            }
        }
    }

    /// The connection is over; so is a body that has no other end.
    ///
    /// # Errors
    /// [`WireError::Cut`] when it has one.
    pub fn cut(&mut self) -> Result<(), WireError> {
        if !matches!(self, Self::ToEnd) {
            return Err(WireError::Cut);
        }
        *self = Self::Length(0);
        Ok(())
    }

    /// Returns whether nothing more will come.
    #[must_use]
    pub fn is_done(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunked) => chunked.is_done(),
            Self::ToEnd => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<(Head, usize)>, WireError> {
        response(text.as_bytes(), &[header::CONTENT_TYPE, header::RETRY_AFTER])
    }

    fn whole(text: &str) -> Head {
        read(text).unwrap().unwrap().0
    }

    #[test]
    fn a_request_s_head_is_one_block() {
        let headers = vec![(HeaderName::from_static("x-request-id"), HeaderValue::from_static("7"))];
        let head = request(&Method::POST, "h:1", "/v1/chat/completions", &headers, 12).unwrap();
        let expected = "POST /v1/chat/completions HTTP/1.1\r\nhost: h:1\r\ncontent-type: application/json\r\n\
                        content-length: 12\r\nx-request-id: 7\r\n\r\n";
        assert_eq!(String::from_utf8(head).unwrap(), expected);
        let head = request(&Method::GET, "h:1", "/v1/responses/r?stream=true", &[], 0).unwrap();
        assert_eq!(
            String::from_utf8(head).unwrap(),
            "GET /v1/responses/r?stream=true HTTP/1.1\r\nhost: h:1\r\n\r\n"
        );
        let request = |authority, path| request(&Method::POST, authority, path, &[], 0);
        assert_eq!(request("h:1\r\nx: y", "/"), None);
        assert_eq!(request("h:1", "/a b"), None);
    }

    #[test]
    fn bodies_end_as_their_heads_say() {
        let framing = |headers: &str| whole(&format!("HTTP/1.1 200 OK\r\n{headers}\r\n"));
        assert!(matches!(framing("Content-Length: 7\r\n").framing, Framing::Length(7)));
        assert!(matches!(framing("transfer-encoding: Chunked\r\n").framing, Framing::Chunked(_)));
        assert!(matches!(framing("").framing, Framing::ToEnd));
        assert!(
            framing("content-length: 7\r\ncontent-length: 7\r\n").framing.decode(b"", &mut vec![]).is_ok()
        );
        assert!(matches!(whole("HTTP/1.1 204 No Content\r\n\r\n").framing, Framing::Length(0)));
    }

    #[test]
    fn only_named_headers_are_kept() {
        let text = "HTTP/1.1 200 OK\r\nDate: now\r\nContent-Type: a/b\r\nx-name: y\r\nRetry-After: 1\r\n\r\n";
        let headers = whole(text).headers;
        let kept: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        assert_eq!(kept, ["content-type", "retry-after"]);
    }

    #[test]
    fn connections_are_kept_as_their_heads_say() {
        let keep =
            |version: &str, headers: &str| whole(&format!("HTTP/{version} 200 OK\r\n{headers}\r\n")).keep;
        assert!(keep("1.1", "content-length: 0\r\n"));
        assert!(!keep("1.1", "content-length: 0\r\nConnection: x, Close\r\n"));
        assert!(!keep("1.0", "content-length: 0\r\n"));
        assert!(keep("1.0", "content-length: 0\r\nconnection: Keep-Alive\r\n"));
        assert!(!keep("1.1", ""), "its end is the body's");
        assert!(
            !keep("1.1", "content-length: 0\r\ntransfer-encoding: chunked\r\n"),
            "who knows which is meant"
        );
    }

    #[test]
    fn heads_that_inform_are_passed_over() {
        let early = "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n";
        assert!(read(early).unwrap().is_none());
        let text =
            format!("{early}HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab");
        let (head, taken) = read(&text).unwrap().unwrap();
        assert_eq!((head.status, &text[taken..]), (StatusCode::OK, "ab"));
    }

    #[test]
    fn what_is_no_head_is_refused() {
        for text in [
            "HTTP/1.1 200 OK\r\ncontent-length: x\r\ncontent-length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 6\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\n",
            "hello\r\n\r\n",
            "HTTP/1.1 2 OK\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length:\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 200 OK\r\nna me: x\r\n\r\n",
        ] {
            assert!(matches!(read(text), Err(WireError::Head(_))), "{text:?}: {:?}", read(text));
        }
        let many = "a: b\r\n".repeat(MAX_HEADERS + 1);
        assert!(read(&format!("HTTP/1.1 200 OK\r\n{many}\r\n")).is_err());
        let long = "x".repeat(MAX_HEAD);
        assert!(read(&format!("HTTP/1.1 200 OK\r\na: {long}")).is_err());
    }
}
