//! NVIDIA Dynamo's frontend in KV mode, with its fastest settings: the faster of its tokenizers, a cache of
//! encoded prefixes, and no log line for a request.
//!
//! It uses its own protocol to its engines. These are Dynamo's mockers, which compute nothing.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    client::Client,
    fleet::{End, Process, free_port},
};

/// Number of mockers. A scenario has the same number of engines.
const MOCKERS: usize = 4;
/// Engine time over real time, so high that every prefill takes less than a millisecond. With 0, which means
/// infinite in the help text, version 1.6.0 runs in real time.
const SPEEDUP: &str = "1000000";
/// Maximum time to start. Python modules of 100 MB are read from the disk, and the frontend loads the
/// vocabulary.
const START_LIMIT: Duration = Duration::from_secs(120);

/// A running frontend and its engines.
#[derive(Debug)]
pub(super) struct Dynamo {
    pub(super) address: String,
    pub(super) frontend: Process,
    pub(super) mockers: Process,
}

/// Starts the frontend and its mockers, and waits until the frontend knows all of them.
pub(super) async fn start(python: &Path, dir: &Path, tokenizer: &Path) -> anyhow::Result<Dynamo> {
    let model = model_dir(dir, tokenizer).context("could not make a model directory for Dynamo")?;
    let port = free_port()?;
    let mut command = command(python, dir, "dynamo.mocker");
    command.arg("--model-path").arg(model).args(["--model-name", "tiny"]);
    command.args(["--num-workers", &MOCKERS.to_string(), "--block-size", "16", "--speedup-ratio", SPEEDUP]);
    command.args(["--num-gpu-blocks-override", "200000", "--max-num-seqs", "1024"]);
    command.args(["--max-num-batched-tokens", "1000000"]);
    let mockers = Process::logging("dynamo-mocker", command, dir, End::KillTree)?;
    let mut command = self::command(python, dir, "dynamo.frontend");
    command.args(["--http-host", "127.0.0.1", "--http-port", &port.to_string()]);
    command.args(["--router-mode", "kv", "--kv-cache-block-size", "16"]);
    let frontend = Process::logging("dynamo-frontend", command, dir, End::KillTree)?;
    let mut dynamo = Dynamo { address: format!("127.0.0.1:{port}"), frontend, mockers };
    dynamo.ready(START_LIMIT).await?;
    Ok(dynamo)
}

