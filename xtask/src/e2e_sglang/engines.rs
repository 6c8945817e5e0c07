//! Real SGLang engines on loopback.

use std::path::{Path, PathBuf};

use super::install;
use crate::{
    fleet::free_port,
    real_engines::{RealEngine, Venv},
};

/// An installed SGLang and its model.
#[derive(Debug)]
pub(crate) struct Installed {
    venv: Venv,
    model: PathBuf,
}

/// Way in which an engine is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// A plain engine, with KV events.
    Plain,
    Prefill,
    Decode,
}

impl Installed {
    /// Uses a virtual environment, which is created if it does not exist.
    pub(crate) fn at(venv: &Path) -> anyhow::Result<Self> {
        let venv = Venv::at(venv);
        install::ensure(&venv)?;
        Ok(Self { model: venv.model()?, venv })
    }

    /// Starts an engine without waiting until it is ready.
    pub(crate) fn start(&self, name: &str, part: Part, dir: &Path) -> anyhow::Result<RealEngine> {
        let port = free_port()?;
        let mut command = self.venv.python();
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
            Part::Plain => {
                let config = serde_json::json!({
                    "publisher": "zmq", "endpoint": format!("tcp://*:{}", free_port()?),
                    "replay_endpoint": format!("tcp://*:{}", free_port()?),
                });
                command.args(["--kv-events-config", &config.to_string()]);
                return RealEngine::start(name, port, command, dir);
            }
            Part::Prefill => "prefill",
            Part::Decode => {
                command.args(["--disaggregation-decode-retraction-backup", "cpu_tensor"]);
                "decode"
            }
        };
        command.args(["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp"]);
        command.args(["--disaggregation-bootstrap-port", &free_port()?.to_string()]);
        RealEngine::start(name, port, command, dir)
    }
}
