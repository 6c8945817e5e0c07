//! `pointsman` as a process of its own, and requests to it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "helpers of tests may fail as tests do")]

use std::{
    ffi::OsStr,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpStream, ToSocketAddrs},
    ops::{Deref, DerefMut},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest time for anything that a test waits for.
pub(crate) const LIMIT: Duration = Duration::from_secs(150);

/// `pointsman`. Its commands that run another program need [`crate::programs::pointsman`].
pub(crate) const POINTSMAN: &str = env!("CARGO_BIN_EXE_pointsman");

/// A program with these arguments, without variables that change what it does or prints.
pub(crate) fn command<T: AsRef<OsStr>>(program: &str, arguments: &[T]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("NO_COLOR", "1").env_remove("RUST_LOG").env_remove("POINTSMAN_ADMIN_TOKEN");
    command
}

/// Runs a command to its end with this text on stdin. Returns its exit code, stdout and stderr.
pub(crate) fn run(command: &mut Command, stdin: &str) -> (Option<i32>, String, String) {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that refuses its arguments does not read.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let ran = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ran.status.code(), text(ran.stdout), text(ran.stderr))
}

/// A process that ends when this is dropped.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Sends SIGTERM and waits for the end, which has to be a success.
    pub(crate) fn terminate(&mut self) {
        self.signal(Signal::TERM);
        assert!(self.wait().unwrap().success());
    }

    /// Waits for the first line of its stdout, which has the addresses of a gateway that serves: for clients,
    /// and for operators.
    pub(crate) fn addresses(&mut self) -> [String; 2] {
        let mut line = String::new();
        BufReader::new(self.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addresses: Value = serde_json::from_str(&line).unwrap();
        ["listening", "admin"].map(|key| addresses[key].as_str().unwrap().to_owned())
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.kill();
        let _ = self.wait();
    }
}

/// Sends a request (`GET /path`, with these lines of headers) and returns the whole answer.
pub(crate) fn ask(
    address: impl ToSocketAddrs,
    request: &str,
    headers: &str,
    body: &str,
) -> io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let length = body.len();
    let own = format!("host: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}");
    write!(stream, "{request} HTTP/1.1\r\ncontent-type: application/json\r\n{own}\r\n{body}")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

/// Like [`ask`], and returns the body of the answer.
pub(crate) fn body_of(address: impl ToSocketAddrs, request: &str, body: &str) -> io::Result<String> {
    let answer = ask(address, request, "", body)?;
    answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).ok_or(io::ErrorKind::UnexpectedEof.into())
}
