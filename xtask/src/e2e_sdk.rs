//! `e2e-sdk`: the OpenAI Python SDK streams a chat completion through a running gateway.

use std::process::Command;

use crate::{
    fleet::{self, EngineSpec},
    setup, sh,
};

const SCRIPT: &str = r#"
import sys
from openai import OpenAI, NotFoundError

client = OpenAI(base_url=sys.argv[1], api_key="none")
assert [model.id for model in client.models.list()] == ["tiny"]
messages = [{"role": "user", "content": "hello from the SDK"}]
whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
parts, usage = [], None
stream = client.chat.completions.create(
    model="tiny", messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True})
for chunk in stream:
    usage = chunk.usage or usage
    parts += [choice.delta.content or "" for choice in chunk.choices]
text = "".join(parts)
assert text and text == whole.choices[0].message.content, (text, whole)
assert usage.completion_tokens == 8, usage
try:
    client.chat.completions.create(model="nope", messages=messages)
    raise SystemExit("an unknown model was served")
except NotFoundError as error:
    assert error.code == "model_not_found", error
print(f"streamed {len(parts)} chunks, {usage.completion_tokens} tokens: {text!r}")
"#;

/// Installs the SDK into a venv under target/, starts a fleet and runs the script against it.
pub(crate) async fn run() -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    let venv = sh::root().join("target/venv-openai");
    if !sh::succeeds(Command::new(venv.join("bin/python")).args(["-c", "import openai"])) {
        sh::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        sh::run(pip.args(["install", "--quiet", "--only-binary", ":all:", "openai"]))?;
    }
    let dir = tempfile::Builder::new().prefix("pointsman-sdk-").tempdir()?;
    let engines = ["prefill", "decode"].map(|role| EngineSpec::new("vllm", role, "--itl-ms 2"));
    let fleet = fleet::start(&bin, dir.path(), &engines, "").await?;
    let mut python = Command::new(venv.join("bin/python"));
    python.args(["-c", SCRIPT, &format!("http://{}/v1", fleet.gateway.listening())]);
    sh::run(&mut python)
}
