//! A child process that ends with its handle.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{client::Client, proc};

/// Lines of each output file that an error shows.
const SHOWN_LINES: usize = 8;

/// Longest wait for a child that was asked to end.
const TERMINATE_LIMIT: Duration = Duration::from_secs(20);

/// A running child. Dropping it ends the child, by process id.
#[derive(Debug)]
pub struct Process {
    /// Name of its output files, and in errors.
    pub name: String,
    /// First line of its standard output as JSON; null when it announces nothing.
    pub announced: Value,
    /// Its standard error.
    pub log: PathBuf,
    child: Child,
    end: End,
}

/// How a child is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// SIGKILL, as in a crash.
    Kill,
    /// SIGTERM: a master process ends its own workers then. SIGKILL to all of them when it does not end.
    Terminate,
    /// SIGKILL to the child and its descendants, which it would leave behind otherwise.
    KillTree,
}

impl Process {
    /// Starts a program that prints one line of JSON once it listens.
    pub fn announcing(name: &str, mut command: Command, dir: &Path) -> anyhow::Result<Self> {
        command.stdout(Stdio::piped());
        let mut process = Self::spawn(name, command, dir, End::Kill)?;
        let stdout = process.child.stdout.take().context("the child has no stdout")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        process.announced = serde_json::from_str(&line).with_context(|| {
            format!("{name} did not start: it printed `{}`; see {}", line.trim(), process.log.display())
        })?;
        Ok(process)
    }

    /// Starts a program whose output goes to a log file.
    pub fn logging(name: &str, mut command: Command, dir: &Path, end: End) -> anyhow::Result<Self> {
        command.stdout(File::create(dir.join(format!("{name}.out")))?);
        Self::spawn(name, command, dir, end)
    }

    fn spawn(name: &str, mut command: Command, dir: &Path, end: End) -> anyhow::Result<Self> {
        let log = dir.join(format!("{name}.log"));
        command.stdin(Stdio::null()).stderr(File::create(&log)?);
        let child = command.spawn().with_context(|| {
            format!("could not start {name} ({})", command.get_program().to_string_lossy())
        })?;
        Ok(Self { name: name.to_owned(), announced: Value::Null, log, child, end })
    }

    /// Address that it announced, `host:port`.
    pub fn listening(&self) -> String {
        self.announced["listening"].as_str().unwrap_or_default().to_owned()
    }

    /// Client of the announced address.
    pub fn client(&self) -> Client {
        Client::new(&self.listening())
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sets how the child is ended.
    pub fn set_end(&mut self, end: End) {
        self.end = end;
    }

    /// Sends the child a signal, for example `-STOP`.
    pub fn signal(&self, name: &str) {
        signal(name, self.pid());
    }

    /// Ends the child and waits for it.
    pub fn stop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        match self.end {
            End::Kill => drop(self.child.kill()),
            End::Terminate => self.terminate(TERMINATE_LIMIT),
            End::KillTree => self.kill_tree(),
        }
        let _ = self.child.wait();
    }

    /// Sends SIGTERM, and kills the child and its descendants when it does not end in time.
    fn terminate(&mut self, limit: Duration) {
        signal("-TERM", self.pid());
        let started = std::time::Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if started.elapsed() > limit {
                return self.kill_tree();
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill_tree(&self) {
        proc::descendants(self.pid()).into_iter().for_each(|pid| signal("-KILL", pid));
    }

    /// Returns the exit status of the child; `None` while it runs.
    pub fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// The last lines of its output, for an error: its directory is often removed before anyone can read the
    /// files.
    pub fn last_lines(&self) -> String {
        let mut shown = Vec::new();
        for file in [self.log.with_extension("out"), self.log.clone()] {
            let text = std::fs::read(file).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            shown.extend(
                lines.iter().skip(lines.len().saturating_sub(SHOWN_LINES)).map(|line| (*line).to_owned()),
            );
        }
        shown.join("\n")
    }

    /// Waits until GET `/health` of `address` succeeds.
    pub async fn healthy(&mut self, address: &str, limit: Duration) -> anyhow::Result<()> {
        let (client, started) = (Client::new(address), Instant::now());
        while client.get("/health").await.is_err() {
            if let Some(status) = self.ended()? {
                bail!("{} ended with {status}:\n{}", self.name, self.last_lines());
            }
            if started.elapsed() > limit {
                bail!("{} is not healthy after {limit:?}:\n{}", self.name, self.last_lines());
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Lets the child run on after this command, and returns its process id.
    pub fn detach(self) -> u32 {
        let pid = self.pid();
        std::mem::forget(self);
        pid
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

fn signal(signal: &str, pid: u32) {
    let _ = Command::new("kill").args([signal, &pid.to_string()]).status();
}

/// Returns a loopback port that is free now, for a program that binds it later.
///
/// The port is below those that the kernel gives to sockets without a port of their own, which could take it
/// before the program does. A process gets each port once, and processes begin at different ones.
pub fn free_port() -> anyhow::Result<u16> {
    static ATTEMPTS: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(7_919);
    for _ in 0..1_000 {
        let place = first.wrapping_add(ATTEMPTS.fetch_add(1, Relaxed));
        let port = u16::try_from(10_000 + place % 22_000)?;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("find a free loopback port: 1,000 ports between 10,000 and 32,000 are taken")
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command, time::Duration};

    use super::{End, Process};

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_dropped_process_is_gone_and_its_neighbour_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let start = |name| {
            Process::announcing(name, shell("echo '{\"listening\":\"x\"}'; exec sleep 60"), dir.path())
        };
        let (one, other) = (start("one").unwrap(), start("other").unwrap());
        let pids = [one.pid(), other.pid()];
        assert_eq!(one.listening(), "x");
        drop(one);
        let alive = pids.map(|pid| Path::new(&format!("/proc/{pid}")).exists());
        assert_eq!(alive, [false, true]);
    }

    #[test]
    fn kill_tree_ends_descendants() {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::logging("tree", shell("sleep 60 & wait"), dir.path(), End::KillTree).unwrap();
        let mut tree = Vec::new();
        while tree.len() < 2 {
            tree = crate::proc::descendants(process.pid());
        }
        drop(process);
        // The grandchild belongs to init now, which may take a moment to reap it.
        let is_alive = |pid: &u32| {
            std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z"))
        };
        for _ in 0..200 {
            if !tree.iter().any(is_alive) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("processes of {tree:?} are alive");
    }

    #[test]
    fn a_child_that_ignores_sigterm_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
        let mut process = Process::logging("deaf", shell(script), dir.path(), End::Terminate).unwrap();
        while process.last_lines().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        process.terminate(Duration::from_millis(100));
        let _ = process.child.wait();
        assert!(process.ended().unwrap().is_some_and(|status| !status.success()));
    }

    #[test]
    fn a_program_that_announces_nothing_did_not_start() {
        let dir = tempfile::tempdir().unwrap();
        let error = Process::announcing("mute", shell("echo no port"), dir.path()).unwrap_err();
        assert!(error.to_string().starts_with("mute did not start: it printed `no port`"), "{error}");
    }
}
