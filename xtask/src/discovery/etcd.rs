//! The real etcd, through its JSON gateway.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::{Value, json};

use super::Server;
use crate::{
    client::Client,
    fleet::{End, Process, free_port},
    poll::until,
};

/// A running etcd.
pub(crate) struct Etcd {
    process: Option<Process>,
    dir: PathBuf,
    /// Port for clients, and port for other servers.
    pub(crate) ports: [u16; 2],
    client: Client,
}

impl Etcd {
    /// Registers a worker.
    pub(crate) async fn register(&self, id: u64, address: &str, role: &str) -> anyhow::Result<()> {
        let worker = json!({ "id": id, "url": format!("http://{address}"), "role": role, "engine": "vllm" });
        let body = json!({ "key": key(id), "value": BASE64.encode(worker.to_string()) });
        self.call("/v3/kv/put", body).await.map(drop)
    }

    pub(crate) async fn start(dir: &Path) -> anyhow::Result<Self> {
        let ports = [free_port()?, free_port()?];
        let client = Client::new(&format!("127.0.0.1:{}", ports[0]));
        let mut etcd = Self { process: None, dir: dir.to_owned(), ports, client };
        etcd.spawn().await?;
        Ok(etcd)
    }

    async fn spawn(&mut self) -> anyhow::Result<()> {
        let [client, peer] = self.ports.map(|port| format!("http://127.0.0.1:{port}"));
        let mut command = Command::new("etcd");
        command.args(["--name", "a", "--data-dir"]).arg(self.dir.join("etcd"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("a={peer}")]);
        let process = Process::logging("etcd", command, &self.dir, End::Kill);
        self.process = Some(process.context("starting etcd: install Debian's etcd-server")?);
        let answer = || async {
            Ok(self.call("/v3/kv/range", json!({ "key": BASE64.encode("a") })).await.ok().map(drop))
        };
        until("etcd answers", Duration::from_secs(30), answer).await
    }

    async fn call(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.client.post(path, body.to_string()).await?)?)
    }
}

/// Returns the section of a gateway's configuration for an etcd at this port.
pub(crate) fn section(port: u16) -> String {
    format!("[[discovery.etcd]]\nname = \"a\"\nendpoints = [\"http://127.0.0.1:{port}\"]\nprefix = \"/w/\"\n")
}

fn key(id: u64) -> String {
    BASE64.encode(format!("/w/{id}"))
}

impl Server for Etcd {
    async fn put(&mut self, id: u64, address: &str) -> anyhow::Result<()> {
        self.register(id, address, "aggregated").await
    }

    async fn delete(&mut self, id: u64) -> anyhow::Result<()> {
        self.call("/v3/kv/deleterange", json!({ "key": key(id) })).await.map(drop)
    }

    async fn fail(&mut self) -> anyhow::Result<()> {
        // Dropping the process sends SIGKILL, as in a crash.
        self.process = None;
        Ok(())
    }

    async fn recover(&mut self) -> anyhow::Result<()> {
        self.spawn().await?;
        // This makes a new revision, because etcd refuses to compact a revision that was compacted before.
        let mark = json!({ "key": BASE64.encode("compacted"), "value": "" });
        let written = self.call("/v3/kv/put", mark).await?;
        let revision = written["header"]["revision"].as_str().context("etcd told no revision")?.to_owned();
        self.call("/v3/kv/compaction", json!({ "revision": revision, "physical": true })).await.map(drop)
    }

    fn config(&self) -> String {
        section(self.ports[0])
    }

    fn source(&self) -> &'static str {
        "etcd:a"
    }
}
