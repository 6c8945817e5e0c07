//! The body of a request. A refusal may leave a part of it unread.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::task::TaskTracker;

use crate::http::unread_body::read_rest;

/// How much of an unread body is read, and for how long: what a client sends until it sees the answer.
const MAX_REST: usize = super::STREAM_WINDOW as usize;
const REST: Duration = Duration::from_secs(1);

/// A body whose rest is read after the answer. The HTTP server resets the stream of one that is dropped
/// before its end, right behind the answer, and some clients lose an answer that a reset follows (curl 7.88).
pub(super) struct RequestBody {
    body: Option<Incoming>,
    tasks: TaskTracker,
}

impl RequestBody {
    pub(super) fn new(body: Incoming, tasks: TaskTracker) -> Self {
        Self { body: Some(body), tasks }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let rest = self.body.take().filter(|body| !body.is_end_stream());
        // There is no runtime when the program ends.
        if let (Some(rest), Ok(runtime)) = (rest, tokio::runtime::Handle::try_current()) {
            self.tasks.spawn_on(read_rest(rest, MAX_REST, REST), &runtime);
        }
    }
}
