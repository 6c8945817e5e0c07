//! `pointsman serve` behind a proxy: its ports while it starts, and what it answers before it stops.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::{
    process::{POINTSMAN, Process, command},
    service_manager::{engine_after, text_of},
};

/// A gateway with one worker, at addresses that are known before it listens.
struct Gateway {
    process: Process,
    clients: SocketAddr,
    admin: SocketAddr,
    picker: SocketAddr,
    _dir: TempDir,
}

impl Gateway {
    /// Starts it with this worker and these lines of its configuration.
    fn start(engine: SocketAddr, more: &str) -> Self {
        let [clients, admin, picker] = free_addresses();
        let config = format!(
            "[server]\nlisten = '{clients}'\nadmin_listen = '{admin}'\n[ext_proc]\nlisten = '{picker}'\n\
             {more}\n[[workers]]\nurl = 'http://{engine}'\nengine = 'openai'\nrole = 'aggregated'\n"
        );
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pointsman.toml");
        fs::write(&file, config).unwrap();
        let mut command = command(POINTSMAN, &["serve", "--config"]);
        let process = Process::start(command.arg(&file).stdout(Stdio::piped()).stderr(Stdio::null()));
        Self { process, clients, admin, picker, _dir: dir }
    }

    /// Waits until it serves clients.
    fn serving(mut self) -> Self {
        self.process.addresses();
        self
    }

    fn terminate(&self) {
        self.process.signal(Signal::TERM);
    }
}

fn free_addresses<const N: usize>() -> [SocketAddr; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}

/// Waits until `holds`.
pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "{what} took longer than 30 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_refused(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

/// Asks for a completion on a connection that the client keeps.
pub(crate) fn ask(stream: &mut TcpStream) {
    let body = r#"{"model":"tiny","prompt":"hi","max_tokens":1}"#;
    let head = format!("content-type: application/json\r\ncontent-length: {}", body.len());
    write!(stream, "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n{body}").unwrap();
}

/// Reads until the gateway closes the connection.
pub(crate) fn rest(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// A proxy then asks another gateway at once. A connection that waits looks to it like a slow gateway.
#[test]
fn n10_ports_refuse_connections_until_they_are_served() {
    let answers = Arc::new(AtomicBool::new(false));
    let may_answer = answers.clone();
    let engine = engine_after(move || {
        while !may_answer.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    // It serves clients after the first check of its worker (N10.1), or after this time (N10.2).
    let gateway = Gateway::start(engine, "[probe]\nhealth_timeout = '60s'");
    until("the operators' listener", || TcpStream::connect(gateway.admin).is_ok());
    // N10.4
    assert!(is_refused(gateway.clients), "clients would wait");
    // N10.4
    assert!(is_refused(gateway.picker), "proxies would wait");
    // N10.3
    assert!(text_of(gateway.admin, "/healthz").starts_with("HTTP/1.1 200 OK"));
    answers.store(true, Ordering::Relaxed);
    let gateway = gateway.serving();
    for address in [gateway.clients, gateway.picker] {
        TcpStream::connect(address).unwrap();
    }
}

/// A health check that came earlier would let a proxy send requests to a port that refuses them.
#[test]
fn n10_a_gateway_is_not_ready_before_its_port_is_served() {
    let answers = Arc::new(AtomicBool::new(false));
    let may_answer = answers.clone();
    let silent = engine_after(move || {
        while !may_answer.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let other = format!("[[workers]]\nurl = 'http://{silent}'\nengine = 'openai'\nrole = 'aggregated'");
    let more = format!("[probe]\nhealth_timeout = '60s'\n{other}");
    let gateway = Gateway::start(engine_after(|| {}), &more);
    until("the operators' listener", || TcpStream::connect(gateway.admin).is_ok());
    until("a worker that serves", || text_of(gateway.admin, "/readyz").contains(r#""models":["tiny"]"#));
    assert!(is_refused(gateway.clients), "the silent worker is waited for");
    let early = text_of(gateway.admin, "/readyz");
    // N10.3
    assert!(early.starts_with("HTTP/1.1 503 ") && early.contains(r#""starting":true"#), "{early}");
    // N10.3
    assert!(text_of(gateway.admin, "/status").contains("the gateway starts: it accepts no client"));
    answers.store(true, Ordering::Relaxed);
    let gateway = gateway.serving();
    let ready = text_of(gateway.admin, "/readyz");
    // N10.3
    assert!(ready.starts_with("HTTP/1.1 200 ") && ready.contains(r#""starting":false"#), "{ready}");
}

#[test]
fn i7_a_gateway_that_stops_serves_until_its_drain_delay_is_over_or_a_second_signal() {
    let mut gateway = Gateway::start(engine_after(|| {}), "[timeouts]\ndrain_delay = '10m'").serving();
    let mut kept = TcpStream::connect(gateway.clients).unwrap();
    ask(&mut kept);
    let mut begin = [0; 15];
    kept.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    gateway.terminate();
    // I7.15
    until("the end of readiness", || text_of(gateway.admin, "/readyz").starts_with("HTTP/1.1 503 "));
    let status = text_of(gateway.admin, "/status");
    // I7.15
    assert!(status.contains(r#""draining":true"#) && status.contains("timeouts.drain_delay"), "{status}");
    let mut new = TcpStream::connect(gateway.clients).unwrap();
    for stream in [&mut new, &mut kept] {
        ask(stream);
        let answer = rest(stream);
        // The connection that was kept begins with the rest of its first answer.
        let last = answer.rsplit_once("HTTP/1.1 ").unwrap().1;
        // I7.15
        assert!(last.starts_with("200 OK\r\n") && last.contains("\r\nconnection: close\r\n"), "{answer}");
    }
    gateway.terminate();
    // I7.16
    assert!(gateway.process.wait().unwrap().success());
}

#[test]
fn i7_a_drain_delay_ends_by_itself() {
    let mut gateway = Gateway::start(engine_after(|| {}), "[timeouts]\ndrain_delay = '700ms'").serving();
    let begun = Instant::now();
    gateway.terminate();
    assert!(gateway.process.wait().unwrap().success());
    // I7.15
    assert!(begun.elapsed() >= Duration::from_millis(700));
}
