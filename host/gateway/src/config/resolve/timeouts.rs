//! `[timeouts]`.

use super::Problems;
use crate::config::{Timeouts, settings::TimeoutSettings};

impl Problems {
    pub(super) fn timeouts(&mut self, timeouts: &Timeouts) -> TimeoutSettings {
        let Timeouts {
            connect,
            request,
            body_idle,
            client_idle,
            client_write,
            realtime_idle,
            head,
            prefill_head,
            whole_head,
            event_idle,
            event_idle_max,
            stream_comment,
            abort,
            booking,
            drain,
        } = *timeouts;
        TimeoutSettings {
            connect: self.limit("timeouts.connect", connect),
            request: self.limit("timeouts.request", request),
            body_idle: self.limit("timeouts.body_idle", body_idle),
            head: self.limit("timeouts.head", head),
            prefill_head: self.limit("timeouts.prefill_head", prefill_head),
            whole_head: self.limit("timeouts.whole_head", whole_head),
            event_idle: self.limit("timeouts.event_idle", event_idle),
            event_idle_max: self.limit("timeouts.event_idle_max", event_idle_max),
            stream_comment,
            abort: self.limit("timeouts.abort", abort),
            client_idle: self.limit("timeouts.client_idle", client_idle),
            client_write: self.limit("timeouts.client_write", client_write),
            realtime_idle: self.limit("timeouts.realtime_idle", realtime_idle),
            booking: self.limit("timeouts.booking", booking),
            drain,
        }
    }
}
