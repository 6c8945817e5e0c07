//! Reads a request body within its limits: size, pauses and rate of the client, the request's deadline, and
//! the bytes that all bodies in flight may take.

use std::{
    error::Error,
    io::{self, ErrorKind},
};

use axum::{
    body::Body,
    extract::{Request, State as Extract},
    http::{Response, header},
    middleware::Next,
};
use bytes::{Bytes, BytesMut};
use http_body::Body as HttpBody;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::{Duration, Instant, timeout_at};

use super::{
    content_coding::{Coding, Decoder},
    request_id,
};
use crate::{
    budget::Share,
    openai::{body_bytes::reserve, error::ApiError},
    state::{SharedState, State},
};

/// Memory that is reserved for a body at once because of its declared length, bytes: not touched before bytes
/// arrive, so a lie costs address space only.
const MAX_RESERVED: usize = 1024 * 1024;
/// Most bytes that are copied at once. The C library copies 4 KB and more with `rep movsb`, which takes 15
/// times as long on AMD's Zen 3 where source and target lie less than 32 bytes apart within their pages.
const COPIED_AT_ONCE: usize = 2 * 1024;
/// Maximum size of a body for operators' endpoints, bytes.
const MAX_OPERATORS_BODY: usize = 1024 * 1024;

/// Why a body cannot be read.
pub(super) type ReadError = Box<dyn Error + Send + Sync>;

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Largest body.
    pub(super) bytes: usize,
    /// How long the client may pause.
    pub(super) idle: Duration,
    /// Smallest rate in bytes per second, over the last two `idle`; 0: any rate.
    pub(super) min_rate: u32,
    /// Deadline of the whole request.
    pub(super) deadline: Instant,
}

impl BodyLimits {
    /// Returns the limits of a request whose first byte arrived at `started`.
    pub(crate) fn of(state: &State, started: Instant) -> Self {
        let settings = &state.settings;
        Self {
            bytes: settings.max_body_bytes,
            idle: settings.body_idle_timeout,
            min_rate: settings.min_body_rate,
            deadline: started + settings.request_timeout,
        }
    }
}

/// A body that is being read, and how it keeps to its limits.
#[derive(Clone, Debug)]
pub(crate) struct Upload {
    limits: BodyLimits,
    /// When bytes arrived last.
    read_at: Instant,
    /// Until when it is fast enough without further bytes.
    slowest: Instant,
}

impl Upload {
    pub(crate) fn begin(limits: BodyLimits) -> Self {
        let now = Instant::now();
        Self { limits, read_at: now, slowest: now + limits.idle }
    }

    /// Returns the deadline of the next bytes, and the error when it passes.
    pub(crate) fn next_until(&self) -> (Instant, ApiError) {
        let BodyLimits { idle, min_rate, deadline, .. } = self.limits;
        let mut first = (deadline, ApiError::Deadline);
        let paused = self.read_at + idle;
        if paused < first.0 {
            first = (paused, ApiError::RequestTimeout(idle));
        }
        if min_rate > 0 && self.slowest < first.0 {
            first = (self.slowest, ApiError::BodyTooSlow(min_rate));
        }
        first
    }

    /// Notes bytes, which earn time at the smallest rate. However many arrive at once, they leave two times
    /// `idle`: otherwise an upload could stand almost still for hours and keep its room.
    pub(crate) fn arrived(&mut self, bytes: usize) {
        self.read_at = Instant::now();
        let BodyLimits { idle, min_rate, .. } = self.limits;
        if min_rate > 0 {
            #[expect(clippy::cast_precision_loss, reason = "the size of a body")]
            let earned = Duration::from_secs_f64(bytes as f64 / f64::from(min_rate));
            self.slowest = (self.slowest + earned).min(self.read_at + 2 * idle);
        }
    }
}

