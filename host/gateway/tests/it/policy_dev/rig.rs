//! A gateway in a process of its own with two engines and a policy directory, and `pointsman policy dev`.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read, Write as _},
    path::{Path, PathBuf},
    process::{ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_rig::fleet::free_port;
use pointsman_sim::{Dialect, Role, Sim, SimConfig, SimHandle};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::process::{LIMIT, Process, command};

/// The gateway. Dropping it ends its process.
pub(super) struct Gateway {
    process: Process,
    listen: String,
    pub(super) admin: String,
    dir: tempfile::TempDir,
    _engines: Vec<SimHandle>,
}

impl Gateway {
    /// Starts a gateway with two engines, on ports that it keeps when it is started again.
    pub(super) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("policies")).unwrap();
        let mut engines = Vec::new();
        for _ in 0..2 {
            engines.push(Sim::start(SimConfig::instant(Dialect::Vllm, Role::Aggregated)).await.unwrap());
        }
        let [listen, admin] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port().unwrap()));
        let mut config = format!(
            "[server]\nlisten = '{listen}'\nadmin_listen = '{admin}'\nthreads = 1\n[probe]\ninterval = '50ms'\n\
             [policies]\ndir = '{}/policies'\nrescan = '500ms'\n",
            dir.path().display()
        );
        for (id, engine) in (1..).zip(&engines) {
            let url = engine.url();
            config.push_str(&format!(
                "[[workers]]\nid = {id}\nurl = '{url}'\nrole = 'aggregated'\nengine = 'vllm'\n"
            ));
        }
        fs::write(dir.path().join("pointsman.toml"), config).unwrap();
        let process = Self::process(dir.path());
        let gateway = Self { process, listen, admin, dir, _engines: engines };
        gateway.until_ready();
        gateway
    }

    fn process(dir: &Path) -> Process {
        let log = fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let mut command = command(crate::programs::pointsman(), &["serve", "--config"]);
        Process::start(command.arg(dir.join("pointsman.toml")).stdout(Stdio::null()).stderr(log))
    }

    pub(super) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(super) fn start_again(&mut self) {
        self.process = Self::process(self.dir.path());
        self.until_ready();
    }

    fn until_ready(&self) {
        until("the gateway serves", || self.chat(2).is_some_and(|answer| answer.contains("usage")));
    }

    /// Sends a request and returns the answer's body; `None` when there is no whole answer.
    pub(super) fn chat(&self, tokens: u32) -> Option<String> {
        chat(&self.listen, tokens)
    }

    /// Sends requests until this is dropped, one after another.
    pub(super) fn traffic(&self, tokens: Arc<AtomicU32>) -> Traffic {
        let (stop, listen) = (Arc::new(AtomicBool::new(false)), self.listen.clone());
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                chat(&listen, tokens.load(Ordering::Relaxed));
                thread::sleep(Duration::from_millis(10));
            }
        });
        Traffic { stop, thread: Some(thread) }
    }

    pub(super) fn policies(&self) -> PathBuf {
        self.dir.path().join("policies")
    }

    /// Names in the policy directory, sorted.
    pub(super) fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.policies()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(super) fn slot(&self) -> Value {
        let answer = crate::process::body_of(&self.admin, "GET /policies", "").unwrap();
        let status: Value = serde_json::from_str(&answer).unwrap();
        let slots = status["slots"].as_array().unwrap();
        slots.iter().find(|slot| slot["slot"] == "aggregated").unwrap().clone()
    }
}

/// Requests in the background.
pub(super) struct Traffic {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

fn chat(listen: &str, tokens: u32) -> Option<String> {
    let messages = json!([{ "role": "user", "content": "hello" }]);
    let body = json!({ "model": "tiny", "max_tokens": tokens, "messages": messages }).to_string();
    crate::process::body_of(listen, "POST /v1/chat/completions", &body).ok()
}

/// `pointsman policy dev` in a process of its own. Dropping it ends the process.
pub(super) struct Dev {
    process: Process,
    input: Option<ChildStdin>,
    output: Arc<Mutex<String>>,
    /// End of the output that was already waited for.
    seen: usize,
}

impl Dev {
    /// Runs it in `dir` with these arguments, without a terminal.
    pub(super) fn start(dir: &Path, arguments: &[&str]) -> Self {
        let mut command = Command::new(crate::programs::pointsman());
        command.args(["policy", "dev"]).args(arguments);
        Self::spawn(dir, command)
    }

    /// Runs it in a terminal of its own, which util-linux's `script` makes.
    pub(super) fn in_terminal(dir: &Path, arguments: &[&str]) -> Self {
        let quoted: Vec<String> = arguments.iter().map(|argument| format!("'{argument}'")).collect();
        let program = crate::programs::pointsman();
        let mut command = Command::new("script");
        command.args(["--quiet", "--return", "--flush", "--command"]);
        command.arg(format!("stty cols 200; {program} policy dev {}", quoted.join(" "))).arg("/dev/null");
        Self::spawn(dir, command)
    }

    fn spawn(dir: &Path, mut command: Command) -> Self {
        command
            .current_dir(dir)
            .env("NO_COLOR", "1")
            .env_remove("RUST_LOG")
            .env_remove("POINTSMAN_ADMIN_TOKEN");
        // Projects of different tests share the build of the SDK.
        command.env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("policy-dev"));
        command.env("CARGO_NET_OFFLINE", "true");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = Process::start(&mut command);
        let output = Arc::new(Mutex::new(String::new()));
        let input = process.stdin.take();
        let (out, err) = (process.stdout.take().unwrap(), process.stderr.take().unwrap());
        collect(out, output.clone());
        collect(err, output.clone());
        Self { process, input, output, seen: 0 }
    }

    /// Waits for a line with this text, after those that were awaited before, and returns it.
    pub(super) fn until(&mut self, text: &str) -> String {
        let begun = Instant::now();
        loop {
            let output = self.output.lock().clone();
            if let Some(place) = output[self.seen..].find(text) {
                let start = output[..self.seen + place].rfind('\n').map_or(0, |end| end + 1);
                if let Some(length) = output[start..].find('\n') {
                    self.seen = start + length;
                    return output[start..start + length].to_owned();
                }
            }
            assert!(begun.elapsed() < LIMIT, "no `{text}` after what was seen:\n{}", &output[..]);
            assert!(
                !self.has_ended() || self.output.lock().len() > output.len(),
                "ended without `{text}`:\n{output}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn output(&self) -> String {
        self.output.lock().clone()
    }

    /// Presses a key.
    pub(super) fn press(&mut self, key: char) {
        let input = self.input.as_mut().unwrap();
        write!(input, "{key}").unwrap();
        input.flush().unwrap();
    }

    fn has_ended(&mut self) -> bool {
        let ended = self.process.try_wait().unwrap().is_some();
        if ended {
            thread::sleep(Duration::from_millis(100));
        }
        ended
    }

    /// Sends SIGTERM and waits for the end.
    pub(super) fn terminate(&mut self) -> ExitStatus {
        self.process.signal(Signal::TERM);
        self.wait()
    }

    pub(super) fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        while !self.has_ended() {
            assert!(begun.elapsed() < LIMIT, "it does not end:\n{}", self.output());
            thread::sleep(Duration::from_millis(10));
        }
        self.process.wait().unwrap()
    }
}

fn collect(stream: impl Read + Send + 'static, output: Arc<Mutex<String>>) {
    thread::spawn(move || {
        let mut lines = BufReader::new(stream);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
            output.lock().push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
}

/// Waits until something holds.
pub(super) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
