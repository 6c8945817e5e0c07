//! Pauses a stream while a request of a higher priority waits: its legs end, and its rest waits in the queue
//! until its turn comes (L5).

use pointsman_orchestration::{Event, PausableStream};
use tokio::time::Duration;

use super::{
    Relay,
    moves::{Departure, Obstacle},
};
use crate::orchestrate::failure::quarantine::would_be_quarantined;

impl Relay {
    /// Lets the stream be asked to pause, if its rest may be generated later. Called when a token of it
    /// arrived.
    pub(super) fn offer_to_pause(&mut self) {
        if !self.detached && self.resumption.transcript.is_ok() {
            self.drive.offer_to_pause();
        }
    }

    /// Pauses the stream if it is asked to, and can. Called between events.
    pub(super) fn pause_if_asked(&mut self) {
        let is_asked = self.drive.pausing.as_ref().is_some_and(PausableStream::is_asked);
        if !is_asked || self.resumption.moving.is_under_way() || !self.can_leave() {
            return;
        }
        match self.pause() {
            Ok(()) => {}
            Err(Obstacle::Later(pause)) => self.resumption.moving.waits_until(self.read_at + pause),
            Err(Obstacle::Stays(reason)) => {
                self.drive.pausing = None;
                self.drive.state.metrics.continued(reason, "preempt");
            }
        }
    }

    fn pause(&mut self) -> Result<(), Obstacle> {
        if self.drive.legs.has_paused_enough() {
            return Err(Obstacle::Stays("paused_twice"));
        }
        if would_be_quarantined(&self.drive.state, &self.drive.request).is_some() {
            return Err(Obstacle::Stays("quarantined"));
        }
        if !self.is_begun() || !self.drive.legs.may_leave() {
            return Err(Obstacle::Later(Duration::ZERO));
        }
        let rest = self.movable_rest()?;
        if !self.drive.pausing.as_mut().is_some_and(PausableStream::begin) {
            // The request of a higher priority waits no longer.
            return Ok(());
        }
        (self.resumption.rest, self.resumption.is_suspect) = (Some(rest), false);
        self.resumption.moving.begin(Departure::Pause);
        self.drive.begin_pause();
        self.report(Event::Pause);
        Ok(())
    }
}