/// Reads a body whole. A body of one frame without a coding is not copied. `held` grows with the bytes of the
/// body, decoded. The limit of its size holds before and after it is decoded.
///
/// # Errors
/// [`ApiError`] that names the limit, or the failure of the client's connection.
pub(super) async fn read(
    body: impl HttpBody<Data = Bytes, Error: Into<ReadError>> + Unpin,
    coding: Option<Coding>,
    limits: BodyLimits,
    held: &mut Share,
) -> Result<Bytes, ApiError> {
    // Before the first poll: the HTTP server then asks a client that waits for `100 Continue` to continue.
    if body.size_hint().lower() > limits.bytes as u64 {
        return Err(ApiError::PayloadTooLarge(limits.bytes));
    }
    let declared = usize::try_from(body.size_hint().lower()).unwrap_or(0);
    let (mut upload, mut received) = (Upload::begin(limits), 0);
    // Boxed, because few bodies have one.
    let mut decoder = coding.map(|coding| Decoder::new(coding, limits.bytes).map(Box::new)).transpose()?;
    let mut body = Limited::new(body, limits.bytes);
    let (mut first, mut joined) = (Bytes::new(), BytesMut::new());
    loop {
        let (until, late) = upload.next_until();
        let Ok(next) = timeout_at(until, body.frame()).await else { return Err(late) };
        let Some(frame) = next else { break };
        let frame = frame.map_err(|error| failure(&*error, limits.bytes))?;
        let Ok(data) = frame.into_data() else { continue };
        received += data.len();
        upload.arrived(data.len());
        if let Some(decoder) = &mut decoder {
            Box::pin(decoder.decode(&data, held)).await?;
            continue;
        }
        reserve(held, data.len())?;
        if first.is_empty() && joined.is_empty() {
            first = data;
        } else {
            // A frame refers to the buffer it was read into, which may be a thousand times as large: it is
            // copied.
            if joined.is_empty() {
                joined.reserve(declared.min(MAX_RESERVED));
            }
            for piece in
                [std::mem::take(&mut first), data].iter().flat_map(|data| data.chunks(COPIED_AT_ONCE))
            {
                joined.extend_from_slice(piece);
            }
        }
    }
    if let Some(decoder) = decoder.filter(|_| received > 0) {
        return decoder.finish(held);
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

fn failure(error: &(dyn Error + Send + Sync + 'static), limit: usize) -> ApiError {
    if error.is::<LengthLimitError>() {
        ApiError::PayloadTooLarge(limit)
    } else if is_cut(error) {
        ApiError::ClientClosed
    } else {
        ApiError::InvalidRequest(format!("body: {error}"))
    }
}

/// Returns whether the connection ended before the body did.
fn is_cut(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        let incomplete =
            error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message);
        // The client reset the stream, or its connection ended.
        let reset = error.downcast_ref::<h2::Error>().is_some_and(|error| error.is_remote() || error.is_io());
        if incomplete || reset || matches!(kind, Some(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset))
        {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Reads the body of an operator's request, within the limits of clients' bodies, before its handler.
pub(crate) async fn read_whole(
    Extract(shared): Extract<SharedState>,
    request: Request,
    next: Next,
) -> Response<Body> {
    let state = shared.get();
    let (mut parts, body) = request.into_parts();
    let coding = match Coding::of(&parts.headers) {
        Ok(coding) => coding,
        Err(error) => return error.response(&request_id(&parts.headers)).map(Body::from),
    };
    // The handler gets the decoded body.
    parts.headers.remove(header::CONTENT_ENCODING);
    parts.headers.remove(header::CONTENT_LENGTH);
    let mut limits = BodyLimits::of(&state, Instant::now());
    limits.bytes = limits.bytes.min(MAX_OPERATORS_BODY);
    let mut held = state.body_bytes.share();
    match read(body, coding, limits, &mut held).await {
        Ok(body) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Err(error) => error.response(&request_id(&parts.headers)).map(Body::from),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;
    use crate::budget::Budget;

    const LIMITS: fn() -> BodyLimits = || BodyLimits {
        bytes: 10,
        idle: Duration::from_secs(30),
        min_rate: 0,
        deadline: Instant::now() + Duration::from_secs(100),
    };

    /// A body whose frames arrive after a pause each.
    fn body(frames: Vec<(u64, &'static str)>) -> Body {
        Body::from_stream(stream::unfold(frames.into_iter(), |mut frames| async move {
            let (pause, text) = frames.next()?;
            tokio::time::sleep(Duration::from_secs(pause)).await;
            Some((Ok::<_, Infallible>(text), frames))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_joined_in_order() {
        for (frames, expected) in [
            (vec![], ""),
            (vec![(0, "abc")], "abc"),
            (vec![(29, "abc"), (29, ""), (29, "de"), (1, "f")], "abcdef"),
            (vec![(0, ""), (0, "ab")], "ab"),
        ] {
            let budget = Budget::new(100);
            let mut held = budget.share();
            assert_eq!(read(body(frames), None, LIMITS(), &mut held).await.unwrap(), expected);
            assert_eq!(budget.used(), expected.len());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_limit_is_named() {
        let within = async |frames, limits| {
            read(body(frames), None, limits, &mut Budget::new(300).share()).await.unwrap_err()
        };
        let read_all = async |frames| within(frames, LIMITS()).await;
        assert_eq!(read_all(vec![(0, "abcdef"), (0, "ghijk")]).await, ApiError::PayloadTooLarge(10));
        let idle = Duration::from_secs(30);
        assert_eq!(read_all(vec![(0, "a"), (31, "b")]).await, ApiError::RequestTimeout(idle));
        let slow = vec![(29, "a"), (29, "b"), (29, "c"), (29, "d")];
        assert_eq!(read_all(slow.clone()).await, ApiError::Deadline);
        let limits = BodyLimits { min_rate: 1, ..LIMITS() };
        assert_eq!(within(slow, limits).await, ApiError::BodyTooSlow(1));
        // A burst earns no more than two pauses: at its rate it would have earned 200 s.
        let limits = BodyLimits { bytes: 300, deadline: Instant::now() + Duration::from_secs(300), ..limits };
        let stalled = [vec![(0, &*"x".repeat(200).leak())], vec![(20, "a"); 5]].concat();
        // I5.7
        assert_eq!(within(stalled, limits).await, ApiError::BodyTooSlow(1));
        let full = read(body(vec![(0, "ab"), (0, "cd")]), None, LIMITS(), &mut Budget::new(3).share()).await;
        assert_eq!(full, Err(ApiError::BodyBytesInFlight(3)));
    }
}
