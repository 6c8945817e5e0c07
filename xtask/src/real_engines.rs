//! Code that the commands with real engines share: engines as processes, and the checks
//! of a prefill and a decode engine behind the gateway.

use std::{path::Path, process::Command, time::Duration};

use crate::{
    client::Client,
    fleet::{End, Process},
    metrics_text::samples,
};

mod checks;
mod continuations;
pub(crate) mod engines;
pub(crate) mod pair;
mod upgrade;

/// Maximum time until an engine is ready. Two engines that share two cores need some minutes.
const BOOT: Duration = Duration::from_secs(600);

/// Settings of the gateway in front of engines that share the machine with it.
const PATIENT: &str = "[probe]\ntimeout = \"10s\"\n";

/// A running engine.
#[derive(Debug)]
pub(crate) struct RealEngine {
    address: String,
    /// Description of the worker without its role.
    worker: String,
    process: Process,
}

impl RealEngine {
    /// Starts an engine that listens on this port of 127.0.0.1, without waiting until it is ready.
    fn start(name: &str, port: u16, command: Command, dir: &Path, worker: String) -> anyhow::Result<Self> {
        // The server does not end its engine's processes when it is killed.
        let process = Process::logging(name, command, dir, End::KillTree)?;
        Ok(Self { address: format!("127.0.0.1:{port}"), worker, process })
    }

    /// Returns the `--worker` flag for this engine in a role.
    pub(crate) fn as_worker(&self, role: &str) -> String {
        format!("role={role},{}", self.worker)
    }

    /// Returns where the engine listens: host and port.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns a client for the engine.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.address)
    }

    /// Waits until the engine answers its health check.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        self.process.healthy(&self.address, BOOT).await
    }

    /// Sums the samples of a metric that have a label with this value, or all samples if the value is empty.
    pub(crate) async fn metric(&self, name: &str, value: &str) -> anyhow::Result<f64> {
        let text = self.client().get("/metrics").await?;
        let fits = samples(&text, name).into_iter().filter(|one| value.is_empty() || one.has_value(value));
        // The sum of no floats is -0.0; adding 0.0 makes it 0.0.
        Ok(fits.map(|sample| sample.value).sum::<f64>() + 0.0)
    }

    /// Kills the server and the processes of its engine.
    pub(crate) fn crash(&mut self) {
        self.process.stop();
    }
}
