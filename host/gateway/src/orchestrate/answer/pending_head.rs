//! The head of a decode answer that arrives while prefill is still running.
//!
//! Some engines send it before the prefill ended. Passing it on would rule out a retry when prefill fails, so
//! it waits for the first event of the body or for the end of prefill, whichever comes first.

use http::Response;

use crate::{openai::sse, orchestrate::Drive, upstream::Body};

impl Drive {
    /// Keeps a head until it can be passed on. Returns it at once if prefill is already over.
    pub(crate) fn keep_head(&mut self, head: Response<Body>) -> Option<Response<Body>> {
        if !self.prefill_runs() {
            return Some(head);
        }
        self.runs.answering.pending_head = Some(head);
        None
    }

    /// Takes the head that was kept, once prefill is over.
    pub(crate) fn due_head(&mut self) -> Option<Response<Body>> {
        if self.prefill_runs() { None } else { self.runs.answering.pending_head.take() }
    }
}

/// Waits until the body of a head has an event, an end or an error; without a head, forever. A comment that
/// keeps the connection is not an event.
pub(crate) async fn first_event(head: Option<&mut Response<Body>>) {
    match head {
        Some(head) => std::future::poll_fn(|cx| head.body_mut().poll_peek(cx, sse::has_data)).await,
        None => std::future::pending().await,
    }
}
