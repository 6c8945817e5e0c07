//! Runs the streams of a connection, and ends one whose client does not read.

use std::{pin::pin, sync::Arc, task::Poll};

use hyper::rt::Executor;
use tokio::time::Duration;
use tokio_util::task::TaskTracker;

use super::streams::{Stream, Streams};
use crate::state::drain_end::DrainEnd;

/// Spawns what the HTTP server runs for each stream.
#[derive(Clone)]
pub(super) struct Spawn {
    pub(super) streams: Arc<Streams>,
    pub(super) tasks: TaskTracker,
    /// How long a client may accept nothing of an answer.
    pub(super) write: Duration,
    pub(super) drain_end: DrainEnd,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Spawn {
    fn execute(&self, future: F) {
        // Without a stream it is the task of an upgrade, and no endpoint accepts one over HTTP/2.
        let Some(stream) = self.streams.take_opened() else { return };
        let (write, drain_end) = (self.write, self.drain_end.clone());
        self.tasks.spawn(async move {
            let mut drain_ends = pin!(drain_end.passed());
            // Has the end of the drain wake this task. Polled with each event, it would take a lock.
            let _ = futures_util::poll!(drain_ends.as_mut());
            // It ends with the task, and says then why its answer ended: that has to be known before.
            let mut future = pin!(future);
            tokio::select! {
                biased;
                () = future.as_mut() => {}
                () = stuck(&stream, write) => stream.client().set_too_slow(),
            }
        });
    }
}

/// Waits until the client has accepted nothing for `write`. The task that runs the stream polls it after the
/// stream itself, so that it sees every change.
async fn stuck(stream: &Stream, write: Duration) {
    let mut timer = None;
    std::future::poll_fn(|cx| {
        let Some(since) = stream.blocked_since() else { return Poll::Pending };
        let end = stream.client().deadline().map_or(since + write, |deadline| deadline.min(since + write));
        stream.client().poll_unread(cx, &mut timer, since, end)
    })
    .await;
}
