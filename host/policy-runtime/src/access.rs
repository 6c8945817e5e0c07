//! Imports of a slot's policies: the grants of the operator, and the state and log that they give access
//! to.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    slot_log::SlotLog,
    state::{State, shadow::ShadowState},
};

/// An interface that the operator permits policies to import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Grant {
    /// `log`: lines in the daemon's log.
    Log,
    /// `state`: values kept between calls.
    State,
    /// WASI, with an empty context: no files, no environment, and the clock and randomness of the call.
    Wasi,
}

impl Grant {
    /// Returns the name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::State => "state",
            Self::Wasi => "wasi",
        }
    }
}

/// Grants of one slot, with the slot's state and log. Clones share both.
#[derive(Clone, Debug)]
pub struct Access {
    grants: Arc<[Grant]>,
    state: Arc<State>,
    shadow: Arc<ShadowState>,
    log: Arc<SlotLog>,
}

impl Access {
    /// Grants of a slot whose entry has none: log lines, and WASI with an empty context.
    pub const DEFAULT: [Grant; 2] = [Grant::Log, Grant::Wasi];
    /// All grants.
    pub const ALL: [Grant; 3] = [Grant::Log, Grant::State, Grant::Wasi];

    /// Makes access with an empty state of its own.
    #[must_use]
    pub fn new(grants: &[Grant]) -> Self {
        Self { grants: grants.into(), state: Arc::default(), shadow: Arc::default(), log: Arc::default() }
    }

    /// Returns whether the slot grants this.
    #[must_use]
    pub fn grants(&self, grant: Grant) -> bool {
        self.grants.contains(&grant)
    }

    /// Returns access to the same state and log with other grants.
    #[must_use]
    pub(crate) fn granting(&self, grants: &[Grant]) -> Self {
        Self { grants: grants.into(), ..self.clone() }
    }

    /// Returns access with the same grants and an empty state.
    #[must_use]
    pub(crate) fn with_empty_state(&self) -> Self {
        Self { state: Arc::default(), shadow: Arc::default(), ..self.clone() }
    }

    pub(crate) fn granted(&self) -> &Arc<[Grant]> {
        &self.grants
    }

    /// Returns the state that the slot's policies share.
    #[must_use]
    pub fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// Returns the state that the slot's shadow has of its own.
    pub(crate) fn shadow(&self) -> &Arc<ShadowState> {
        &self.shadow
    }

    pub(crate) fn log(&self) -> &Arc<SlotLog> {
        &self.log
    }
}

impl Default for Access {
    fn default() -> Self {
        Self::new(&Self::DEFAULT)
    }
}
