//! What the operator lets the policy of a slot reach besides facts: grants, and the slot's state and log behind them.

use std::sync::Arc;

use serde::Deserialize;

use crate::{guest::LogLimit, state::State};

/// One thing a policy may import.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Grant {
    /// Lines in the operator's log.
    Log,
    /// What it remembers between calls.
    State,
    /// WASI interfaces, which answer from an empty context: no files, no environment, the call's clock and randomness.
    Wasi,
}

impl Grant {
    /// Its name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Log => "log",
            Self::State => "state",
            Self::Wasi => "wasi",
        }
    }
}

/// What one slot's policies may reach. Clones share it.
#[derive(Clone, Debug)]
pub struct Access {
    grants: Arc<[Grant]>,
    state: Arc<State>,
    log: Arc<LogLimit>,
}

impl Access {
    /// What a slot grants when its entry says nothing: words, and WASI without a world behind it.
    pub const DEFAULT: [Grant; 2] = [Grant::Log, Grant::Wasi];
    /// Everything there is.
    pub const ALL: [Grant; 3] = [Grant::Log, Grant::State, Grant::Wasi];

    /// Access with an empty state of its own.
    #[must_use]
    pub fn new(grants: &[Grant]) -> Self {
        Self { grants: grants.into(), state: Arc::default(), log: Arc::default() }
    }

    /// Whether this may be imported.
    #[must_use]
    pub fn grants(&self, grant: Grant) -> bool {
        self.grants.contains(&grant)
    }

    /// The same slot's state and log under other grants.
    #[must_use]
    pub fn granting(&self, grants: &[Grant]) -> Self {
        Self { grants: grants.into(), ..self.clone() }
    }

    pub(crate) fn granted(&self) -> &Arc<[Grant]> {
        &self.grants
    }

    /// What the policies of this slot remember.
    #[must_use]
    pub fn state(&self) -> &Arc<State> {
        &self.state
    }

    pub(crate) fn log(&self) -> &Arc<LogLimit> {
        &self.log
    }
}

impl Default for Access {
    fn default() -> Self {
        Self::new(&Self::DEFAULT)
    }
}
