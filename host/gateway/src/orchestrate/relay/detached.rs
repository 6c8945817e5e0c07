//! A relay without its client: it left, has the end of its answer, or does not read.

use http::Response;
use pointsman_orchestration::Event;
use tokio::time::Instant;

use super::Relay;
use crate::{
    openai::error::ApiError,
    orchestrate::{Drive, executor::Reached},
    upstream,
};

/// Reads the stream of a client that left, until the state machine ends the request.
pub(crate) async fn drain(drive: Box<Drive>, head: Response<upstream::Body>) {
    let mut relay = Box::new(Relay::new(drive, head.into_body(), true));
    relay.detached = true;
    relay.resumption.forget_transcript();
    relay.drain().await;
}

impl Relay {
    async fn drain(mut self: Box<Self>) {
        // The legs know already that there is no client.
        self.drive.saw_gone = true;
        while !self.over {
            self.out.clear();
            if self.incoming.is_some() {
                std::future::poll_fn(|cx| self.poll_step(cx)).await;
                continue;
            }
            // The prefill of a rest may run, and the decode leg that consumes its handoff be sent.
            if let Some(Reached::Stream(head)) = self.drive.step().await {
                self.attach(head);
            }
            self.perform_all();
        }
    }

    /// Continues without the client, as far as engines depend on it. `lost` says why there is no client.
    pub(super) fn client_gone(mut self: Box<Self>, lost: &ApiError) {
        self.drive.gone.cancel();
        if !std::mem::replace(&mut self.detached, true) {
            self.drive.account.ended(lost.status().as_u16(), lost.code());
        }
        self.report(Event::ClientGone);
        self.go_on();
    }

    /// Continues in the background, when the client has got the end of its answer.
    pub(super) fn go_on(self: Box<Self>) {
        if !self.over {
            let tracker = self.drive.state.tracker.clone();
            tracker.spawn(self.drain());
        }
    }

    /// Releases bookings that expired while the client does not read. Its connection ends at the deadline.
    pub(super) fn not_read(&mut self) {
        if let Some(incoming) = &mut self.incoming {
            incoming.rest();
        }
        if self.drive.stale_at().is_some_and(|stale| Instant::now() >= stale) {
            self.drive.expire();
        }
    }
}
