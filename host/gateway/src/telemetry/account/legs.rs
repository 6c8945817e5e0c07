//! The legs of a request: the time at which each was sent, and how it ended.

use pointsman_routing::{LegFailure, LegRun, Receipt};
use pointsman_workers::{Leg, PerLeg};
use tokio::time::Instant;

use super::{Account, micros};
use crate::{
    openai::trace_context::Span, telemetry::metrics::CANCELLED, telemetry::traces::LegTarget,
    upstream::CallError,
};

/// A leg that was sent and has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpenLeg {
    leg: Leg,
    engine: &'static str,
    sent: Instant,
}

impl Account {
    /// Records that a leg is sent, and returns when.
    pub(crate) fn leg_sent(&mut self, id: Span, target: LegTarget<'_>) -> Instant {
        let leg = target.leg;
        self.end_leg(leg, CANCELLED);
        let engine = target.candidate.worker.spec().engine.as_str();
        let sent = Instant::now();
        let sent_at = micros(sent - self.started);
        self.times.sent[leg] = Some(sent_at);
        if let Some(receipt) = self.newest_receipt(leg) {
            receipt.run = Some(LegRun { sent: sent_at, ended: None, failure: None });
        }
        if leg == Leg::Prefill {
            self.times.prefill_ended = None;
        }
        self.open_legs[leg] = Some(OpenLeg { leg, engine, sent });
        if let Some(trace) = &mut self.trace {
            trace.leg_sent(id, target);
        }
        sent
    }

    /// Records that a leg ended, or why it failed.
    pub(crate) fn leg_ended(&mut self, leg: Leg, outcome: Result<(), &'static str>) {
        self.quota.model_ran |= outcome == Err("timeout");
        self.end_leg(leg, outcome.err().unwrap_or("ok"));
        if let Some(trace) = &mut self.trace {
            trace.leg_ended(leg, outcome);
        }
    }

    /// Records why a leg failed.
    pub(crate) fn leg_failed(&mut self, leg: Leg, error: &CallError) {
        self.leg_ended(leg, Err(error.kind()));
        if let Some(run) = self.newest_receipt(leg).and_then(|receipt| receipt.run.as_mut()) {
            let status = match error {
                CallError::Status { status, .. } => Some(status.as_u16()),
                _ => None,
            };
            run.failure = Some(LegFailure { kind: error.kind(), status });
        }
    }

    /// Records that the gateway ended a leg.
    pub(crate) fn leg_cancelled(&mut self, leg: Leg) {
        self.end_leg(leg, CANCELLED);
        if let Some(trace) = &mut self.trace {
            trace.leg_cancelled(leg);
        }
    }

    /// Records that the request is given up: its client left, or its time is over. A whole answer that is not
    /// complete has about `output` tokens.
    pub(crate) fn given_up(&mut self, output: u32) {
        let PerLeg { prefill, answering } = &self.open_legs;
        self.quota.model_ran |= prefill.is_some() || answering.is_some();
        if answering.is_some() {
            self.quota.given_up_output = output;
        }
    }

    /// Counts the legs that are still running when the request ends.
    pub(super) fn count_open_legs(&mut self) {
        self.end_leg(Leg::Prefill, CANCELLED);
        self.end_leg(Leg::Aggregated, CANCELLED);
    }

    /// Returns the newest decision about a leg.
    fn newest_receipt(&mut self, leg: Leg) -> Option<&mut Receipt> {
        self.receipts.iter_mut().rev().find(|receipt| receipt.leg == leg)
    }

    /// Ends a leg, if it is running: counts it and observes its duration.
    fn end_leg(&mut self, leg: Leg, outcome: &'static str) {
        let Some(open) = self.open_legs[leg].take() else { return };
        let now = Instant::now();
        let ended = micros(now - self.started);
        if leg == Leg::Prefill {
            self.times.prefill_ended = Some(ended);
        }
        if let Some(run) = self.newest_receipt(open.leg).and_then(|receipt| receipt.run.as_mut()) {
            run.ended = Some(ended);
        }
        self.metrics.leg_ended(open.leg.as_str(), open.engine, outcome, now - open.sent);
    }
}
