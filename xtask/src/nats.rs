//! The real NATS server.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;

use crate::{
    fleet::{End, Process, free_port},
    poll::until_listening,
};

/// Maximum time until the server listens.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server, which may be stopped.
pub(crate) struct Nats {
    process: Option<Process>,
    dir: PathBuf,
    pub(crate) port: u16,
}

impl Nats {
    pub(crate) async fn start(dir: &Path) -> anyhow::Result<Self> {
        let mut nats = Self { process: None, dir: dir.to_owned(), port: free_port()? };
        nats.spawn().await?;
        Ok(nats)
    }

    /// Starts the server on its port.
    pub(crate) async fn spawn(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]);
        let process = Process::logging("nats", command, &self.dir, End::Kill);
        self.process = Some(process.context("starting NATS: install Debian's nats-server")?);
        until_listening("nats-server", self.port, PATIENCE).await
    }

    /// Kills the server as `kill -9` does.
    pub(crate) fn kill(&mut self) {
        self.process = None;
    }
}
