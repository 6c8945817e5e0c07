//! The real etcd, for tests of workers that it names.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::ensure;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::{client::Client, nats::free_port};

/// A running etcd.
pub struct Etcd {
    process: Child,
    ports: [u16; 2],
    data: TempDir,
}

impl Etcd {
    /// Starts a server without TLS. `None`, with a message, when it is not installed.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    #[expect(clippy::print_stderr, reason = "a test says that it was skipped")]
    pub async fn start() -> Option<Self> {
        let (ports, data) = ([free_port(), free_port()], TempDir::new().ok()?);
        let Some(process) = spawn(data.path(), ports, "http", &[]) else {
            eprintln!("skipped: etcd is not in the PATH (Debian: apt-get install etcd-server)");
            return None;
        };
        let server = Self { process, ports, data };
        server.ready().await;
        Some(server)
    }

    /// Starts it again with TLS, with these flags.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn restart_with_tls(&mut self, flags: &[String]) {
        self.kill();
        if let Some(process) = spawn(self.data.path(), self.ports, "https", flags) {
            self.process = process;
        }
        self.ready().await;
    }

    /// Port of the clients on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// Writes a key.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn put(&self, key: &str, value: &Value) -> anyhow::Result<()> {
        let (key, value) = (BASE64.encode(key), BASE64.encode(value.to_string()));
        self.call("/v3/kv/put", json!({ "key": key, "value": value })).await.map(drop)
    }

    /// Calls the JSON gateway without TLS.
    ///
    /// # Errors
    /// The server refused the call.
    pub async fn call(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        let client = Client::new(SocketAddr::from((Ipv4Addr::LOCALHOST, self.port())));
        let reply = client.post(path, &[], body.to_string()).await?;
        ensure!(reply.status == 200, "{path}: {reply:?}");
        reply.json()
    }

    #[expect(clippy::panic, reason = "helpers of tests may fail as tests do")]
    async fn ready(&self) {
        for _ in 0..500 {
            if TcpStream::connect(("127.0.0.1", self.port())).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("etcd does not listen");
    }

    fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(data: &Path, [client, peer]: [u16; 2], scheme: &str, flags: &[String]) -> Option<Child> {
    let (client, peer) = (format!("{scheme}://127.0.0.1:{client}"), format!("http://127.0.0.1:{peer}"));
    let mut command = Command::new("etcd");
    command.args(["--name", "a", "--data-dir"]).arg(data);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("a={peer}")]).args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok()
}
