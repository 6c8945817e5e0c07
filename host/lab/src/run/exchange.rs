//! Exchange of bookings between gateways. Messages come from the production encoder, reach the other gateways
//! after a delay, and are applied by the production tables.

use std::sync::Arc;

use bytes::Bytes;
use pointsman_replicas::{Counters, Effect, Outbox, PeerLimits, Peers};
use pointsman_workers::{Journal, Registry, Snapshot};
use prefix_index::PrefixIndex;
use tokio::time::{Duration, Instant};

use super::{Event, Lab};
use crate::fleet::Fleet;

/// Maximum number of changed bookings that wait for the next batch.
const JOURNAL_LENGTH: usize = 1 << 20;
/// Limits that are larger than any run needs.
const LIMITS: PeerLimits = PeerLimits { peers: 1_024, bookings: 1 << 24, hashes: 1 << 30 };
/// Start time of every gateway, as their messages give it.
const INCARNATION: u64 = 1;
const LEASE_MS: u64 = 300_000;

/// State of one gateway in the exchange.
pub(super) struct Exchange {
    outbox: Outbox,
    peers: Peers,
    /// Virtual time before which the gateway sends no further batch.
    next_batch: Duration,
}

/// Messages that gateways sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangedMessages {
    /// Number of messages.
    pub messages: u64,
    /// Number of their bytes, without those of NATS.
    pub bytes: u64,
}

/// Name of the gateway at a position.
fn name(place: usize) -> Arc<str> {
    format!("gateway-{place}").into()
}

/// Returns a registry, and the outbox of its bookings if gateways exchange them.
pub(super) fn registry(fleet: &Fleet) -> (Registry, Option<Outbox>) {
    if !fleet.gateways.exchange_bookings() {
        return (Registry::default(), None);
    }
    let (journal, changed) = Journal::new(JOURNAL_LENGTH);
    let outbox = Outbox::new(changed, INCARNATION, LEASE_MS, fleet.block_tokens);
    (Registry::with_journal(Some(journal)), Some(outbox))
}

impl Exchange {
    pub(super) fn new(place: usize, outbox: Outbox, fleet: &Fleet, snapshot: &Snapshot) -> Self {
        let counters = Arc::new(Counters::default());
        let mut peers = Peers::new((name(place), INCARNATION), fleet.block_tokens, LIMITS, counters);
        peers.set_workers(snapshot);
        Self { outbox, peers, next_batch: Duration::ZERO }
    }

    /// Applies a message from the gateway at position `from`.
    fn receive(&mut self, from: usize, message: &[u8], index: &PrefixIndex) {
        let now = Instant::now();
        // This process encoded the message, so none is refused.
        for effect in self.peers.receive(&name(from), message, now).unwrap_or_default() {
            if let Effect::Sent { worker, rank, prefix } = effect {
                index.record(worker, rank, &prefix, now);
            }
        }
    }
}

impl Lab<'_> {
    /// Sends a change at once, or with the next batch of each gateway.
    pub(super) fn send_first_change(&mut self) {
        if !self.fleet.gateways.exchange_bookings() {
            return;
        }
        self.send_batches();
        let interval = self.fleet.gateways.interval;
        if !interval.is_zero() && !std::mem::replace(&mut self.telling, true) {
            self.plan(self.now + interval, Event::SendBookings);
        }
    }

    /// Sends the batches that are due, and plans the next ones if requests run.
    pub(super) fn send_bookings(&mut self) {
        self.send_batches();
        self.telling = !self.flights.is_empty();
        if self.telling {
            self.plan(self.now + self.fleet.gateways.interval, Event::SendBookings);
        }
    }

    /// Sends the batches of gateways that sent none within the interval.
    fn send_batches(&mut self) {
        let (now, interval) = (self.now, self.fleet.gateways.interval);
        let mut batches: Vec<(usize, Bytes)> = Vec::new();
        for (place, gateway) in self.gateways.iter_mut().enumerate() {
            let Some(exchange) = gateway.exchange.as_mut().filter(|exchange| exchange.next_batch <= now)
            else {
                continue;
            };
            let messages = exchange.outbox.batch(Vec::new());
            if !messages.is_empty() {
                exchange.next_batch = now + interval;
            }
            batches.extend(messages.into_iter().map(|message| (place, message)));
        }
        let delay = self.fleet.gateways.delay;
        for (from, message) in batches {
            self.exchanged.messages += 1;
            self.exchanged.bytes += message.len() as u64;
            if delay.is_zero() {
                self.receive_bookings(from, &message);
            } else {
                self.plan(self.now + delay, Event::BookingsArrive(from, message));
            }
        }
    }

    /// Delivers a message to every gateway except its sender.
    pub(super) fn receive_bookings(&mut self, from: usize, message: &[u8]) {
        for (_, gateway) in self.gateways.iter_mut().enumerate().filter(|(place, _)| *place != from) {
            if let Some(exchange) = &mut gateway.exchange {
                exchange.receive(from, message, gateway.router.index());
            }
        }
    }
}
