//! Finds rivals in Python environments. Starts vLLM's and SGLang's routers as their documentation recommends:
//! with round robin and without an index; and vLLM's router also with its index.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::ensure;

use super::{
    super::{
        engines::{Engine, Engines},
        scenario::{Scenario, Shape},
    },
    Router,
};
use crate::{
    fleet::{End, Process, free_port},
    sh,
};

/// Module of vLLM's router.
const VLLM: &str = "vllm_router.launch_router";
/// Module of SGLang's router.
const SGLANG: &str = "sglang_router.launch_router";
/// Rivals, and the Python modules that each needs.
const MODULES: [(Router, &[&str]); 4] = [
    (Router::Vllm, &[VLLM]),
    (Router::VllmKvAware, &[VLLM]),
    (Router::Sglang, &[SGLANG]),
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
                 --python {} --only-binary :all: --prerelease=allow vllm-router sglang-router ai-dynamo \
                 ai-dynamo-runtime`",
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

/// Starts a rival and waits until it serves.
pub(super) async fn start(
    kind: Router,
    python: &Path,
    dir: &Path,
    scenario: &Scenario,
    engines: &Engines,
) -> anyhow::Result<(String, Process)> {
    let (module, pair) = match kind {
        Router::Vllm => (VLLM, "--vllm-pd-disaggregation"),
        _ => (SGLANG, "--pd-disaggregation"),
    };
    let (mut command, address) = command(python, module, "round_robin")?;
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
    serving(kind, command, address, dir).await
}

/// Starts vLLM's router with the policy `kv_aware`. In front of HTTP workers it has no tokenizer: it sends
/// each prompt to `/v1/chat/completions/render` of every engine.
pub(super) async fn start_kv_aware(
    python: &Path,
    dir: &Path,
    engines: &Engines,
) -> anyhow::Result<(String, Process)> {
    let (mut command, address) = command(python, VLLM, "kv_aware")?;
    command.args(["--kv-event-block-size", "16", "--kv-event-model", "tiny"]);
    for engine in &engines.serving {
        let source = format!("{}=tcp://127.0.0.1:{}", url(engine), engine.kv_events_port);
        command.args(["--kv-event-source", &source]);
    }
    command.arg("--worker-urls").args(engines.serving.iter().map(url));
    serving(Router::VllmKvAware, command, address, dir).await
}

/// Returns the command of a router, with its address.
fn command(python: &Path, module: &str, policy: &str) -> anyhow::Result<(Command, String)> {
    let port = free_port()?;
    let mut command = Command::new(python);
    command.args(["-m", module, "--host", "127.0.0.1", "--policy", policy, "--log-level", "error"]);
    command.args(["--port", &port.to_string(), "--prometheus-port", &free_port()?.to_string()]);
    Ok((command, format!("127.0.0.1:{port}")))
}

fn url(engine: &Engine) -> String {
    format!("http://{}", engine.address)
}

async fn serving(
    kind: Router,
    command: Command,
    address: String,
    dir: &Path,
) -> anyhow::Result<(String, Process)> {
    let mut process = Process::logging(kind.name(), command, dir, End::Terminate)?;
    process.healthy(&address, Duration::from_secs(60)).await?;
    // The router probes its workers before it sends them requests.
    tokio::time::sleep(Duration::from_secs(2)).await;
    Ok((address, process))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _, path::Path};

    use super::{Rivals, Router};

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
}
