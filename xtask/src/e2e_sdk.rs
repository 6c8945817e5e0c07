//! `e2e-sdk`: the OpenAI and Anthropic Python SDKs call every endpoint that they support through a running
//! gateway.

use std::process::Command;

use crate::{
    fleet::{self, EngineSpec},
    setup, sh,
};

const SCRIPT: &str = include_str!("e2e_sdk/script.py");

/// Installs the SDKs into a virtual environment under target/, starts a fleet, and runs the script against
/// it.
pub(crate) async fn run() -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    let openai = sh::venv_program(&sh::root().join("target/venv-sdk"), "openai", &["openai", "anthropic"])?;
    let dir = tempfile::Builder::new().prefix("pointsman-sdk-").tempdir()?;
    let engines = ["prefill", "decode"].map(|role| EngineSpec::new("vllm", role, "--itl-ms 2"));
    let fleet = fleet::start(&bin, dir.path(), &engines, "").await?;
    let mut python = Command::new(openai.with_file_name("python"));
    python.args(["-c", SCRIPT, &format!("http://{}", fleet.gateway.listening())]);
    sh::run(&mut python)
}
