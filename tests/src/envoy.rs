//! A real Envoy in front of simulated engines, if one is installed.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use pointsman_rig::fleet::free_port;
use tempfile::TempDir;

use crate::client::Client;

/// Environment variable with the path of the program.
pub const PROGRAM: &str = "POINTSMAN_ENVOY";

/// A running Envoy. Dropping it ends it.
#[derive(Debug)]
pub struct Envoy {
    child: Child,
    /// Address to which clients connect.
    pub address: SocketAddr,
    /// Client of its port for operators.
    pub admin: Client,
    _dir: TempDir,
}

/// Returns the path of Envoy: that of the environment variable, else the first one in `PATH`.
#[must_use]
pub fn program() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(PROGRAM) {
        return Some(given.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("envoy")).find(|file| file.is_file())
}

/// Returns the configuration of `deploy/envoy`, with these ports in the place of its own.
///
/// # Errors
/// The file cannot be read.
pub fn config(clients: u16, admin: u16, pickers: [u16; 2]) -> anyhow::Result<String> {
    let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/envoy/envoy.yaml"));
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let [first, second] = pickers;
    let ports = [("8081", clients), ("9901", admin), ("9002", first), ("9012", second)];
    Ok(ports.into_iter().fold(text, |text, (from, to)| {
        text.replace(&format!("port_value: {from} "), &format!("port_value: {to} "))
    }))
}

impl Envoy {
    /// Starts Envoy with the configuration of `deploy/envoy` and two pickers, and waits until it serves and
    /// has found both healthy.
    ///
    /// # Errors
    /// It does not start within 20 s.
    pub async fn start(program: &Path, pickers: [SocketAddr; 2]) -> anyhow::Result<Self> {
        Self::start_edited(program, pickers, |config| config)?.healthy(2).await
    }

    /// Starts Envoy with that configuration after an edit. It waits for nothing.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start_edited(
        program: &Path,
        pickers: [SocketAddr; 2],
        edit: impl FnOnce(String) -> String,
    ) -> anyhow::Result<Self> {
        let dir = TempDir::new()?;
        let (clients, admin) = (free_port()?, free_port()?);
        let file = dir.path().join("envoy.yaml");
        std::fs::write(&file, edit(config(clients, admin, pickers.map(|picker| picker.port()))?))?;
        let log = std::fs::File::create(dir.path().join("envoy.log"))?;
        let mut command = Command::new(program);
        command.arg("-c").arg(&file).args(["--concurrency", "1", "--log-level", "warning"]);
        // Several run on one machine.
        command.args(["--disable-hot-restart"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn()?;
        let address = SocketAddr::from(([127, 0, 0, 1], clients));
        let admin = Client::new(SocketAddr::from(([127, 0, 0, 1], admin)));
        Ok(Self { child, address, admin, _dir: dir })
    }

    /// Waits until it has found this many pickers healthy.
    ///
    /// # Errors
    /// That takes longer than 20 s.
    pub async fn healthy(self, count: u64) -> anyhow::Result<Self> {
        for _ in 0..200 {
            if self.healthy_pickers().await.unwrap_or(0) == count {
                return Ok(self);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let log = std::fs::read_to_string(self._dir.path().join("envoy.log")).unwrap_or_default();
        anyhow::bail!("Envoy did not find {count} healthy pickers within 20 s: {log}")
    }

    /// Returns how many pickers pass Envoy's health checks.
    ///
    /// # Errors
    /// Envoy does not answer.
    pub async fn healthy_pickers(&self) -> anyhow::Result<u64> {
        let reply = self.admin.get("/stats?filter=cluster.pointsman.membership_healthy").await?;
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        let number = text.rsplit(' ').next().unwrap_or_default().trim();
        number.parse().with_context(|| text.clone())
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
