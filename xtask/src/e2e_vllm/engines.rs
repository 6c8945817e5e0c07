//! Real vLLM engines on loopback.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;

use super::{Connector, install};
use crate::{
    fleet::free_port,
    real_engines::{RealEngine, Venv},
};

/// An installed vLLM, and its model.
#[derive(Debug)]
pub(crate) struct Installed {
    venv: Venv,
    pub(crate) model: PathBuf,
}

/// A running engine.
#[derive(Debug)]
pub(crate) struct Vllm {
    pub(crate) engine: RealEngine,
    /// Keys of its worker description besides role and URL.
    keys: String,
}

/// Way in which an engine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Plain,
    Prefill(Connector),
    Decode(Connector),
    /// Publishes KV events.
    KvEvents,
}

impl Installed {
    /// Uses a virtual environment, which is created if it does not exist.
    pub(crate) fn at(venv: &Path) -> anyhow::Result<Self> {
        let venv = Venv::at(venv);
        install::ensure(&venv)?;
        Ok(Self { model: venv.model()?, venv })
    }

    /// Starts an engine without waiting until it is ready.
    pub(crate) fn start(&self, name: &str, part: Part, dir: &Path, blocks: u32) -> anyhow::Result<Vllm> {
        let port = free_port()?;
        let mut command = Command::new(self.venv.program("vllm"));
        command
            .arg("serve")
            .arg(&self.model)
            .args(["--served-model-name", "tiny", "--load-format", "dummy", "--seed", "0"])
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--dtype", "float32"])
            .args(["--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "16"])
            .args(["--enforce-eager", "--num-gpu-blocks-override", &blocks.to_string()])
            .args(["--enable-prompt-tokens-details", "--enable-prefix-caching"])
            .envs([("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")])
            .envs([("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")]);
        let keys = match part {
            Part::Plain => String::new(),
            Part::Prefill(Connector::Nixl) | Part::Decode(Connector::Nixl) => nixl(&mut command)?,
            Part::Prefill(Connector::Mooncake) => mooncake(&mut command, "kv_producer")?,
            Part::Decode(Connector::Mooncake) => mooncake(&mut command, "kv_consumer")?,
            Part::KvEvents => kv_events(&mut command)?,
        };
        Ok(Vllm { engine: RealEngine::start(name, port, command, dir)?, keys })
    }
}

fn nixl(command: &mut Command) -> anyhow::Result<String> {
    let config = r#"{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu"}"#;
    command
        .args(["--kv-transfer-config", config])
        .env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        .env("VLLM_NIXL_SIDE_CHANNEL_PORT", free_port()?.to_string())
        .envs([("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "tcp,self,sm,cma")]);
    Ok(String::new())
}

fn mooncake(command: &mut Command, role: &str) -> anyhow::Result<String> {
    let bootstrap = free_port()?;
    let config = json!({
        "kv_connector": "MooncakeConnector", "kv_role": role,
        "kv_connector_extra_config": { "mooncake_protocol": "tcp" },
    });
    command
        .args(["--kv-transfer-config", &config.to_string()])
        .env("VLLM_MOONCAKE_BOOTSTRAP_PORT", bootstrap.to_string())
        .envs([("MC_FORCE_TCP", "1"), ("VLLM_HOST_IP", "127.0.0.1")]);
    Ok(format!(",transport=mooncake,bootstrap_port={bootstrap}"))
}

fn kv_events(command: &mut Command) -> anyhow::Result<String> {
    let (port, replay) = (free_port()?, free_port()?);
    let config = json!({
        "enable_kv_cache_events": true, "publisher": "zmq",
        "endpoint": format!("tcp://*:{port}"), "replay_endpoint": format!("tcp://*:{replay}"),
    });
    command.args(["--kv-events-config", &config.to_string()]);
    Ok(format!(",kv_events=tcp://127.0.0.1:{port},kv_replay=tcp://127.0.0.1:{replay}"))
}

impl Vllm {
    /// Returns the `--worker` flag for this engine in a role.
    pub(crate) fn as_worker(&self, role: &str) -> String {
        format!("role={role},engine=vllm,url=http://{}{}", self.engine.address, self.keys)
    }
}