impl Dynamo {
    async fn ready(&mut self, limit: Duration) -> anyhow::Result<()> {
        let (client, started) = (Client::new(&self.address), Instant::now());
        loop {
            for process in [&mut self.frontend, &mut self.mockers] {
                if let Some(status) = process.ended()? {
                    bail!("{} ended with {status}:\n{}", process.name, process.last_lines());
                }
            }
            let (health, models) = (client.json("/health").await, client.json("/v1/models").await);
            if mockers(&health.unwrap_or_default()) >= MOCKERS && lists_model(&models.unwrap_or_default()) {
                return Ok(());
            }
            if started.elapsed() > limit {
                bail!(
                    "Dynamo does not serve the model after {limit:?}; its frontend wrote:\n{}\nits mockers wrote:\n{}",
                    self.frontend.last_lines(),
                    self.mockers.last_lines()
                );
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// Returns a command for a Python module of Dynamo that keeps its files in `dir` and listens only on
/// loopback.
fn command(python: &Path, dir: &Path, module: &str) -> Command {
    let mut command = Command::new(python);
    command.args(["-m", module, "--discovery-backend", "file"]);
    command.args(["--request-plane", "tcp", "--event-plane", "zmq"]);
    for variable in ["HOME", "TMPDIR", "DYN_FILE_KV"] {
        command.env(variable, dir);
    }
    for variable in ["DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"] {
        command.env(variable, "127.0.0.1");
    }
    let best = [
        ("DYN_TOKENIZER", "fastokens"),
        ("DYN_TOKENIZER_CACHE", "1"),
        ("DYN_LOG", "error"),
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_OFFLINE", "1"),
    ];
    for (variable, value) in best {
        if std::env::var_os(variable).is_none() {
            command.env(variable, value);
        }
    }
    command
}

/// Makes a model directory with the files of the tokenizer's directory, and with a `config.json` if there is
/// none.
fn model_dir(dir: &Path, tokenizer: &Path) -> anyhow::Result<std::path::PathBuf> {
    let model = dir.join("model");
    std::fs::create_dir_all(&model)?;
    let tokenizer = tokenizer.canonicalize().with_context(|| tokenizer.display().to_string())?;
    for entry in std::fs::read_dir(&tokenizer)? {
        let entry = entry?;
        std::os::unix::fs::symlink(entry.path(), model.join(entry.file_name()))?;
    }
    let config = model.join("config.json");
    if !config.exists() {
        // Dynamo reads from this file the token that ends an answer and the longest prompt. Mockers compute
        // nothing.
        let text = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 0, "eos_token_id": 1,
            "max_position_embeddings": 1_048_576, "vocab_size": 152_064, "hidden_size": 64,
            "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        });
        std::fs::write(config, text.to_string())?;
    }
    Ok(model)
}

/// Returns the number of mockers in the answer of `/health`.
fn mockers(health: &Value) -> usize {
    let instances = health["instances"].as_array().into_iter().flatten();
    instances.filter(|instance| instance["endpoint"] == "generate").count()
}

fn lists_model(models: &Value) -> bool {
    models["data"].as_array().is_some_and(|models| models.iter().any(|model| model["id"] == "tiny"))
}

#[cfg(test)]
mod tests {
    use std::{path::Path, process::Command, time::Duration};

    use serde_json::json;

    use super::{Dynamo, lists_model, mockers, model_dir};
    use crate::fleet::{End, Process};

    fn shell(name: &str, script: &str, dir: &Path) -> Process {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Process::logging(name, command, dir, End::KillTree).unwrap()
    }

    #[tokio::test]
    async fn a_start_that_fails_shows_the_end_of_its_log_and_leaves_no_process() {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("127.0.0.1:{}", crate::fleet::free_port().unwrap());
        let started = |script| Dynamo {
            address: address.clone(),
            frontend: shell("dynamo-frontend", script, dir.path()),
            mockers: shell("dynamo-mocker", "exec sleep 60", dir.path()),
        };
        let mut ends = started("seq 100; echo no GPU >&2; exit 3");
        let error = format!("{:#}", ends.ready(Duration::from_secs(30)).await.unwrap_err());
        assert!(error.starts_with("dynamo-frontend ended with exit status: 3:\n"), "{error}");
        assert!(error.contains("\n99\n100\n") && error.ends_with("no GPU"), "{error}");
        assert!(!error.contains("\n92\n"), "{error}");
        let mut silent = started("echo loading; exec sleep 60");
        while silent.frontend.last_lines().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let error = format!("{:#}", silent.ready(Duration::from_millis(300)).await.unwrap_err());
        assert!(error.contains("after 300ms; its frontend wrote:\nloading\n"), "{error}");
        let pids = [ends.mockers.pid(), silent.frontend.pid(), silent.mockers.pid()];
        drop((ends, silent));
        assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    }

    #[test]
    fn a_model_directory_has_the_tokenizer_and_a_configuration() {
        let (dir, tokenizer) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(tokenizer.path().join("tokenizer.json"), "{}").unwrap();
        let model = model_dir(dir.path(), tokenizer.path()).unwrap();
        assert_eq!(std::fs::read_to_string(model.join("tokenizer.json")).unwrap(), "{}");
        assert!(std::fs::read_to_string(model.join("config.json")).unwrap().contains("eos_token_id"));
        // The model's own configuration is kept.
        std::fs::write(tokenizer.path().join("config.json"), "own").unwrap();
        let model = model_dir(tempfile::tempdir().unwrap().path(), tokenizer.path()).unwrap();
        assert_eq!(model.file_name().unwrap(), "model");
        assert_eq!(std::fs::read_to_string(tokenizer.path().join("config.json")).unwrap(), "own");
    }

    #[test]
    fn only_instances_that_generate_count() {
        let health = json!({ "instances": [{ "endpoint": "generate" }, { "endpoint": "clear_kv_blocks" }] });
        assert_eq!(mockers(&health), 1);
        assert_eq!(mockers(&json!(null)), 0);
        assert!(lists_model(&json!({ "data": [{ "id": "tiny" }] })));
        assert!(!lists_model(&json!({ "data": [] })));
    }
}
