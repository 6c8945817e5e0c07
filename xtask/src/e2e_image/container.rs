//! Containers under crun or runc. Their state is in a directory of this command, so other containers are not
//! affected.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output},
};

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

use super::bundle::{Bundle, Network};
use crate::{
    client::Client,
    fleet::{End, Process},
    sh,
};

/// Programs that run containers, the preferred one first.
pub(super) const RUNTIMES: [&str; 2] = ["crun", "runc"];

/// A program that runs containers.
#[derive(Debug)]
pub(super) struct Runtime {
    name: String,
    state: PathBuf,
}

/// A running container. Dropping it removes the container.
#[derive(Debug)]
pub(super) struct Container<'a> {
    runtime: &'a Runtime,
    id: String,
    process: Process,
}

/// What the kernel reports about a container's first process.
#[derive(Debug)]
pub(super) struct FirstProcess {
    /// Number of the process's user.
    pub(super) user: String,
    /// Effective capabilities of the process, hexadecimal.
    pub(super) capabilities: String,
    pub(super) has_read_only_root: bool,
}

impl Runtime {
    /// Returns the first runtime that can run the image's program here. For example, crun needs cgroups of
    /// one version only.
    pub(super) fn find(wanted: Option<&str>, bundle: &Bundle, dir: &Path) -> anyhow::Result<Self> {
        let command = bundle.program(&["--version"]);
        let config = bundle.write(dir, "version", &command, &[], Network::Own)?;
        let mut problems = Vec::new();
        for name in wanted.map_or_else(|| RUNTIMES.to_vec(), |name| vec![name]) {
            let state = dir.join(format!("state-{name}"));
            let runtime = Self { name: name.to_owned(), state };
            match runtime.run("version", &config) {
                Ok(ended) if ended.status.success() => return Ok(runtime),
                Ok(ended) => {
                    let told = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
                    problems.push(format!("{name}: {}: {told}", ended.status));
                }
                Err(error) => problems.push(format!("{name}: {error:#}")),
            }
        }
        bail!("no runtime can run the image's program: {}", problems.join("; "))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Runs a container until it ends.
    pub(super) fn run(&self, id: &str, bundle: &Path) -> anyhow::Result<Output> {
        self.command("run").arg("--bundle").arg(bundle).arg(id).output().with_context(|| self.not_started())
    }

    /// Starts a container that prints one line of JSON once it listens.
    pub(super) fn start(&self, id: &str, bundle: &Path, dir: &Path) -> anyhow::Result<Container<'_>> {
        let mut command = self.command("run");
        command.arg("--bundle").arg(bundle).arg(id);
        match Process::announcing(id, command, dir) {
            Ok(mut process) => {
                process.set_end(End::KillTree);
                Ok(Container { runtime: self, id: id.to_owned(), process })
            }
            Err(error) => {
                self.remove(id);
                Err(error)
            }
        }
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.name);
        command.arg("--root").arg(&self.state);
        if self.name == "crun" {
            command.arg("--cgroup-manager=disabled");
        }
        command.arg(name);
        command
    }

    fn remove(&self, id: &str) {
        let _ = self.command("delete").arg("--force").arg(id).output();
    }

    fn not_started(&self) -> String {
        format!("could not start {}", self.name)
    }
}

impl Container<'_> {
    /// Returns a client for an address that the gateway announced.
    pub(super) fn client(&self, name: &str) -> Client {
        Client::new(self.process.announced[name].as_str().unwrap_or_default())
    }

    /// Runs another program in the container.
    pub(super) fn exec(&self, command: &[String]) -> anyhow::Result<Output> {
        let mut exec = self.runtime.command("exec");
        exec.arg(&self.id).args(command).output().with_context(|| self.runtime.not_started())
    }

    pub(super) fn signal(&self, signal: &str) -> anyhow::Result<()> {
        sh::run(self.runtime.command("kill").arg(&self.id).arg(signal))
    }

    /// Returns how the container ended, or `None` if it still runs.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        self.process.ended()
    }

    /// Reads the rights of its first process from `/proc`.
    pub(super) fn process(&self) -> anyhow::Result<FirstProcess> {
        let state = self.runtime.command("state").arg(&self.id).output();
        let state = state.with_context(|| self.runtime.not_started())?;
        ensure!(state.status.success(), "{} does not know the container", self.runtime.name);
        let state: Value = serde_json::from_slice(&state.stdout)?;
        let pid = state["pid"].as_u64().context("the container has no process")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|values| values.split_whitespace().next()).unwrap_or_default().to_owned()
        };
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
        let root = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mut root = root.filter(|fields| fields.get(4) == Some(&"/"));
        let has_read_only_root =
            root.any(|fields| fields.get(5).is_some_and(|options| options.starts_with("ro")));
        Ok(FirstProcess { user: field("Uid:"), capabilities: field("CapEff:"), has_read_only_root })
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        self.runtime.remove(&self.id);
    }
}
