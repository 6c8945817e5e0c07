//! vLLM's and SGLang's routers, started as their documentation says: round robin, no index.

use std::{path::Path, process::Command, time::Duration};

use super::{
    super::{
        engines::{Engine, Engines},
        scenario::{Scenario, Shape},
    },
    Router,
};
use crate::fleet::{End, Process, free_port};

/// Starts a rival and waits until it serves.
pub(super) async fn start(
    kind: Router,
    python: &Path,
    dir: &Path,
    scenario: &Scenario,
    engines: &Engines,
) -> anyhow::Result<(String, Process)> {
    let port = free_port()?;
    let (module, pair) = match kind {
        Router::Vllm => ("vllm_router.launch_router", "--vllm-pd-disaggregation"),
        _ => ("sglang_router.launch_router", "--pd-disaggregation"),
    };
    let mut command = Command::new(python);
    command.args(["-m", module, "--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"]);
    command.args(["--port", &port.to_string(), "--prometheus-port", &free_port()?.to_string()]);
    let url = |engine: &Engine| format!("http://{}", engine.address);
    if matches!(scenario.shape, Shape::Disaggregated(_)) {
        command.arg(pair);
        for engine in &engines.prefill {
            command.args(["--prefill", &url(engine)]);
            if kind == Router::Sglang {
                command.arg(engine.bootstrap_port.to_string());
            }
        }
        for engine in &engines.serving {
            command.args(["--decode", &url(engine)]);
        }
        if kind == Router::Vllm {
            command.args(["--kv-connector", "nixl"]);
        }
    } else {
        command.arg("--worker-urls").args(engines.serving.iter().map(url));
    }
    let address = format!("127.0.0.1:{port}");
    let mut process = Process::logging(kind.name(), command, dir, End::Terminate)?;
    process.healthy(&address, Duration::from_secs(60)).await?;
    // It probes its workers before it sends them requests.
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok((address, process))
}
