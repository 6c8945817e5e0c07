//! Room that connections take within the limits of their listener. Health checks ask the operators' listener
//! on new connections, so those without a request give way to them there.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use super::{audience::Audience, refuse_connection::TooMany};
use crate::{
    budget::{Budget, Share},
    count_by_key::{CountByKey, Counted},
    state::{SharedState, network::network},
    telemetry::metrics::Metrics,
};

/// The parts of the limits that one connection takes.
type Shares = (Share, Option<Counted<IpAddr>>);

/// Room of one connection.
#[derive(Debug)]
pub(super) struct Room {
    /// `None`: another connection has them.
    shares: Mutex<Option<Shares>>,
    had_request: AtomicBool,
    gave_way: CancellationToken,
}

impl Room {
    /// Records that the head of a request arrived.
    pub(super) fn has_request(&self) {
        self.had_request.store(true, Relaxed);
    }

    /// Serves the connection until it gives way.
    pub(super) async fn until_it_gives_way(
        self: Arc<Self>,
        serving: impl Future<Output = ()>,
        metrics: Arc<Metrics>,
    ) {
        if self.gave_way.run_until_cancelled(serving).await.is_none() {
            metrics.connection_ended("idle");
        }
    }
}

/// Room for the connections of one listener.
pub(super) struct Rooms {
    audience: Audience,
    shared: SharedState,
    budget: Arc<Budget>,
    by_address: Arc<CountByKey<IpAddr>>,
    /// Operators' connections without a request, oldest first.
    silent: VecDeque<(IpAddr, Weak<Room>)>,
}

impl Rooms {
    pub(super) fn new(audience: Audience, shared: &SharedState) -> Self {
        let (budget, by_address) = (audience.connections(shared), audience.by_address(shared));
        Self { audience, shared: shared.clone(), budget, by_address, silent: VecDeque::new() }
    }

    /// Takes room for a connection.
    ///
    /// # Errors
    /// The limit that it exceeds.
    pub(super) fn take(&mut self, address: IpAddr) -> Result<Arc<Room>, TooMany> {
        let shares = loop {
            match self.shares(address) {
                Err(exceeded) if self.makes_way(exceeded, address) => {}
                taken => break taken?,
            }
        };
        let (had_request, gave_way) = (AtomicBool::new(false), CancellationToken::new());
        let room = Arc::new(Room { shares: Mutex::new(Some(shares)), had_request, gave_way });
        if self.audience == Audience::Operators {
            self.forget_others();
            self.silent.push_back((address.to_canonical(), Arc::downgrade(&room)));
        }
        Ok(room)
    }

    fn shares(&self, address: IpAddr) -> Result<Shares, TooMany> {
        let share = self.audience.reserve(&self.budget, address);
        let share = share.ok_or(TooMany::InAll(self.budget.limit()))?;
        let of_address = self.audience.of_address(&self.shared, &self.by_address, address);
        Ok((share, of_address.map_err(TooMany::OfAddress)?))
    }

    /// Has the oldest connection give way whose room one of `address` may take. Those of this machine give
    /// way to each other only. Returns whether there is one.
    fn makes_way(&mut self, exceeded: TooMany, address: IpAddr) -> bool {
        self.forget_others();
        let address = address.to_canonical();
        let may_take = |other: IpAddr| match exceeded {
            TooMany::OfAddress(_) => network(other) == network(address),
            TooMany::InAll(_) => address.is_loopback() || !other.is_loopback(),
        };
        let found = self.silent.iter().position(|(other, _)| may_take(*other));
        let Some((_, room)) = found.and_then(|at| self.silent.remove(at)) else { return false };
        if let Some(room) = room.upgrade() {
            // At once, for the new connection.
            drop(room.shares.lock().take());
            room.gave_way.cancel();
        }
        true
    }

    /// Forgets connections that ended or had a request.
    fn forget_others(&mut self) {
        self.silent.retain(|(_, room)| room.upgrade().is_some_and(|room| !room.had_request.load(Relaxed)));
    }
}
