//! Whether remote prefill is available for a model, and whether the model is loaded.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Availability of remote prefill for a model (B2). It outlives workers and snapshots.
#[derive(Debug, Default)]
pub struct Activation {
    state: AtomicU8,
    /// Whether an engine unloaded the model since a worker last served it.
    unloaded: AtomicBool,
}

/// The states of a model's remote prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationState {
    /// No prefill worker was ever ready.
    Pending,
    /// Prefill and decode workers are up.
    Active,
    /// Prefill or decode workers were up before, and are not now.
    Unavailable,
}

impl Activation {
    /// Returns the state after the last observation.
    #[must_use]
    pub fn state(&self) -> ActivationState {
        match self.state.load(Ordering::Relaxed) {
            0 => ActivationState::Pending,
            1 => ActivationState::Active,
            _ => ActivationState::Unavailable,
        }
    }

    /// Updates the state by whether both pools are up. Returns the new state if it changed.
    pub fn observe(&self, up: bool) -> Option<ActivationState> {
        let before = self.state();
        let after = match (up, before) {
            (true, _) => ActivationState::Active,
            (false, ActivationState::Pending) => ActivationState::Pending,
            (false, _) => ActivationState::Unavailable,
        };
        if after == before {
            return None;
        }
        self.state.store(if up { 1 } else { 2 }, Ordering::Relaxed);
        Some(after)
    }

    pub(super) fn is_unloaded(&self) -> bool {
        self.unloaded.load(Ordering::Relaxed)
    }

    pub(super) fn set_unloaded(&self, unloaded: bool) {
        self.unloaded.store(unloaded, Ordering::Relaxed);
    }
}

impl ActivationState {
    /// Returns the stable label in metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Active => "active",
            Self::Unavailable => "unavailable",
        }
    }
}
