//! The real etcd, for tests of workers that it names.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use pointsman_rig::fleet::free_port;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::{
    client::{Client, Reply},
    network::Place,
};

/// A running etcd.
pub struct Etcd {
    process: Child,
    place: Place,
    ports: [u16; 2],
    data: TempDir,
}

impl Etcd {
    /// Starts a server without TLS. `None`, with a message, when it is not installed.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn start() -> Option<Self> {
        Self::start_at(Place::HERE).await
    }

    /// Starts a server elsewhere.
    ///
    /// # Panics
    /// Same as [`Self::start`].
    #[expect(clippy::print_stderr, clippy::expect_used, reason = "a part of a test")]
    pub async fn start_at(place: Place) -> Option<Self> {
        let ports = [(); 2].map(|()| free_port().expect("a free port"));
        let data = TempDir::new().ok()?;
        let Some(process) = spawn(data.path(), place, ports, "http", &[]) else {
            eprintln!("skipped: etcd is not in the PATH (Debian: apt-get install etcd-server)");
            return None;
        };
        let server = Self { process, place, ports, data };
        server.ready().await;
        Some(server)
    }

    /// Starts it again with these flags, for clients of this scheme: `http` or `https`.
    ///
    /// # Panics
    /// It does not listen within 10 s.
    pub async fn restart(&mut self, scheme: &str, flags: &[String]) {
        self.kill();
        if let Some(process) = spawn(self.data.path(), self.place, self.ports, scheme, flags) {
            self.process = process;
        }
        self.ready().await;
    }

    /// Port of the clients.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.ports[0]
    }

    /// Writes a key.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn put(&self, key: &str, value: &Value) -> anyhow::Result<()> {
        self.put_leased(key, value, 0).await
    }

    /// Writes a key that ends with a lease; 0: with none.
    ///
    /// # Errors
    /// See [`Self::call`].
    pub async fn put_leased(&self, key: &str, value: &Value, lease: u64) -> anyhow::Result<()> {
        let (key, value) = (BASE64.encode(key), BASE64.encode(value.to_string()));
        let body = json!({ "key": key, "value": value, "lease": lease.to_string() });
        self.call("/v3/kv/put", body).await.map(drop)
    }

    /// Calls the JSON gateway without TLS.
    ///
    /// # Errors
    /// The server refused the call.
    pub async fn call(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        succeeded(path, &self.post(&[], path, &body).await?)
    }

    /// Calls it as a user. Where tokens end after a second, one can end before a slow machine sends it:
    /// then the call has another token.
    ///
    /// # Errors
    /// The server refused the user or the call.
    pub async fn call_as(
        &self,
        user: &str,
        password: &str,
        path: &str,
        body: Value,
    ) -> anyhow::Result<Value> {
        let who = json!({ "name": user, "password": password });
        let mut attempts = 10;
        loop {
            let answer = self.call("/v3/auth/authenticate", who.clone()).await?;
            let token = answer.get("token").and_then(Value::as_str).context("no token")?;
            let reply = self.post(&[("authorization", token)], path, &body).await?;
            attempts -= 1;
            let ended =
                reply.status == 401 && String::from_utf8_lossy(&reply.body).contains("invalid auth token");
            if !ended || attempts == 0 {
                return succeeded(path, &reply);
            }
        }
    }

    async fn post(&self, headers: &[(&str, &str)], path: &str, body: &Value) -> anyhow::Result<Reply> {
        let client = Client::new(SocketAddr::from((self.place.address, self.port())));
        client.post(path, headers, body.to_string()).await
    }

    #[expect(clippy::panic, reason = "helpers of tests may fail as tests do")]
    async fn ready(&self) {
        for _ in 0..500 {
            if TcpStream::connect((self.place.address, self.port())).await.is_ok() {
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

fn succeeded(path: &str, reply: &Reply) -> anyhow::Result<Value> {
    ensure!(reply.status == 200, "{path}: {reply:?}");
    reply.json()
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

fn spawn(data: &Path, place: Place, ports: [u16; 2], scheme: &str, flags: &[String]) -> Option<Child> {
    let [client, peer] = ports;
    let (client, peer) =
        (format!("{scheme}://{}:{client}", place.address), format!("http://127.0.0.1:{peer}"));
    let mut command = place.command("etcd");
    command.args(["--name", "a", "--data-dir"]).arg(data);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("a={peer}")]).args(flags);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok()
}
