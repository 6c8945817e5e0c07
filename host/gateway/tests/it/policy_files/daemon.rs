//! A daemon in a process of its own, with a policy directory that tests write to.

use std::{fs, path::PathBuf, process::Stdio, thread, time::Duration};

use serde_json::Value;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::process::{LIMIT, POINTSMAN, Process, body_of, command};

pub(crate) struct Daemon {
    process: Process,
    pub(crate) admin: String,
    pub(crate) dir: TempDir,
}

impl Daemon {
    /// Starts a daemon without workers. `policies`: further keys of `[policies]`.
    pub(crate) fn start(policies: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("policies")).unwrap();
        Self::start_in(dir, policies)
    }

    pub(crate) fn start_in(dir: TempDir, policies: &str) -> Self {
        let config = format!(
            "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\nthreads = 1\n\
             [policies]\ndir = '{0}/policies'\nrescan = '500ms'\n{policies}\n",
            dir.path().display()
        );
        let file = dir.path().join("pointsman.toml");
        fs::write(&file, config).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut command = command(POINTSMAN, &["--log-json", "serve", "--config"]);
        let mut process = Process::start(command.arg(file).stdout(Stdio::piped()).stderr(log));
        let [_, admin] = process.addresses();
        Self { process, admin, dir }
    }

    /// Stops the daemon without warning, as a crash would, and returns its directory.
    pub(crate) fn kill(mut self) -> TempDir {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    /// Sends SIGTERM. Returns how long the daemon took to end.
    pub(crate) fn terminate(&mut self) -> Duration {
        let begun = Instant::now();
        self.process.terminate();
        begun.elapsed()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("policies").join(name)
    }

    /// Renames a file into place.
    pub(crate) fn drop_file(&self, name: &str, bytes: &[u8]) {
        let staged = self.path(".staged");
        fs::write(&staged, bytes).unwrap();
        fs::rename(staged, self.path(name)).unwrap();
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> String {
        body_of(&self.admin, &format!("{method} {path}"), "").unwrap()
    }

    pub(crate) fn slot(&self, name: &str) -> Value {
        let status: Value = serde_json::from_str(&self.request("GET", "/policies")).unwrap();
        status["slots"].as_array().unwrap().iter().find(|slot| slot["slot"] == name).unwrap().clone()
    }

    /// Waits until a slot serves the content, and returns how long that took.
    pub(crate) fn until_it_serves(&self, slot: &str, bytes: &[u8]) -> Duration {
        let wanted = pointsman_policy_runtime::digest(bytes).to_string();
        let begun = Instant::now();
        while self.slot(slot)["digest"] != wanted {
            assert!(begun.elapsed() < LIMIT, "{slot} does not serve: {}", self.slot(slot));
            thread::sleep(Duration::from_millis(10));
        }
        begun.elapsed()
    }

    /// Waits for a refusal of the content and returns its kind and message.
    pub(crate) fn until_it_refuses(&self, slot: &str, bytes: &[u8]) -> (String, String) {
        let wanted = pointsman_policy_runtime::digest(bytes).to_string();
        let begun = Instant::now();
        loop {
            let refusals = self.slot(slot)["refusals"].as_array().unwrap().clone();
            if let Some(refusal) = refusals.iter().rev().find(|refusal| refusal["digest"] == wanted) {
                let text = |key: &str| refusal[key].as_str().unwrap().to_owned();
                return (text("kind"), text("message"));
            }
            assert!(begun.elapsed() < LIMIT, "{slot} is not refused: {}", self.log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Peak of the daemon's resident memory since the last call, MiB.
    pub(crate) fn peak_mib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        fs::write(format!("/proc/{}/clear_refs", self.process.id()), "5").unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1_024
    }

    pub(crate) fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.process.id())).unwrap().count()
    }

    /// Number of the daemon's child processes.
    pub(crate) fn children(&self) -> usize {
        let mut found = 0;
        for task in fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap().flatten() {
            let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
            found += text.split_whitespace().count();
        }
        found
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }
}

/// Other content of the same behaviour.
pub(crate) fn version_of(wasm: &[u8], version: u32) -> Vec<u8> {
    [wasm, &[0, 6, 1, b'v'], &version.to_le_bytes()].concat()
}
