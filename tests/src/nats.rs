//! The real NATS server, for tests of gateways that share their load.

use std::{
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use pointsman_rig::fleet::free_port;
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::network::Place;

/// A running server.
pub struct Nats {
    process: Child,
    place: Place,
    /// Its port.
    pub port: u16,
    dir: TempDir,
}

impl Nats {
    /// Starts a server with these lines of configuration. `None`, with a message, when it is not installed.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn start(config: &str) -> Option<Self> {
        Self::start_at(Place::HERE, config).await
    }

    /// Starts a server elsewhere.
    ///
    /// # Panics
    /// Same as [`Self::start`].
    #[expect(clippy::print_stderr, clippy::expect_used, reason = "a part of a test")]
    pub async fn start_at(place: Place, config: &str) -> Option<Self> {
        let port = free_port().expect("a free port");
        let dir = TempDir::new().ok()?;
        std::fs::write(dir.path().join("nats.conf"), config).ok()?;
        let Some(process) = spawn(dir.path(), place, port) else {
            eprintln!("skipped: nats-server is not in the PATH (Debian: apt-get install nats-server)");
            return None;
        };
        let server = Self { process, place, port, dir };
        server.ready().await;
        Some(server)
    }

    /// Ends the server as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts it again, on the same port.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn restart(&mut self) {
        self.kill();
        if let Some(process) = spawn(self.dir.path(), self.place, self.port) {
            self.process = process;
        }
        self.ready().await;
    }

    /// Writes another configuration, for [`Self::restart`] and [`Self::reload`].
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn configure(&self, config: &str) -> std::io::Result<()> {
        std::fs::write(self.dir.path().join("nats.conf"), config)
    }

    /// Has the running server read its configuration again.
    ///
    /// # Errors
    /// `kill` cannot be run.
    pub fn reload(&self) -> std::io::Result<()> {
        Command::new("kill").args(["-HUP", &self.process.id().to_string()]).status().map(drop)
    }

    /// URL of the server.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}:{}", self.place.address, self.port)
    }

    #[expect(clippy::panic, reason = "helpers of tests may fail as tests do")]
    async fn ready(&self) {
        for _ in 0..500 {
            if TcpStream::connect((self.place.address, self.port)).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("nats-server does not listen");
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(dir: &Path, place: Place, port: u16) -> Option<Child> {
    let mut command = place.command("nats-server");
    command.arg("-c").arg(dir.join("nats.conf"));
    command.args(["-a", &place.address.to_string(), "-p", &port.to_string()]);
    command.arg("-sd").arg(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok()
}
