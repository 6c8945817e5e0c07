//! `pointsman serve` under a service manager: readiness, watchdog, and sockets that outlive a restart.

#![allow(clippy::unwrap_used, reason = "tests and their helpers may fail")]

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixDatagram,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;

use crate::{
    planned_stops::{self, rest, until},
    process::{POINTSMAN, Process, ask},
};

/// Starts `serve` as systemd does: by a shell that makes the sockets descriptors 3 and 4 and then becomes
/// the daemon, so that `LISTEN_PID` is right.
fn start(sockets: &[(&str, &TcpListener)], notify: Option<&std::path::Path>, arguments: &str) -> Process {
    start_with("LISTEN_PID=$$ WATCHDOG_PID=$$", sockets, notify, arguments)
}

/// Like [`start`], with these variables.
fn start_with(
    variables: &str,
    sockets: &[(&str, &TcpListener)],
    notify: Option<&std::path::Path>,
    arguments: &str,
) -> Process {
    let mut command = Command::new("/bin/bash");
    let (mut redirects, mut names) = (String::new(), Vec::new());
    for (index, (name, socket)) in sockets.iter().enumerate() {
        // The shell opens the parent's descriptor again under its number.
        use std::os::fd::AsRawFd as _;
        redirects.push_str(&format!(" {}<&{}", index + 3, socket.as_raw_fd()));
        names.push(*name);
    }
    command.arg("-c").arg(format!("export {variables}; exec {POINTSMAN} serve {arguments}{redirects}"));
    command.env("LISTEN_FDS", sockets.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
    if let Some(path) = notify {
        command.env("NOTIFY_SOCKET", path).env("WATCHDOG_USEC", "900000");
    }
    Process::start(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// A listening socket that child processes inherit.
fn inheritable() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::io::fcntl_setfd(&listener, rustix::io::FdFlags::empty()).unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// The socket of a service manager, and its path in a directory that lasts as long as the first value.
fn notify_socket() -> (tempfile::TempDir, std::path::PathBuf, UnixDatagram) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    (dir, path, socket)
}

/// The status line of `GET path`.
fn get(address: SocketAddr, path: &str) -> String {
    text_of(address, path).lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_connection_that_comes_between_two_processes_is_served_by_the_second() {
    let ((clients, address), (admin, admin_address)) = (inheritable(), inheritable());
    let sockets = [("clients", &clients), ("admin", &admin)];
    let mut first = start(&sockets, None, "--listen 127.0.0.1:1 --admin-listen 127.0.0.1:2");
    // N4.1: the sockets take the place of the addresses, which could not be bound without privileges.
    assert_eq!(get(address, "/health"), "HTTP/1.1 200 OK");
    assert_eq!(get(admin_address, "/healthz"), "HTTP/1.1 200 OK");
    first.terminate();

    // N4.2
    let waiting = std::thread::spawn(move || get(address, "/health"));
    std::thread::sleep(Duration::from_millis(300));
    let mut second = start(&sockets, None, "");
    assert_eq!(waiting.join().unwrap(), "HTTP/1.1 200 OK");
    second.terminate();
}

/// An engine that answers each question after `pause`. It serves until the test ends.
fn slow_engine(pause: Duration) -> SocketAddr {
    engine_after(move || std::thread::sleep(pause))
}

/// An engine that waits like this before each answer.
pub(crate) fn engine_after(wait: impl Fn() + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let serve = move |mut stream: TcpStream| {
        let mut head = [0; 4096];
        let length = stream.read(&mut head).unwrap_or(0);
        wait();
        let (status, body) = match String::from_utf8_lossy(head.get(..length).unwrap()).split(' ').nth(1) {
            Some("/v1/models") => ("200 OK", r#"{"object":"list","data":[{"id":"tiny"}]}"#),
            Some("/v1/completions") => {
                ("200 OK", r#"{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}"#)
            }
            Some("/health") => ("200 OK", "{}"),
            _ => ("404 Not Found", "{}"),
        };
        let head = "content-type: application/json\r\nconnection: close";
        let _ = write!(stream, "HTTP/1.1 {status}\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    address
}

#[test]
fn n10_a_client_that_waited_for_the_start_is_served_by_a_worker() {
    let ((clients, address), (admin, admin_address)) = (inheritable(), inheritable());
    let worker = |pause: u64, id: u64| {
        let engine = slow_engine(Duration::from_millis(pause));
        format!(" --worker id={id},role=aggregated,engine=openai,url=http://{engine}")
    };
    let waiting = std::thread::spawn(move || {
        let body = r#"{"model":"tiny","prompt":"hi","max_tokens":1}"#;
        ask(address, "POST /v1/completions", "", body).unwrap().lines().next().unwrap().to_owned()
    });
    let sockets = [("clients", &clients), ("admin", &admin)];
    let mut gateway = start(&sockets, None, &(worker(700, 1) + &worker(0, 2)));
    // N10.3
    assert_eq!(get(admin_address, "/healthz"), "HTTP/1.1 200 OK");
    // N10.1
    assert_eq!(waiting.join().unwrap(), "HTTP/1.1 200 OK");
    let status = text_of(admin_address, "/status");
    assert!(status.contains(r#""eligible":2,"#), "it waited for one of the workers only: {status}");
    gateway.terminate();
}

/// It waits in the kernel, where the next process finds it.
#[test]
fn n4_a_client_that_comes_during_the_drain_is_served_by_the_next_process() {
    let ((clients, address), (admin, admin_address)) = (inheritable(), inheritable());
    let sockets = [("clients", &clients), ("admin", &admin)];
    let held = Arc::new(AtomicBool::new(false));
    let is_held = held.clone();
    let engine = engine_after(move || {
        while is_held.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let worker = format!("--worker id=1,role=aggregated,engine=openai,url=http://{engine}");
    let mut first = start(&sockets, None, &worker);
    assert_eq!(get(address, "/health"), "HTTP/1.1 200 OK");
    let connect = || {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    };
    let (mut running, mut kept) = (connect(), connect());
    held.store(true, Ordering::Relaxed);
    planned_stops::ask(&mut running);
    until("a request in flight", || text_of(admin_address, "/status").contains(r#""inflight":1"#));
    write!(kept, "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut begin = [0; 15];
    kept.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    first.signal(Signal::TERM);
    until("the drain", || text_of(admin_address, "/status").contains("the gateway is draining"));
    planned_stops::ask(&mut kept);
    let refused = rest(&mut kept);
    // N4.8
    assert!(refused.contains("HTTP/1.1 503 ") && refused.contains("connection: close"), "{refused}");
    let mut new = connect();
    planned_stops::ask(&mut new);
    new.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    // N4.8
    assert_eq!(new.read(&mut begin).unwrap_err().kind(), ErrorKind::WouldBlock, "it was answered");
    held.store(false, Ordering::Relaxed);
    assert!(rest(&mut running).starts_with("HTTP/1.1 200 "));
    assert!(first.wait().unwrap().success());
    let mut second = start(&sockets, None, &worker);
    new.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    new.read_exact(&mut begin).unwrap();
    // N4.8
    assert_eq!(&begin, b"HTTP/1.1 200 OK");
    second.terminate();
}

/// The whole answer to `GET path`.
pub(crate) fn text_of(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path}"), "", "").unwrap()
}

#[test]
fn the_service_manager_hears_of_readiness_life_and_the_end() {
    let (_dir, path, socket) = notify_socket();
    let hear = || {
        let mut text = [0; 512];
        let length = socket.recv(&mut text).unwrap();
        String::from_utf8_lossy(text.get(..length).unwrap()).trim_end().to_owned()
    };
    let mut child = start(&[], Some(&path), "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0");
    // N4.3
    assert_eq!(hear(), "READY=1");
    // N4.4
    assert_eq!((hear().as_str(), hear().as_str()), ("WATCHDOG=1", "WATCHDOG=1"));
    child.signal(Signal::TERM);
    let last = std::iter::repeat_with(hear).find(|text| text != "WATCHDOG=1").unwrap();
    assert_eq!(last, "STOPPING=1");
    assert!(child.wait().unwrap().success());
}

#[test]
fn n4_the_service_manager_is_asked_for_as_much_time_as_the_drain_may_take() {
    let (_dir, path, socket) = notify_socket();
    let hear = || {
        let mut text = [0; 512];
        let length = socket.recv(&mut text).unwrap();
        String::from_utf8_lossy(text.get(..length).unwrap()).into_owned()
    };
    let variables = "LISTEN_PID=$$ POINTSMAN__TIMEOUTS__DRAIN=5m POINTSMAN__TIMEOUTS__DRAIN_DELAY=200ms";
    let mut child =
        start_with(variables, &[], Some(&path), "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0");
    assert_eq!(hear(), "READY=1\n");
    child.signal(Signal::TERM);
    let mut said = std::iter::repeat_with(hear).filter(|text| text != "WATCHDOG=1\n");
    assert_eq!(said.next().unwrap(), "STOPPING=1\n");
    // N4.7
    assert_eq!(said.next().unwrap(), "EXTEND_TIMEOUT_USEC=315200000\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn n4_a_watchdog_that_names_no_process_gets_reports() {
    let (_dir, path, socket) = notify_socket();
    let arguments = "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0";
    let mut child = start_with("LISTEN_PID=$$", &[], Some(&path), arguments);
    for expected in ["READY=1\n", "WATCHDOG=1\n"] {
        let mut text = [0; 512];
        let length = socket.recv(&mut text).unwrap();
        // N4.5
        assert_eq!(String::from_utf8_lossy(text.get(..length).unwrap()), expected);
    }
    child.terminate();
}

#[cfg(target_os = "linux")]
#[test]
fn n4_a_socket_without_a_file_hears_of_readiness() {
    use std::os::{linux::net::SocketAddrExt as _, unix::net::SocketAddr};

    let name = format!("pointsman-test-{}", std::process::id());
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let notify = format!("@{name}");
    let mut child = start(&[], Some(notify.as_ref()), "--listen 127.0.0.1:0 --admin-listen 127.0.0.1:0");
    let mut text = [0; 8];
    socket.recv(&mut text).unwrap();
    // N4.6
    assert_eq!(&text, b"READY=1\n");
    child.terminate();
}

#[test]
fn n7_a_stop_of_the_unit_signals_the_gateway_and_not_its_compiler_processes() {
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd/pointsman.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    // N7.18
    assert!(unit.lines().any(|line| line == "KillMode=mixed"), "{unit}");
}

#[test]
fn a_socket_with_another_name_is_refused() {
    let (socket, _) = inheritable();
    let mut child = start(&[("http", &socket)], None, "");
    assert_eq!(child.wait().unwrap().code(), Some(2));
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    let expected =
        "the service manager passed a socket named `http`: expected FileDescriptorName=clients or admin";
    assert!(text.contains(expected), "{text}");
}
