//! Room for the large events of a stream among the bodies in flight [I6.22].

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use tokio::time::{Instant, Sleep, sleep};

use super::Relay;
use crate::{
    budget::Share,
    upstream::{CallError, ROOM_INTERVAL, ROOM_TIMEOUT},
};

/// Share of a stream in the bytes of bodies in flight.
pub(super) struct EventRoom {
    share: Share,
    wait: Option<Box<RoomWait>>,
}

/// Wait of a stream for room.
struct RoomWait {
    next_try: Pin<Box<Sleep>>,
    end: Instant,
}

impl EventRoom {
    pub(super) fn of(share: Share) -> Self {
        Self { share, wait: None }
    }

    /// The stream that waited is not read any more.
    pub(super) fn waits_no_more(&mut self) {
        self.wait = None;
    }
}

impl Relay {
    /// Takes room for what the relay buffers before it reads more: an event that has not ended, and events
    /// that are held back. Events that the client has not taken keep theirs, since nothing is read then.
    /// Without room, the stream fails after a while. After its last event, what comes is not kept, and needs
    /// no room.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let bytes = self.splitter.room().capacity() + self.held.as_ref().map_or(0, Vec::len);
            if self.room.share.hold_events(bytes) || self.closed {
                self.room.wait = None;
                return Poll::Ready(());
            }
            self.not_read();
            let begins =
                || RoomWait { next_try: Box::pin(sleep(ROOM_INTERVAL)), end: Instant::now() + ROOM_TIMEOUT };
            let wait = self.room.wait.get_or_insert_with(|| Box::new(begins()));
            std::task::ready!(wait.next_try.as_mut().poll(cx));
            if Instant::now() >= wait.end {
                self.room.wait = None;
                self.fail(CallError::NoRoom(self.room.share.limit()));
                return Poll::Ready(());
            }
            wait.next_try.as_mut().reset(Instant::now() + ROOM_INTERVAL);
        }
    }
}
