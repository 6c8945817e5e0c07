//! A future that survives its caller: polled in place as long as somebody waits for it, and when that somebody goes away,
//! told so and finished in the background.
//!
//! A client that leaves must not cut off work that others depend on: a handoff in flight has to be consumed (spec E1).

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The future, its "nobody waits any more" signal, and where it goes on.
pub(crate) struct Detach<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    future: Option<Pin<Box<F>>>,
    gone: CancellationToken,
    tracker: TaskTracker,
}

impl<F> Detach<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    /// `gone` is cancelled when the caller goes away first.
    pub(crate) fn new(future: F, gone: CancellationToken, tracker: TaskTracker) -> Self {
        Self { future: Some(Box::pin(future)), gone, tracker }
    }
}

impl<F> Future for Detach<F>
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

impl<F> Drop for Detach<F>
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
    async fn a_dropped_caller_is_told_and_the_work_goes_on() {
        let (gone, tracker) = (CancellationToken::new(), TaskTracker::new());
        let (done, finished) = tokio::sync::oneshot::channel();
        let signal = gone.clone();
        let work = Detach::new(
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
        assert_eq!(Detach::new(async { 3 }, gone.clone(), tracker.clone()).await, 3);
        assert!(!gone.is_cancelled() && tracker.is_empty());
    }
}
