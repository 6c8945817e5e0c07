//! `pointsman serve` with files that change while it starts and while it serves.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use pointsman_gateway::config::KeyDigest;
use pointsman_rig::fleet::free_port;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    runtime::Runtime,
    time::Instant,
};

use crate::{
    authority::Authority,
    process::{LIMIT, POINTSMAN, Process, ask, body_of, command},
};

fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()))
}

/// A gateway with the configuration `p.toml` of its directory.
struct Gateway {
    _process: Process,
    clients: SocketAddr,
    dir: TempDir,
}

impl Gateway {
    /// Starts a gateway. Returns when its port is bound: then it still compiles its policies.
    fn start(dir: TempDir, clients: SocketAddr) -> Self {
        Self::start_with(dir, clients, &[])
    }

    fn start_with(dir: TempDir, clients: SocketAddr, variables: &[(&str, &str)]) -> Self {
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let mut command = command(POINTSMAN, &["serve", "--config", "p.toml"]);
        command.current_dir(dir.path()).stdout(Stdio::null()).stderr(log).envs(variables.iter().copied());
        let gateway = Self { _process: Process::start(&mut command), clients, dir };
        gateway.until("its port is bound", |gateway| TcpStream::connect(gateway.clients).is_ok());
        gateway
    }

    fn until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let begun = Instant::now();
        while !condition(self) {
            assert!(begun.elapsed() < LIMIT, "waited in vain until {what}: {}", self.log());
            // Wrong keys are counted.
            thread::sleep(Duration::from_millis(500));
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn accepts(&self, key: &str) -> bool {
        is_accepted(self.clients, "GET /v1/models", key)
    }
}

/// Returns whether an address answers this request with 200.
fn is_accepted(address: SocketAddr, request: &str, key: &str) -> bool {
    answer(address, request, key).starts_with("HTTP/1.1 200")
}

fn answer(address: SocketAddr, request: &str, key: &str) -> String {
    ask(address, request, &format!("authorization: Bearer {key}\r\n"), "").unwrap()
}

#[test]
fn n1_a_key_that_is_revoked_while_the_gateway_starts_is_refused() {
    let clients = free_address();
    let dir = tempfile::tempdir().unwrap();
    let (config, key_file) = (dir.path().join("p.toml"), dir.path().join("keys/b.toml"));
    let entry = |key: &str| format!("[[auth.keys]]\nid = '{key}'\ndigest = '{}'\n", KeyDigest::sha256(key));
    let head = format!(
        "[server]\nlisten = '{clients}'\nadmin_listen = '127.0.0.1:0'\nthreads = 1\n\
         [policies.slots.prefill]\nbuiltin = 'kv-aware'\n"
    );
    let with_keys = |keys: &[&str]| {
        let entries: String = keys.iter().map(|key| entry(key)).collect();
        fs::write(&config, format!("{head}[auth]\nkey_dir = 'keys'\n{entries}")).unwrap();
    };
    fs::create_dir(dir.path().join("keys")).unwrap();
    fs::write(&key_file, entry("b")).unwrap();
    with_keys(&["a", "c"]);
    let gateway = Gateway::start(dir, clients);
    with_keys(&["c"]);
    fs::remove_file(key_file).unwrap();
    // N1.7: of the configuration file, and of a key file
    gateway.until("key a is refused", |gateway| !gateway.accepts("a"));
    gateway.until("key b is refused", |gateway| !gateway.accepts("b"));
    assert!(gateway.accepts("c"));
    let refusals = |gateway: &Gateway| gateway.log().matches("configuration not reloaded").count();
    assert_eq!(refusals(&gateway), 0, "{}", gateway.log());
    fs::write(&config, &head).unwrap();
    gateway.until("the file without keys is refused", |gateway| refusals(gateway) > 0);
    thread::sleep(Duration::from_secs(4));
    // N1.4: said once
    assert_eq!(refusals(&gateway), 1, "{}", gateway.log());
    assert!(gateway.accepts("c"));
}

/// Replaces a file by one of the same time, as `rsync -t` does. Its length stays the same, too.
fn replace(file: &Path, text: &str) {
    let before = fs::metadata(file).unwrap();
    let next = file.with_extension("next");
    fs::write(&next, text).unwrap();
    fs::File::options().write(true).open(&next).unwrap().set_modified(before.modified().unwrap()).unwrap();
    assert_eq!(fs::metadata(&next).unwrap().len(), before.len());
    fs::rename(next, file).unwrap();
}

/// Changes a file, and keeps its time and length.
fn write_in_place(file: &Path, text: &str) {
    let before = fs::metadata(file).unwrap();
    fs::write(file, text).unwrap();
    fs::File::options().write(true).open(file).unwrap().set_modified(before.modified().unwrap()).unwrap();
    assert_eq!(fs::metadata(file).unwrap().len(), before.len());
}

#[test]
fn k1_every_file_that_names_or_holds_a_secret_is_watched_by_its_content() {
    let [clients, admin] = [(); 2].map(|()| free_address());
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let [config, token, digest, key_file] = ["p.toml", "token", "digest", "keys/a.toml"].map(path);
    let server = format!("[server]\nlisten = '{clients}'\nadmin_listen = '{admin}'\nthreads = 1\n");
    fs::write(config, format!("{server}[auth]\nkey_dir = 'keys'\n")).unwrap();
    fs::create_dir(path("keys")).unwrap();
    let entry = |id: &str, digest: &str| format!("[[auth.keys]]\nid = '{id}'\ndigest = {digest}\n");
    let own = |key: &str| entry("own", &format!("'{}'", KeyDigest::sha256(key)));
    let named = entry("named", "{ file = 'digest' }");
    fs::write(&key_file, own("own-key-1") + &named).unwrap();
    fs::write(&digest, KeyDigest::sha256("named-key-1").to_string()).unwrap();
    let tokens = ["token-of-operators-1", "token-of-operators-2"];
    fs::write(&token, tokens[0]).unwrap();
    let variables = [("POINTSMAN__SERVER__ADMIN_TOKEN", "{ file = 'token' }")];
    let gateway = Gateway::start_with(dir, clients, &variables);
    let changes = |token: &str| is_accepted(admin, "POST /policies/reload", token);
    gateway.until("the first secrets are accepted", |gateway| {
        changes(tokens[0]) && gateway.accepts("own-key-1") && gateway.accepts("named-key-1")
    });
    // K1.6: each of them alone
    replace(&digest, &KeyDigest::sha256("named-key-2").to_string());
    gateway.until("the named key is refused", |gateway| !gateway.accepts("named-key-1"));
    assert!(gateway.accepts("named-key-2") && gateway.accepts("own-key-1"));
    replace(&key_file, &(own("own-key-2") + &named));
    gateway.until("the own key is refused", |gateway| !gateway.accepts("own-key-1"));
    replace(&token, tokens[1]);
    gateway.until("the token is refused", |_| !changes(tokens[0]));
    assert!(gateway.accepts("own-key-2") && gateway.accepts("named-key-2") && changes(tokens[1]));
    // Looks do not read files any more that were like this for three seconds.
    thread::sleep(Duration::from_secs(5));
    write_in_place(&key_file, &(own("own-key-3") + &named));
    // K1.6
    gateway.until("the second own key is refused", |gateway| !gateway.accepts("own-key-2"));
    assert!(gateway.accepts("own-key-3"));
}

/// Starts a server with TLS that answers each request with a set of public keys. It ends with the runtime.
fn identity_server(authority: &Authority) -> (SocketAddr, Runtime) {
    const KEYS: &str = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","kid":"a",
        "x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let (address, acceptor) = (listener.local_addr().unwrap(), authority.acceptor());
    runtime.spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let Ok(mut socket) = acceptor.accept(socket).await else { continue };
            let _ = socket.read(&mut [0; 4096]).await;
            let head = format!("content-length: {}\r\nconnection: close", KEYS.len());
            let _ = socket.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{KEYS}").as_bytes()).await;
            let _ = socket.shutdown().await;
        }
    });
    (address, runtime)
}

