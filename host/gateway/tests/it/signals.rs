//! Signals that come while the gateway starts and afterwards.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const CONFIG: &str = "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n";

/// A gateway that waits for its configuration, which comes through a pipe.
struct Starting {
    process: Child,
    configuration: File,
    file: PathBuf,
    _dir: TempDir,
}

impl Starting {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pointsman.toml");
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["--log-json", "serve", "--config"]).arg(&file).env_remove("RUST_LOG");
        let process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Waits until the gateway reads.
        let configuration = File::options().write(true).open(&file).unwrap();
        Self { process, configuration, file, _dir: dir }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

#[test]
fn n9_a_signal_ends_a_start_that_waits_for_a_file() {
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let starting = Starting::new();
        starting.signal(signal);
        let ended = starting.process.wait_with_output().unwrap();
        // N9.1, N9.4
        assert_eq!((ended.status.code(), ended.stdout.len()), (Some(0), 0), "{signal:?}: {ended:?}");
    }
}

#[test]
fn n9_sighup_during_the_start_is_a_reload_after_it() {
    let mut starting = Starting::new();
    starting.signal(Signal::HUP);
    // The reload reads a regular file.
    let next = starting.file.with_extension("next");
    fs::write(&next, CONFIG).unwrap();
    fs::rename(next, &starting.file).unwrap();
    starting.configuration.write_all(CONFIG.as_bytes()).unwrap();
    drop(starting.configuration);
    let mut addresses = String::new();
    BufReader::new(starting.process.stdout.take().unwrap()).read_line(&mut addresses).unwrap();
    // N9.2
    assert!(addresses.contains("listening"), "{addresses:?}");
    let log = BufReader::new(starting.process.stderr.take().unwrap());
    let reload = log.lines().map(Result::unwrap).find(|line| line.contains("\"SIGHUP\"")).unwrap();
    // N9.2
    assert!(reload.contains("\"outcome\":\"done\""), "{reload}");
    kill_process(Pid::from_child(&starting.process), Signal::TERM).unwrap();
    assert!(starting.process.wait().unwrap().success());
}

#[test]
fn n9_signals_of_log_rotation_are_ignored_and_sigquit_drains() {
    let mut starting = Starting::new();
    starting.signal(Signal::USR1);
    starting.configuration.write_all(CONFIG.as_bytes()).unwrap();
    drop(starting.configuration);
    let mut addresses = String::new();
    BufReader::new(starting.process.stdout.take().unwrap()).read_line(&mut addresses).unwrap();
    // N9.3: while it starts
    assert!(addresses.contains("listening"), "{addresses:?}");
    let mut log = BufReader::new(starting.process.stderr.take().unwrap()).lines().map(Result::unwrap);
    kill_process(Pid::from_child(&starting.process), Signal::USR2).unwrap();
    for name in ["SIGUSR1", "SIGUSR2"] {
        // N9.3
        assert!(log.any(|line| line.contains("signal ignored") && line.contains(name)), "{name}");
    }
    kill_process(Pid::from_child(&starting.process), Signal::QUIT).unwrap();
    // N9.4
    assert!(log.any(|line| line.contains("draining")));
    assert!(starting.process.wait().unwrap().success());
}

#[test]
fn n9_a_limit_of_file_sizes_does_not_end_the_gateway() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pointsman.toml");
    fs::write(&file, CONFIG).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 128; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_pointsman")]);
    command.args(["--log-json", "serve", "--config"]).arg(&file).env("XDG_CACHE_HOME", dir.path());
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let listens = line.contains("listening");
    kill_process(Pid::from_child(&process), Signal::XFSZ).unwrap();
    kill_process(Pid::from_child(&process), Signal::TERM).unwrap();
    let ended = process.wait().unwrap();
    // N9.5
    assert_eq!((listens, ended.code()), (true, Some(0)), "{ended:?}");
}
