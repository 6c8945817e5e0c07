//! Counts events.

use std::time::Duration;

use pointsman_routing::SlotKind;

use super::{
    AdminLabels, FallbackLabels, LegLabels, ListenerLabels, Metrics, Name, OTHER, ReasonLabels,
    RequestLabels, ResultLabels, seconds,
};

impl Metrics {
    /// Counts a request that no endpoint takes.
    pub(crate) fn without_endpoint(&self, status: u16, code: &'static str) {
        let labels = RequestLabels { endpoint: "other", model: Name(OTHER.clone()), status, code };
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a leg that was sent and ended, and observes its duration.
    pub(crate) fn leg_ended(
        &self,
        leg: &'static str,
        engine: &'static str,
        outcome: &'static str,
        took: Duration,
    ) {
        let labels = LegLabels { leg, engine, outcome };
        self.legs.get_or_create(&labels).inc();
        self.leg_seconds.get_or_create(&labels).observe(seconds(took));
    }

    /// Counts a decision that the native fallback made instead of the slot's policy.
    pub fn fell_back(&self, slot: SlotKind, reason: &'static str) {
        self.fallbacks.get_or_create(&FallbackLabels { slot: slot.as_str(), reason }).inc();
    }

    /// Counts a wrong key.
    pub(crate) fn wrong_key(&self, listener: &'static str) {
        self.wrong_keys.get_or_create(&ListenerLabels { listener }).inc();
    }

    /// Counts a fetch of an identity server's public keys.
    pub(crate) fn key_set_fetch(&self, result: &'static str) {
        self.key_set_fetches.get_or_create(&ResultLabels { result }).inc();
    }

    /// Counts a change at the operators' listener.
    pub(crate) fn admin_change(&self, action: Name, status: u16) {
        self.admin_changes.get_or_create(&AdminLabels { action, status }).inc();
    }

    /// Counts a request that breaks engines.
    pub(crate) fn poison(&self, result: &'static str) {
        self.poison_requests.get_or_create(&ResultLabels { result }).inc();
    }

    /// Counts a connection that the gateway ended.
    pub(crate) fn connection_ended(&self, reason: &'static str) {
        self.connections_ended.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts a handoff.
    pub fn handoff(&self, result: &'static str) {
        self.handoffs.get_or_create(&ResultLabels { result }).inc();
    }
}
