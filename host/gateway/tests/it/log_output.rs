//! `pointsman` when its log lines cannot be written, or its output is closed.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "helpers of tests may fail as tests do"
)]

use std::{
    fs::File,
    io::Read as _,
    path::{Path, PathBuf},
    process::Stdio,
    thread,
    time::Duration,
};

use tokio::time::Instant;

use crate::process::{POINTSMAN, Process, ask, body_of, command};

/// A daemon with its addresses for clients and operators.
fn serve(stderr: Stdio) -> (Process, [String; 2]) {
    let listen = ["--log-json", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let mut command = command(POINTSMAN, &listen);
    command.args(["--worker", "role=aggregated,engine=vllm,url=http://127.0.0.1:9"]);
    let mut process = Process::start(command.stdout(Stdio::piped()).stderr(stderr));
    let addresses = process.addresses();
    (process, addresses)
}

/// Asks for a chat, which the access log has a line for, and which no worker can serve.
fn chat(clients: &str) -> String {
    ask(clients, "POST /v1/chat/completions", "", r#"{"model":"tiny","messages":[]}"#).unwrap()
}

fn dropped(admin: &str, reason: &str) -> u64 {
    let metrics = body_of(admin, "GET /metrics", "").unwrap();
    let series = format!("pointsman_log_lines_dropped_total{{reason=\"{reason}\"}} ");
    let value = metrics.lines().find_map(|line| line.strip_prefix(&series));
    value.unwrap_or_else(|| panic!("no {series} in {metrics}")).parse().unwrap()
}

#[test]
fn n8_requests_are_answered_while_the_log_cannot_be_written() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (mut process, [clients, admin]) = serve(full.into());
    let before = dropped(&admin, "write_failed");
    // N8.1
    for _ in 0..3 {
        assert!(chat(&clients).starts_with("HTTP/1.1 503 "));
    }
    let end = Instant::now() + Duration::from_secs(30);
    while dropped(&admin, "write_failed") < before + 3 {
        assert!(Instant::now() < end, "the lines that were not written are not counted");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(dropped(&admin, "queue_full"), 0);
    process.terminate();
}

#[test]
fn n8_requests_are_answered_while_nobody_reads_the_log() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    let (mut process, [clients, admin]) = serve(writer.into());
    // N8.1: a pipe has room for 64 KiB.
    for number in 0..400 {
        assert!(chat(&clients).starts_with("HTTP/1.1 503 "), "request {number}");
    }
    assert_eq!(dropped(&admin, "write_failed"), 0);
    process.terminate();
    let mut log = Vec::new();
    reader.read_to_end(&mut log).unwrap();
    assert!(log.len() > 60_000, "the pipe was full: {}", log.len());
}

#[test]
fn n8_a_command_whose_output_is_closed_ends_quietly() {
    let (mut daemon, [_, admin]) = serve(Stdio::null());
    let url = format!("http://{admin}");
    // The only worker is not there, so the gateway is not ready.
    let not_ready: &[&str] = &["health", "--ready", "--gateway", &url];
    for (arguments, code) in [(&["config", "example"][..], 0), (not_ready, 1)] {
        let mut command = command(POINTSMAN, arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        // N8.3
        assert_eq!((ended.status.code(), String::from_utf8_lossy(&ended.stderr).as_ref()), (Some(code), ""));
    }
    daemon.terminate();
}

/// Starts the gateway with a configuration after these commands of the shell, ends it, and returns its log.
fn log_of(before: &str, config: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n{config}");
    std::fs::write(dir.path().join("p.toml"), config).unwrap();
    let start = format!("{before}; exec {POINTSMAN} --log-json serve --config p.toml");
    let mut command = command("sh", &["-c", &start]);
    command.current_dir(dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = Process::start(&mut command);
    process.addresses();
    let mut log = process.stderr.take().unwrap();
    process.terminate();
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn l4_a_default_that_needs_more_descriptors_than_there_are_is_no_warning() {
    for (connections, level) in [("", "INFO"), ("[limits]\nconnections = 9000\n", "WARN")] {
        let text = log_of("ulimit -n 1024", connections);
        let levels: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("file descriptor limit"))
            .map(|line| if line.contains("\"WARN\"") { "WARN" } else { "INFO" })
            .collect();
        // L4.4
        assert_eq!(levels, [level], "{text}");
    }
}

/// A control group with a limit of memory, which is removed at the end.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// `None`, with a message, without the permission for it.
    #[expect(clippy::print_stderr, reason = "a part of a test")]
    fn new(bytes: usize) -> Option<Self> {
        for (parent, limit) in [("memory", "memory.limit_in_bytes"), ("", "memory.max")] {
            let name = format!("pointsman-test-{}", std::process::id());
            let group = Self(Path::new("/sys/fs/cgroup").join(parent).join(name));
            let made = std::fs::create_dir(&group.0);
            if made.and_then(|()| std::fs::write(group.0.join(limit), bytes.to_string())).is_ok() {
                return Some(group);
            }
        }
        eprintln!("skipped: this user may not limit the memory of a control group");
        None
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn l6_the_limit_of_bodies_follows_the_memory_limit_and_too_little_memory_is_a_warning() {
    let Some(group) = MemoryGroup::new(800 << 20) else { return };
    let enter = format!("echo $$ > {}/cgroup.procs", group.0.display());
    let small_index = "[index]\nbyte_budget = 16777216\n";
    let bodies = |bytes: usize| format!("[limits]\nbody_bytes_in_flight = {bytes}\n");
    for (config, lowered, scarce) in [
        (String::new(), true, true),
        (small_index.to_owned(), true, false),
        (bodies(100_000_000), false, false),
        (bodies(300_000_000), false, true),
    ] {
        let text = log_of(&enter, &config);
        let line = |level: &str, part: &str| {
            let mut lines =
                text.lines().filter(|line| line.contains(level) && line.contains("control group"));
            lines.any(|line| line.contains(part))
        };
        // L6.1
        assert_eq!(line("\"INFO\"", "\"limit\":209715200"), lowered, "{config}: {text}");
        // L6.2
        assert_eq!(line("\"WARN\"", "\"memory\":838860800"), scarce, "{config}: {text}");
    }
}
