//! Signals that come while the gateway starts and afterwards.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::process::{POINTSMAN, Process, command};

const CONFIG: &str = "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n";

/// A gateway that waits for its configuration, which comes through a pipe.
struct Starting {
    process: Process,
    configuration: File,
    file: PathBuf,
    _dir: TempDir,
}

impl Starting {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pointsman.toml");
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        let mut command = command(POINTSMAN, &["--log-json", "serve", "--config"]);
        let process = Process::start(command.arg(&file).stdout(Stdio::piped()).stderr(Stdio::piped()));
        // Waits until the gateway reads.
        let configuration = File::options().write(true).open(&file).unwrap();
        Self { process, configuration, file, _dir: dir }
    }
}

#[test]
fn n9_a_signal_ends_a_start_that_waits_for_a_file() {
    for signal in [Signal::TERM, Signal::INT, Signal::QUIT] {
        let mut starting = Starting::new();
        starting.process.signal(signal);
        let mut out = String::new();
        starting.process.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        let ended = starting.process.wait().unwrap();
        // N9.1, N9.4
        assert_eq!((ended.code(), &*out), (Some(0), ""), "{signal:?}: {ended:?}");
    }
}

#[test]
fn n9_sighup_during_the_start_is_a_reload_after_it() {
    let mut starting = Starting::new();
    starting.process.signal(Signal::HUP);
    // The reload reads a regular file.
    let next = starting.file.with_extension("next");
    fs::write(&next, CONFIG).unwrap();
    fs::rename(next, &starting.file).unwrap();
    starting.configuration.write_all(CONFIG.as_bytes()).unwrap();
    drop(starting.configuration);
    starting.process.addresses();
    let log = BufReader::new(starting.process.stderr.take().unwrap());
    let reload = log.lines().map(Result::unwrap).find(|line| line.contains("\"SIGHUP\"")).unwrap();
    // N9.2
    assert!(reload.contains("\"outcome\":\"done\""), "{reload}");
    starting.process.terminate();
}

#[test]
fn n9_signals_of_log_rotation_are_ignored_and_sigquit_drains() {
    let mut starting = Starting::new();
    starting.process.signal(Signal::USR1);
    starting.configuration.write_all(CONFIG.as_bytes()).unwrap();
    drop(starting.configuration);
    // It starts all the same.
    starting.process.addresses();
    let mut log = BufReader::new(starting.process.stderr.take().unwrap()).lines().map(Result::unwrap);
    starting.process.signal(Signal::USR2);
    for name in ["SIGUSR1", "SIGUSR2"] {
        // N9.3
        assert!(log.any(|line| line.contains("signal ignored") && line.contains(name)), "{name}");
    }
    starting.process.signal(Signal::QUIT);
    // N9.4
    assert!(log.any(|line| line.contains("draining")));
    assert!(starting.process.wait().unwrap().success());
}

#[test]
fn n9_a_limit_of_file_sizes_does_not_end_the_gateway() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pointsman.toml");
    fs::write(&file, CONFIG).unwrap();
    let mut command = command("sh", &["-c", "ulimit -f 128; exec \"$0\" \"$@\"", POINTSMAN]);
    command.args(["--log-json", "serve", "--config"]).arg(&file).env("XDG_CACHE_HOME", dir.path());
    let mut process = Process::start(command.stdout(Stdio::piped()).stderr(Stdio::null()));
    process.addresses();
    process.signal(Signal::XFSZ);
    process.signal(Signal::TERM);
    let ended = process.wait().unwrap();
    // N9.5
    assert_eq!(ended.code(), Some(0), "{ended:?}");
}
