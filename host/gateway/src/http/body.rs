//! Reads a request body within its limits: size, pauses of the client, and the request's deadline.

use std::{
    error::Error,
    io::{self, ErrorKind},
};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::{Duration, Instant, timeout_at};

use crate::openai::error::ApiError;

/// Limits of a body.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimits {
    /// Largest body.
    pub(super) bytes: usize,
    /// How long the client may pause.
    pub(super) idle: Duration,
    /// Deadline of the whole request.
    pub(super) deadline: Instant,
}

/// Reads a body whole. A body of one frame is not copied.
///
/// # Errors
/// [`ApiError`] that names the limit, or the failure of the client's connection.
pub(super) async fn read(body: Body, limits: BodyLimits) -> Result<Bytes, ApiError> {
    let mut body = Limited::new(body, limits.bytes);
    let (mut first, mut joined) = (Bytes::new(), BytesMut::new());
    loop {
        let until = limits.deadline.min(Instant::now() + limits.idle);
        let Ok(next) = timeout_at(until, body.frame()).await else {
            let late = until == limits.deadline;
            return Err(if late { ApiError::Deadline } else { ApiError::RequestTimeout(limits.idle) });
        };
        let Some(frame) = next else { break };
        let frame = frame.map_err(|error| {
            if error.is::<LengthLimitError>() {
                ApiError::PayloadTooLarge(limits.bytes)
            } else if is_cut(&*error) {
                ApiError::ClientClosed
            } else {
                ApiError::InvalidRequest(format!("body: {error}"))
            }
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if first.is_empty() && joined.is_empty() {
            first = data;
        } else {
            joined.extend_from_slice(&std::mem::take(&mut first));
            joined.extend_from_slice(&data);
        }
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

/// Whether the connection ended before the body did.
fn is_cut(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
        let incomplete =
            error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message);
        if incomplete || matches!(kind, Some(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)) {
            return true;
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;

    use super::*;

    const LIMITS: fn() -> BodyLimits = || BodyLimits {
        bytes: 10,
        idle: Duration::from_secs(30),
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
            assert_eq!(read(body(frames), LIMITS()).await.unwrap(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn each_limit_is_named() {
        let read = async |frames| read(body(frames), LIMITS()).await.unwrap_err();
        assert_eq!(read(vec![(0, "abcdef"), (0, "ghijk")]).await, ApiError::PayloadTooLarge(10));
        assert_eq!(read(vec![(0, "a"), (31, "b")]).await, ApiError::RequestTimeout(Duration::from_secs(30)));
        let slow = vec![(29, "a"), (29, "b"), (29, "c"), (29, "d")];
        assert_eq!(read(slow).await, ApiError::Deadline);
    }
}
