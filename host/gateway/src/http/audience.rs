//! Kinds of peers of a listener.

use std::{net::IpAddr, sync::Arc, time::Duration};

use crate::{
    budget::{Budget, Share},
    count_by_key::{CountByKey, Counted},
    state::{SharedState, State, network::network},
    tls::ListenerTls,
};

/// Maximum number of operators' connections.
const OPERATORS_CONNECTIONS: usize = 256;
/// Number of these that are kept free for this machine, where the health checks of a container ask.
const OPERATORS_LOOPBACK: usize = 32;
/// Maximum number of operators' connections of one address.
const OPERATORS_OF_ADDRESS: usize = 64;
/// Longest time without a whole head of a request on an operators' connection.
const OPERATORS_IDLE: Duration = Duration::from_secs(10);
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

    /// Takes a connection of an address from the budget of this audience; `None` if none is left for it.
    pub(super) fn reserve(self, budget: &Arc<Budget>, address: IpAddr) -> Option<Share> {
        let is_kept_out = self == Self::Operators && !address.to_canonical().is_loopback();
        let mut share = budget.share();
        share.grow(1, if is_kept_out { OPERATORS_LOOPBACK } else { 0 }).then_some(share)
    }

    /// Returns the count of this audience's connections by address.
    pub(super) fn by_address(self, shared: &SharedState) -> Arc<CountByKey<IpAddr>> {
        match self {
            Self::Clients => shared.get().connections_by_address.clone(),
            _ => Arc::default(),
        }
    }

    /// Counts a connection of an address; `None` if these are not limited. Connections of a trusted proxy
    /// belong to many clients.
    ///
    /// # Errors
    /// The limit, when the address has this many connections open.
    pub(super) fn of_address(
        self,
        shared: &SharedState,
        open: &Arc<CountByKey<IpAddr>>,
        address: IpAddr,
    ) -> Result<Option<Counted<IpAddr>>, usize> {
        let settings = &shared.get().settings;
        let limit = match self {
            Self::Clients => settings.connections_per_address,
            Self::Operators => OPERATORS_OF_ADDRESS,
            #[cfg(feature = "ext-proc")]
            Self::Proxies => 0,
        };
        if limit == 0 || settings.is_trusted_proxy(address) {
            return Ok(None);
        }
        open.enter_below(network(address), limit).map(Some).ok_or(limit)
    }

    /// Returns how long a connection may be without a whole head of a request, where clients have `idle`.
    pub(super) fn idle(self, idle: Duration) -> Duration {
        if self == Self::Operators { idle.min(OPERATORS_IDLE) } else { idle }
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

    /// Returns whether its listeners close when the drain begins. A proxy asks another gateway when it gets
    /// no connection, and passes a refusal on.
    pub(super) fn closes_for_drain(self) -> bool {
        self.speaks_http2_only()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i9_strangers_leave_connections_for_this_machine() {
        let [far, near, mapped] =
            ["192.0.2.1", "127.0.0.1", "::ffff:127.0.0.1"].map(|text| text.parse().unwrap());
        let budget = Budget::new(OPERATORS_CONNECTIONS);
        let take = |address| Audience::Operators.reserve(&budget, address);
        let _taken: Vec<_> = (0..OPERATORS_CONNECTIONS).map_while(|_| take(far)).collect();
        // I9.5
        assert_eq!(budget.used(), OPERATORS_CONNECTIONS - OPERATORS_LOOPBACK);
        let (_probe, _other) = (take(near).unwrap(), take(mapped).unwrap());
        assert!(take(far).is_none());
        let idle = Duration::from_secs(75);
        assert_eq!([Audience::Operators.idle(idle), Audience::Clients.idle(idle)], [OPERATORS_IDLE, idle]);
        let of_clients = Budget::new(1);
        assert!(Audience::Clients.reserve(&of_clients, far).is_some());
    }
}
