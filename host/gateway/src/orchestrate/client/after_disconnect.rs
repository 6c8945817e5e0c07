//! A future that outlives its caller: the caller polls it in place. When the caller is dropped, the future is
//! notified and finishes in the background, on the runtime that its sockets are registered with.
//!
//! A client that leaves must not cancel work that engines depend on: a handoff in flight has to be consumed
//! (E1).

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// A future with the token that signals a dropped caller, and the tracker that finishes it.
pub(crate) struct AfterDisconnect<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    future: Option<Pin<Box<F>>>,
    gone: CancellationToken,
    tracker: TaskTracker,
}

impl<F> AfterDisconnect<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    /// Wraps `future`. `gone` is cancelled when the caller is dropped first.
    pub(crate) fn new(future: F, gone: CancellationToken, tracker: TaskTracker) -> Self {
        Self { future: Some(Box::pin(future)), gone, tracker }
    }
}

impl<F> Future for AfterDisconnect<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let Some(future) = self.future.as_mut() else { return Poll::Pending };
        let output = std::task::ready!(future.as_mut().poll(cx));
        self.future = None;
        Poll::Ready(output)
    }
}

impl<F> Drop for AfterDisconnect<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            self.gone.cancel();
            self.tracker.spawn(async move { drop(future.await) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn when_the_caller_is_dropped_the_future_is_notified_and_finishes() {
        let (gone, tracker) = (CancellationToken::new(), TaskTracker::new());
        let (done, finished) = tokio::sync::oneshot::channel();
        let signal = gone.clone();
        let work = AfterDisconnect::new(
            async move {
                signal.cancelled().await;
                let _ = done.send(7);
            },
            gone,
            tracker.clone(),
        );
        drop(work);
        assert_eq!(finished.await, Ok(7));
        tracker.close();
        tracker.wait().await;
    }

    #[tokio::test]
    async fn a_caller_that_waits_gets_the_output_and_nothing_is_spawned() {
        let (gone, tracker) = (CancellationToken::new(), TaskTracker::new());
        assert_eq!(AfterDisconnect::new(async { 3 }, gone.clone(), tracker.clone()).await, 3);
        assert!(!gone.is_cancelled() && tracker.is_empty());
    }
}
