//! `e2e-sdk`: the OpenAI and Anthropic SDKs call every endpoint that they support through a running gateway, and
//! read streams whose engine fails.

use std::{path::PathBuf, process::Command};

use crate::{
    fleet::{self, EngineSpec},
    setup, sh,
};

const SCRIPT: &str = include_str!("e2e_sdk/script.py");
const NODE_SCRIPT: &str = include_str!("e2e_sdk/stream.mjs");

/// Installs the SDKs under target/, starts a fleet, and runs the script against it.
pub(crate) async fn run() -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    let packages = ["openai", "anthropic", "langchain-openai"];
    let openai = sh::venv_program(&sh::root().join("target/venv-sdks"), "openai", &packages)?;
    let dir = tempfile::Builder::new().prefix("pointsman-sdk-").tempdir()?;
    let cuts = r#"--itl-ms 2 --fault {"kind":"cut","after_tokens":7,"share":0.5,"prompt":"cut-this-stream"}"#;
    let engines = [("prefill", "--itl-ms 2"), ("decode", cuts), ("decode", "--itl-ms 2")]
        .map(|(role, flags)| EngineSpec::new("vllm", role, flags));
    let fleet = fleet::start(&bin, dir.path(), &engines, "").await?;
    let mut python = Command::new(openai.with_file_name("python"));
    python.args(["-c", SCRIPT, &format!("http://{}", fleet.gateway.listening())]);
    python.arg(format!("http://{}", fleet.admin_address()));
    if sh::succeeds(Command::new("npm").arg("--version")) {
        python.arg("node").arg(node_script()?);
    }
    sh::run(&mut python)
}

/// Writes the script for the Node SDK beside the SDK, which is installed if it is missing.
fn node_script() -> anyhow::Result<PathBuf> {
    let tools = fleet::target_dir().join("sdk-node");
    if !tools.join("node_modules/openai").exists() {
        std::fs::create_dir_all(&tools)?;
        std::fs::write(tools.join("package.json"), "{ \"private\": true }\n")?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "openai@6"]);
        sh::run(npm.current_dir(&tools))?;
    }
    let script = tools.join("stream.mjs");
    std::fs::write(&script, NODE_SCRIPT)?;
    Ok(script)
}