#[test]
fn k1_a_renewed_ca_of_the_identity_server_is_used_and_keeps_its_last_keys() {
    let clients = free_address();
    let dir = tempfile::tempdir().unwrap();
    let [right, wrong] = [(); 2].map(|()| Authority::new("127.0.0.1"));
    let (server, _runtime) = identity_server(&right);
    let ca = dir.path().join("ca.pem");
    fs::write(&ca, &wrong.pem).unwrap();
    let text = format!(
        "[server]\nlisten = '{clients}'\nadmin_listen = '127.0.0.1:0'\nthreads = 1\n[auth.jwt]\nissuer = 'a'\n\
         audience = ['b']\njwks_url = 'https://{server}/'\njwks_ca = 'ca.pem'\n"
    );
    fs::write(dir.path().join("p.toml"), text).unwrap();
    let gateway = Gateway::start(dir, clients);
    let failures =
        |gateway: &Gateway| gateway.log().matches("public keys of the identity server not").count();
    gateway.until("the server is not trusted", |gateway| failures(gateway) > 0);
    // A token of a key of the set, which is no right one.
    let status = |_: &Gateway| {
        let token = "eyJhbGciOiJFZERTQSIsImtpZCI6ImEifQ.e30.AAAA";
        answer(clients, "GET /v1/models", token)[9..12].to_owned()
    };
    assert_eq!(status(&gateway), "503");
    fs::write(&ca, &right.pem).unwrap();
    // K1.6
    gateway.until("the keys are fetched", |gateway| status(gateway) == "401");
    let before = failures(&gateway);
    fs::write(&ca, &wrong.pem).unwrap();
    gateway.until("the server is not trusted again", |gateway| failures(gateway) > before);
    // K2.6
    assert_eq!(status(&gateway), "401");
}

/// Holds a lease of a file for ten seconds and more: a process that opens it waits, as for a server that is
/// away.
const HOLD: &str = "
import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = os.open('p.toml', os.O_RDWR)
while True:
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        break
    except OSError:
        time.sleep(0.01)
sys.stdin.read()
";

#[test]
fn n1_a_configuration_file_that_does_not_answer_is_reported() {
    let [clients, admin] = [(); 2].map(|()| free_address());
    let dir = tempfile::tempdir().unwrap();
    let text = format!("[server]\nlisten = '{clients}'\nadmin_listen = '{admin}'\n");
    fs::write(dir.path().join("p.toml"), text).unwrap();
    let gateway = Gateway::start(dir, clients);
    let hold = || {
        let mut python = Command::new("python3");
        python.args(["-c", HOLD]).current_dir(gateway.dir.path()).stdin(Stdio::piped()).spawn().unwrap()
    };
    let status = |_: &Gateway| {
        let status = body_of(admin, "GET /status", "").unwrap();
        status.contains("the configuration file cannot be read: no answer within 10 s")
    };
    let mut holder = hold();
    // N1.6
    gateway.until("it is reported", status);
    drop(holder.stdin.take());
    holder.wait().unwrap();
    // N1.6
    gateway.until("the report is taken back", |gateway| !status(gateway));
    assert_eq!(gateway.log().matches("configuration file cannot be read").count(), 1);
}
