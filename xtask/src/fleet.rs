//! Real processes on free loopback ports: simulated engines and the gateway. Ended, by pid, when dropped.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::Value;

use crate::{http, sh};

/// A process that told where it listens.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) name: String,
    pub(crate) told: Value,
    child: Child,
}

/// The gateway, its engines, and its policy folder.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) gateway: Process,
    pub(crate) engines: Vec<Process>,
    pub(crate) policies: PathBuf,
}

impl Process {
    fn start(name: &str, mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let stderr = std::fs::File::create(log.join(format!("{name}.log")))?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .with_context(|| format!("could not start {name}"))?;
        let out = child.stdout.take().context("no stdout")?;
        let mut line = String::new();
        BufReader::new(out).read_line(&mut line)?;
        let told = serde_json::from_str(&line).with_context(|| {
            format!("{name} did not start; see {}", log.join(format!("{name}.log")).display())
        })?;
        Ok(Self { name: name.to_owned(), told, child })
    }

    /// Where it listens, `host:port`.
    pub(crate) fn listening(&self) -> String {
        self.told["listening"].as_str().unwrap_or_default().to_owned()
    }

    /// Ends it at once, as a crash would.
    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on without us.
    pub(crate) fn leave(self) {
        std::mem::forget(self);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Builds the binaries and answers their folder; or the folder that `POINTSMAN_BIN` names, as it is.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    if let Some(bin) = std::env::var_os("POINTSMAN_BIN") {
        return Ok(bin.into());
    }
    sh::run(sh::cargo().args([
        "build",
        "--release",
        "--locked",
        "--package",
        "pointsman-gateway",
        "--package",
        "pointsman-sim",
    ]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh::root().join("target"), PathBuf::from);
    Ok(target.join("release"))
}

/// Starts an engine.
pub(crate) fn engine(bin: &Path, dir: &Path, name: &str, args: &[&str]) -> anyhow::Result<Process> {
    let mut command = Command::new(bin.join("pointsman-sim"));
    command.args(["--listen", "127.0.0.1:0"]).args(args);
    Process::start(name, command, dir)
}

/// Starts the gateway in front of engines and waits until it is ready.
pub(crate) fn gateway(
    bin: &Path,
    dir: &Path,
    engines: Vec<Process>,
    config: &str,
    workers: &[String],
) -> anyhow::Result<Fleet> {
    let policies = dir.join("policies");
    std::fs::create_dir_all(&policies)?;
    let file = dir.join("pointsman.toml");
    std::fs::write(&file, config)?;
    let mut command = Command::new(bin.join("pointsman"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
    command
        .arg("--config")
        .arg(file)
        .arg("--policies")
        .arg(&policies)
        .env("RUST_LOG", "info,pointsman::access=warn");
    for worker in workers {
        command.args(["--worker", worker]);
    }
    let gateway = Process::start("gateway", command, dir)?;
    let fleet = Fleet { gateway, engines, policies };
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(20) {
        let workers = http::get(&fleet.admin(), "/workers").unwrap_or_default();
        let workers: Value = serde_json::from_str(&workers).unwrap_or_default();
        let all = workers["workers"]
            .as_array()
            .is_some_and(|all| !all.is_empty() && all.iter().all(|one| one["ineligible"].is_null()));
        if all {
            return Ok(fleet);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("the workers did not become ready; see {}", dir.display())
}

impl Fleet {
    /// Where operators connect.
    pub(crate) fn admin(&self) -> String {
        self.gateway.told["admin"].as_str().unwrap_or_default().to_owned()
    }

    /// Where clients connect.
    pub(crate) fn client(&self) -> String {
        self.gateway.listening()
    }

    /// Renames a policy into place.
    pub(crate) fn drop_policy(&self, name: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let staged = self.policies.join(".staged");
        std::fs::write(&staged, bytes)?;
        Ok(std::fs::rename(staged, self.policies.join(name))?)
    }

    /// The state of a slot, from the admin port.
    pub(crate) fn slot(&self, kind: &str) -> anyhow::Result<Value> {
        let status: Value = serde_json::from_str(&http::get(&self.admin(), "/policies")?)?;
        let slots = status["slots"].as_array().context("no slots")?;
        slots.iter().find(|slot| slot["slot"] == kind).cloned().with_context(|| format!("no slot {kind}"))
    }
}
