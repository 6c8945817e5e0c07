//! What the exchange does when its connection to NATS comes, goes, or is refused a subject.

use std::{sync::atomic::Ordering::Relaxed, time::Duration};

use futures_util::FutureExt as _;
use rand::RngExt as _;
use tokio::time::Instant;

use super::{
    BACKOFF, Exchange,
    bound::SentBindings,
    connect::{Connection, connect},
    denials::Denial,
    link::{Event, Link},
    state::StateLink,
};
use crate::{outbox::MIN_PAYLOAD, status::StateView};

/// A connection that lasted longer is replaced without a growing pause.
const STABLE: Duration = Duration::from_secs(5);
/// Beginning of the subjects of bookings. Those of the policies' state have another one.
const SUBJECTS: &str = "pointsman.";

/// Returns what is wrong with the largest message that a server takes.
fn too_small(max_payload: usize) -> Option<String> {
    (max_payload < MIN_PAYLOAD).then(|| {
        format!(
            "the server takes messages of at most {max_payload} bytes, so that the others miss bookings of this \
             gateway: set its max_payload to {MIN_PAYLOAD} or more"
        )
    })
}

impl Exchange {
    pub(super) fn on_event(&mut self, event: Event) {
        match event {
            Event::Due => self.link = Link::Connecting(Box::pin(connect(self.config.clone()))),
            Event::Connected(connection) => self.on_connected(connection),
            Event::Messages(messages) => {
                let now = Instant::now();
                for message in messages {
                    self.receive(&message.subject, &message.payload, now);
                }
            }
            Event::Denied(denial) => self.on_denied(denial),
            Event::Lost(error) => self.on_lost(&error),
        }
    }

    fn on_connected(&mut self, connection: Box<Connection>) {
        tracing::info!(server = connection.server, fleet = self.config.fleet, "connected to NATS");
        let max_payload = connection.client.max_payload();
        self.outbox.set_limit(max_payload);
        self.state_link =
            Some(StateLink::start(&self.config, &connection.client, &self.states, &self.status));
        self.link = Link::Up(connection);
        self.problem = too_small(max_payload);
        if let Some(problem) = &self.problem {
            tracing::warn!(problem, "NATS does not take all messages of this gateway");
        }
        self.waiting.clear();
        self.waiting_bytes = 0;
        let now = Instant::now();
        self.times.connected = now;
        self.times.bindings_due = SentBindings::Own.max(self.times.bindings_due);
        let ask = self.outbox.ask("");
        self.enqueue(vec![ask]);
        self.send(now);
        self.send_snapshot(now);
        self.show(now);
    }

    fn on_lost(&mut self, error: &str) {
        self.status.counters.disconnects.fetch_add(1, Relaxed);
        self.state_link = None;
        self.status.set_state(StateView::not_shared("not connected to NATS"));
        // A server that ends each connection at once must not be called without a pause.
        if matches!(self.link, Link::Up(_)) && self.times.connected.elapsed() > STABLE {
            self.times.backoff = BACKOFF.0;
        }
        // Jitter: many gateways lose a server at the same moment.
        let pause = self.times.backoff.mul_f64(rand::rng().random_range(0.5..1.0));
        self.times.backoff = (self.times.backoff * 2).min(BACKOFF.1);
        self.link = Link::Waiting(Instant::now() + pause);
        if self.problem.as_deref() != Some(error) {
            tracing::warn!(
                error,
                servers = self.config.servers.join(","),
                "not connected to NATS: this gateway routes without the load of the others"
            );
            self.problem = Some(error.to_owned());
        }
        self.show(Instant::now());
    }

    /// The server refuses a subject to this gateway's user. What it permits continues.
    fn on_denied(&mut self, denial: Denial) {
        if !denial.subject.starts_with(SUBJECTS) {
            self.status.note_state_denial(format!("this gateway {denial}"));
            return;
        }
        let now = Instant::now();
        if self.denials.add(denial, now) {
            let problem = self.denials.problem();
            tracing::warn!(problem, "NATS refuses subjects that the gateways use");
            self.show(now);
        }
    }

    /// Forgets refusals that the server does not repeat, and subscribes again where it refused that.
    pub(super) fn look_at_denials(&mut self, now: Instant) {
        if self.denials.expire(now) {
            tracing::info!("NATS permits all subjects again");
        }
        let Link::Up(connection) = &mut self.link else { return };
        if self.denials.subscribe_due(now) {
            let subscribed = connection.client.subscribe(connection.fleet.clone()).now_or_never();
            if let Some(Ok(messages)) = subscribed {
                connection.messages = messages;
            }
        }
    }
}
