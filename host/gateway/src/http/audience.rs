//! Kinds of peers of a listener.

use std::{net::IpAddr, sync::Arc};

use crate::{
    budget::Budget,
    state::{SharedState, State, address_budget::AddressShare},
    tls::ListenerTls,
};

/// Maximum number of operators' connections.
const OPERATORS_CONNECTIONS: usize = 256;
/// Maximum number of proxies' connections to one data thread.
#[cfg(feature = "ext-proc")]
const PROXIES_CONNECTIONS: usize = 1_024;

/// Kinds of peers of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Clients. Their listeners share one limit of connections.
    Clients,
    /// Operators.
    Operators,
    /// Proxies that ask for endpoints. They speak HTTP/2, also without TLS.
    #[cfg(feature = "ext-proc")]
    Proxies,
}

impl Audience {
    /// Returns the budget of this audience's connections.
    pub(super) fn connections(self, shared: &SharedState) -> Arc<Budget> {
        match self {
            Self::Clients => shared.get().connections.clone(),
            Self::Operators => Budget::new(OPERATORS_CONNECTIONS),
            #[cfg(feature = "ext-proc")]
            Self::Proxies => Budget::new(PROXIES_CONNECTIONS),
        }
    }

    /// Counts a connection of an address; `None` if these are not limited. Connections of a trusted proxy
    /// belong to many clients.
    ///
    /// # Errors The limit, when the address has this many connections open.
    pub(super) fn of_address(
        self,
        shared: &SharedState,
        address: IpAddr,
    ) -> Result<Option<AddressShare>, usize> {
        let state = shared.get();
        let limit = state.settings.connections_per_address;
        if self != Self::Clients || limit == 0 || state.settings.is_trusted_proxy(address) {
            return Ok(None);
        }
        state.connections_by_address.reserve(address, limit).map(Some).ok_or(limit)
    }

    /// Returns the TLS of this audience's listeners.
    pub(super) fn tls(self, state: &State) -> &ListenerTls {
        match self {
            Self::Clients => &state.tls.clients,
            Self::Operators => &state.tls.operators,
            #[cfg(feature = "ext-proc")]
            Self::Proxies => &state.tls.proxies,
        }
    }

    /// Returns whether its connections speak HTTP/2 without agreeing on it.
    pub(super) fn speaks_http2_only(self) -> bool {
        !matches!(self, Self::Clients | Self::Operators)
    }

    /// Returns the label of this audience's listeners.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Clients => "clients",
            Self::Operators => "operators",
            #[cfg(feature = "ext-proc")]
            Self::Proxies => "ext_proc",
        }
    }
}
