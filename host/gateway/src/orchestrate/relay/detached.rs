//! A relay without its client: it left, has the end of its answer, or does not read.

use http::Response;
use pointsman_orchestration::Event;

use super::Relay;
use crate::{
    openai::error::ApiError,
    orchestrate::{
        Drive,
        client::{connection::ClientConnection, unread_booking::UnreadBooking},
        executor::Reached,
    },
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
        self.drive.reported.client_gone = true;
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
    pub(super) fn go_on(mut self: Box<Self>) {
        self.client = None;
        if !self.over {
            let tracker = self.drive.state.tracker.clone();
            tracker.spawn(self.drain());
        }
    }

    /// Sets the connection that takes the stream.
    pub(super) fn set_client(&mut self, client: Option<ClientConnection>) {
        self.client = client;
        self.tell_booking();
    }

    /// Lets the client's connection release the booking of the leg that answers: while the client does not
    /// read, this relay is not polled.
    pub(super) fn tell_booking(&mut self) {
        if let (Some(client), Some(booking)) = (&self.client, self.drive.runs.answering.booking.handle()) {
            client.set_booking(Some(UnreadBooking::new(self.drive.state.clone(), booking)));
        }
    }

    /// Notes that the client does not read. Its connection releases the booking, and ends at the deadline.
    pub(super) fn not_read(&mut self) {
        if let Some(incoming) = &mut self.incoming {
            incoming.rest();
        }
    }
}
