//! Installed engines, and their processes on loopback.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;

use super::RealEngine;
use crate::{fleet::free_port, sh};

/// Script that installs an engine.
const INSTALL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/real_engines/install.sh");

/// An engine, with the connector over which a pair of it moves KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The prefill leg runs first; its answer names the blocks.
    VllmNixl,
    /// Both legs run at once, connected by a transfer id.
    VllmMooncake,
    Sglang,
}

/// Way in which an engine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// One engine; SGLang also publishes KV events, which the gateway finds by itself.
    Plain,
    Prefill,
    Decode,
    /// vLLM that publishes KV events.
    KvEvents,
}

/// An installed engine, and its model.
#[derive(Debug)]
pub(crate) struct Installed {
    kind: Kind,
    venv: PathBuf,
    pub(crate) model: PathBuf,
}

impl Installed {
    /// Uses a virtual environment, which is created if it does not exist.
    pub(crate) fn at(kind: Kind, venv: Option<&Path>) -> anyhow::Result<Self> {
        let default = match kind {
            Kind::VllmNixl | Kind::VllmMooncake => "target/venv-vllm",
            Kind::Sglang => "target/venv-sglang",
        };
        Self::of_version(kind, venv.unwrap_or(Path::new(default)), None)
    }

    /// Uses a virtual environment with this version of the engine [default: the newest that is tested].
    pub(crate) fn of_version(kind: Kind, venv: &Path, version: Option<&str>) -> anyhow::Result<Self> {
        let engine = if kind == Kind::Sglang { "sglang" } else { "vllm" };
        let venv = sh::root().join(venv);
        sh::run(Command::new("bash").args([INSTALL, engine]).arg(&venv).args(version))?;
        Ok(Self { kind, model: venv.join("tiny-model"), venv })
    }

    /// Starts an engine with so many KV blocks, without waiting until it is ready.
    pub(crate) fn start(
        &self,
        name: &str,
        part: Part,
        dir: &Path,
        blocks: u32,
    ) -> anyhow::Result<RealEngine> {
        let port = free_port()?;
        let (command, dialect, keys) = match self.kind {
            Kind::Sglang => (self.sglang(part, port)?, "sglang", String::new()),
            Kind::VllmNixl | Kind::VllmMooncake => {
                let (command, keys) = self.vllm(part, port, blocks)?;
                (command, "vllm", keys)
            }
        };
        RealEngine::start(
            name,
            port,
            command,
            dir,
            format!("engine={dialect},url=http://127.0.0.1:{port}{keys}"),
        )
    }

    /// Returns the command, and keys of the worker's description besides role and URL.
    fn vllm(&self, part: Part, port: u16, blocks: u32) -> anyhow::Result<(Command, String)> {
        let mut command = Command::new(self.venv.join("bin/vllm"));
        // A prompt has to fit into the cache, and the model knows 8,192 positions.
        let longest = (blocks * 32).clamp(2048, 8192).to_string();
        command
            .arg("serve")
            .arg(&self.model)
            .args(["--served-model-name", "tiny", "--load-format", "dummy", "--seed", "0"])
            .args(["--host", "127.0.0.1", "--port", &port.to_string(), "--dtype", "float32"])
            .args(["--max-model-len", &longest, "--block-size", "32", "--max-num-seqs", "16"])
            .args(["--enforce-eager", "--num-gpu-blocks-override", &blocks.to_string()])
            .args(["--enable-prompt-tokens-details", "--enable-prefix-caching"])
            .envs([("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")])
            .envs([("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("VLLM_NO_USAGE_STATS", "1")]);
        let keys = match part {
            Part::Plain => String::new(),
            Part::KvEvents => kv_events(&mut command)?,
            Part::Prefill | Part::Decode if self.kind == Kind::VllmNixl => nixl(&mut command)?,
            Part::Prefill => mooncake(&mut command, "kv_producer")?,
            Part::Decode => mooncake(&mut command, "kv_consumer")?,
        };
        Ok((command, keys))
    }

    fn sglang(&self, part: Part, port: u16) -> anyhow::Result<Command> {
        let mut command = Command::new(self.venv.join("bin/python"));
        command
            .args(["-m", "sglang.launch_server", "--model-path"])
            .arg(&self.model)
            .args(["--served-model-name", "tiny", "--load-format", "dummy", "--random-seed", "0"])
            .args(["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"])
            .args(["--sampling-backend", "pytorch", "--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--context-length", "2048", "--max-total-tokens", "16384"])
            .args(["--max-running-requests", "16", "--disable-overlap-schedule", "--disable-cuda-graph"])
            .args(["--enable-metrics", "--enable-cache-report", "--sleep-on-idle"])
            .envs([("SGLANG_USE_CPU_ENGINE", "1"), ("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", "1")])
            .envs([("SGLANG_HOST_IP", "127.0.0.1"), ("HOST_IP", "127.0.0.1"), ("GLOO_SOCKET_IFNAME", "lo")]);
        let mode = match part {
            Part::Plain | Part::KvEvents => {
                let config = json!({
                    "publisher": "zmq", "endpoint": format!("tcp://*:{}", free_port()?),
                    "replay_endpoint": format!("tcp://*:{}", free_port()?),
                });
                command.args(["--kv-events-config", &config.to_string()]);
                return Ok(command);
            }
            Part::Prefill => "prefill",
            Part::Decode => {
                command.args(["--disaggregation-decode-retraction-backup", "cpu_tensor"]);
                "decode"
            }
        };
        command.args(["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp"]);
        command.args(["--disaggregation-bootstrap-port", &free_port()?.to_string()]);
        Ok(command)
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
