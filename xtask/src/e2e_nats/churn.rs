//! Engines and gateways that are killed and started again while requests run.

use std::{cell::RefCell, time::Duration};

use serde_json::Value;
use tokio::time::Instant;

use crate::{
    client::Client,
    drill::{Fault, Rig},
};

/// Time between two changes.
const EVERY: Duration = Duration::from_secs(3);

/// The gateways that run, by position, and when some were killed.
pub(super) struct Gateways {
    clients: RefCell<Vec<Option<Client>>>,
    kills: RefCell<Vec<(usize, Instant)>>,
}

/// What is to be changed next.
pub(super) struct Churn {
    turn: usize,
    /// Time of the next change; `None` if nothing is to be changed.
    due: Option<Instant>,
    /// Last states of the engines that were killed.
    pub(super) lost: Vec<Value>,
}

impl Gateways {
    pub(super) fn of(rig: &Rig) -> Self {
        Self { clients: RefCell::new(rig.clients()), kills: RefCell::default() }
    }

    /// Returns the running gateway at this position, or the next one after it.
    pub(super) fn choose(&self, draw: usize) -> Option<(usize, Client)> {
        let clients = self.clients.borrow();
        let count = clients.len().max(1);
        (0..count).map(|step| (draw + step) % count).find_map(|place| {
            let client = clients.get(place)?.clone()?;
            Some((place, client))
        })
    }

    /// Whether the gateway at this position was killed since then.
    pub(super) fn was_killed_since(&self, place: usize, since: Instant) -> bool {
        self.kills.borrow().iter().any(|(killed, at)| *killed == place && *at >= since)
    }
}

impl Churn {
    pub(super) fn begin(wanted: bool) -> Self {
        Self { turn: 0, due: wanted.then(|| Instant::now() + EVERY), lost: Vec::new() }
    }

    /// Makes the change that is due, if one is: an engine is killed, it starts again, a gateway is killed, it
    /// starts again. The next round takes others. `states` are those of the engines that run.
    pub(super) async fn step(
        &mut self,
        rig: &mut Rig,
        gateways: &Gateways,
        states: &[Value],
    ) -> anyhow::Result<()> {
        if self.due.is_none_or(|due| Instant::now() < due) {
            return Ok(());
        }
        let (step, round) = (self.turn % 4, self.turn / 4);
        let count = gateways.clients.borrow().len();
        let (engine, gateway) = (round % rig.engines().max(1), round % count.max(1));
        match step {
            0 => {
                // All engines run, so their states are in the order of their positions.
                self.lost.extend(states.get(engine).cloned());
                rig.fail(Fault::Engine, engine, false).await?;
            }
            1 => rig.repair(&[Fault::Engine], engine, gateway).await?,
            // One gateway alone has no other that could take its requests.
            2 | 3 if count < 2 => {}
            2 => {
                gateways.kills.borrow_mut().push((gateway, Instant::now()));
                rig.fail(Fault::Gateway, gateway, false).await?;
                *gateways.clients.borrow_mut() = rig.clients();
            }
            _ => {
                rig.repair(&[Fault::Gateway], engine, gateway).await?;
                *gateways.clients.borrow_mut() = rig.clients();
            }
        }
        self.turn += 1;
        self.due = Some(Instant::now() + EVERY);
        Ok(())
    }
}
