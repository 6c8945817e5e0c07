//! Who connects to a listener.

use std::sync::Arc;

use crate::{budget::Budget, state::SharedState};

/// Limit of operators' connections.
const OPERATORS_CONNECTIONS: usize = 256;

/// Who connects to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Clients. Their listeners share one limit of connections.
    Clients,
    /// Operators.
    Operators,
}

impl Audience {
    /// Returns the budget of this audience's connections.
    pub(super) fn connections(self, shared: &SharedState) -> Arc<Budget> {
        match self {
            Self::Clients => shared.get().connections.clone(),
            Self::Operators => Budget::new(OPERATORS_CONNECTIONS),
        }
    }
}
