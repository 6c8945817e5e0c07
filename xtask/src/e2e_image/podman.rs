//! Containers of one image under podman, with a store of their own, so that other containers are not
//! affected.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
};

use anyhow::{Context as _, bail, ensure};

use crate::{
    client::Client,
    fleet::{End, Process},
};

/// Runtimes that podman may call, the preferred one first.
const RUNTIMES: [&str; 2] = ["crun", "runc"];
/// Flags of every container: no rights, and a root that is read-only except for the directory of compiled
/// policies. podman's own limits can be higher than this machine allows.
const FLAGS: &str = "--rm --read-only --read-only-tmpfs=false --cap-drop all --security-opt no-new-privileges \
                     --tmpfs /var/cache/pointsman:rw,mode=0700,U --ulimit nofile=4096:4096 --ulimit nproc=4096:4096";

/// A loaded image.
#[derive(Debug)]
pub(super) struct Podman {
    store: PathBuf,
    pub(super) runtime: String,
    image: String,
}

/// A running container. Dropping it removes the container.
#[derive(Debug)]
pub(super) struct Container<'a> {
    podman: &'a Podman,
    name: String,
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

impl Podman {
    /// Loads an image, which checks its digests. Takes the first runtime that can run the image's program
    /// here. For example, crun needs cgroups of one version only.
    pub(super) fn load(image: &Path, wanted: Option<&str>, dir: &Path) -> anyhow::Result<Self> {
        let runtimes = wanted.map_or_else(|| RUNTIMES.to_vec(), |name| vec![name]);
        let mut podman = Self { store: dir.join("podman"), runtime: String::new(), image: String::new() };
        let mut problems = Vec::new();
        for runtime in runtimes {
            runtime.clone_into(&mut podman.runtime);
            if podman.image.is_empty() {
                match output(podman.command("load").args(["--quiet", "--input"]).arg(image)) {
                    Ok(loaded) => podman.image = loaded.rsplit(' ').next().unwrap_or_default().to_owned(),
                    Err(error) => {
                        problems.push(format!("{runtime}: {error:#}"));
                        continue;
                    }
                }
            }
            match output(podman.run("version", &[]).arg("--version")) {
                Ok(_) => return Ok(podman),
                Err(error) => problems.push(format!("{runtime}: {error:#}")),
            }
        }
        bail!("no runtime can run the image's program: {}", problems.join("; "))
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new("podman");
        command.arg("--root").arg(self.store.join("root")).arg("--runroot").arg(self.store.join("run"));
        command.args(["--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"]);
        command.args(["--runtime", &self.runtime, name]);
        command
    }

    /// Returns the command that runs the image. Arguments that are added to it replace those of the image.
    pub(super) fn run(&self, name: &str, flags: &[&str]) -> Command {
        let mut run = self.command("run");
        run.args(["--name", name]).args(FLAGS.split_whitespace()).args(flags).arg(&self.image);
        run
    }

    /// Runs a command of [`Self::run`], whose program prints one line of JSON once it listens.
    pub(super) fn start(&self, name: &str, run: Command, dir: &Path) -> anyhow::Result<Container<'_>> {
        let process = Process::announcing(name, run, dir);
        let mut process = process.inspect_err(|_| self.remove(name))?;
        process.set_end(End::KillTree);
        Ok(Container { podman: self, name: name.to_owned(), process })
    }

    fn remove(&self, name: &str) {
        let _ = self.command("rm").args(["--force", "--ignore", name]).output();
    }
}

impl Container<'_> {
    /// Returns a client for an address that the gateway announced.
    pub(super) fn client(&self, name: &str) -> Client {
        Client::new(self.process.announced[name].as_str().unwrap_or_default())
    }

    /// Runs another program in the container. Returns whether it succeeded.
    pub(super) fn exec(&self, command: &[&str]) -> bool {
        output(self.podman.command("exec").arg(&self.name).args(command)).is_ok()
    }

    /// Sends the signal that the image names, and SIGKILL after `limit` seconds. Returns how the container
    /// ended.
    pub(super) async fn stop(&mut self, limit: u64) -> anyhow::Result<ExitStatus> {
        let mut stop = tokio::process::Command::from(self.podman.command("stop"));
        let stopped = stop.args(["--time", &limit.to_string(), &self.name]).output().await?;
        ensure!(stopped.status.success(), "{}", String::from_utf8_lossy(&stopped.stderr).trim());
        loop {
            if let Some(status) = self.process.ended()? {
                return Ok(status);
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    /// Reads the rights of its first process from `/proc`.
    pub(super) fn process(&self) -> anyhow::Result<FirstProcess> {
        let pid = output(self.podman.command("inspect").args(["--format", "{{.State.Pid}}", &self.name]))?;
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
        self.podman.remove(&self.name);
    }
}

/// Returns what a command printed.
fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().context("could not start podman: install it with `apt install podman`")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {}", output.status, problem.trim());
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
