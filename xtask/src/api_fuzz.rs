//! `api-fuzz`: schemathesis generates requests from the OpenAPI documents of both listeners, and compares
//! every answer with the document.

use std::{fs, path::Path, process::Stdio, time::Duration};

use anyhow::Context as _;

use crate::{
    fleet::{self, EngineSpec},
    setup, sh,
    table::Checks,
};

/// Checks of every answer. A documented 5xx is accepted.
const CHECKS: &str = "status_code_conformance,content_type_conformance,response_schema_conformance";
/// Version of schemathesis; another version may report other problems.
const SCHEMATHESIS: &str = "schemathesis==4.*";
/// The gateway's configuration. With a token, changes reach their handlers even without a content type.
const CONFIG: &str = "[server]\nadmin_token = \"api-fuzz\"\n";
/// Minimum number of test cases for each document. A document that describes nothing has none.
const MIN_CASES: u32 = 100;
/// Header of requests to the operators' listener.
const TOKEN: &str = "Authorization: Bearer api-fuzz";
/// Arguments of `api-fuzz`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of requests for each operation and phase.
    #[arg(long, default_value_t = 50)]
    examples: u32,
    /// Time limit for each document, minutes.
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Seed of the requests.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Runs schemathesis on both documents.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    let venv = fleet::target_dir().join("venv-api-fuzz");
    let program = sh::venv_program(&venv, "schemathesis", &[SCHEMATHESIS])?;
    let dir = tempfile::Builder::new().prefix("pointsman-api-fuzz-").tempdir()?;
    let engines = ["prefill", "decode"].map(|role| EngineSpec::new("vllm", role, "--speedup 100"));
    let fleet = fleet::start(&bin, dir.path(), &engines, CONFIG).await?;
    let admin = fleet.gateway.announced["admin"].as_str().context("the gateway announced no admin port")?;
    let mut checks = Checks::default();
    // The operators' document comes last, because its requests remove workers.
    let targets =
        [("clients", fleet.gateway.listening(), None), ("operators", admin.to_owned(), Some(TOKEN))];
    for (name, address, header) in targets {
        let (passed, tested) = fuzz(&program, args, dir.path(), name, &address, header).await?;
        checks.check(&format!("answers to the {name}' document"), "as documented", passed);
        checks.check(&format!("test cases of the {name}' document"), tested, tested > MIN_CASES);
    }
    checks.finish()
}

/// Runs schemathesis on one document, and shows its report when an answer is not as documented. Returns
/// whether all answers are as documented, and the number of test cases.
async fn fuzz(
    program: &Path,
    args: &Args,
    dir: &Path,
    name: &str,
    address: &str,
    header: Option<&str>,
) -> anyhow::Result<(bool, u32)> {
    let log = fs::File::create(dir.join(format!("{name}.log")))?;
    let mut command = tokio::process::Command::new(program);
    command
        .args(["run", &format!("http://{address}/openapi.json"), "--checks", CHECKS])
        .args(["--phases", "examples,coverage,fuzzing", "--continue-on-failure", "--no-color"])
        .args(["--max-examples", &args.examples.to_string(), "--seed", &args.seed.to_string()])
        // The stream of events has no end, and a WebSocket needs another client.
        .args(["--exclude-path", "/events", "--exclude-path", "/v1/realtime", "--request-timeout", "20"])
        .current_dir(dir)
        .stdout(Stdio::from(log.try_clone()?))
        .stderr(Stdio::from(log))
        .kill_on_drop(true);
    if let Some(header) = header {
        command.args(["--header", header]);
    }
    sh::status(&format!("schemathesis on the {name}' document"));
    let mut child = command.spawn().context("starting schemathesis")?;
    let limit = Duration::from_secs(args.minutes * 60);
    let ended = tokio::time::timeout(limit, child.wait()).await;
    let log = fs::read_to_string(dir.join(format!("{name}.log")))?;
    let ended = ended
        .with_context(|| format!("schemathesis did not end within {limit:?}; give more --minutes\n{log}"))?;
    let passed = ended?.success();
    if !passed {
        sh::print(&log);
    }
    Ok((passed, generated(&log).unwrap_or_default()))
}

/// Reads the number of test cases out of the summary.
fn generated(log: &str) -> Option<u32> {
    log.lines().find_map(|line| line.trim().split_once(" generated")?.0.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::generated;

    #[test]
    fn the_number_of_test_cases_is_read() {
        assert_eq!(generated("Test cases:\n  2420 generated, 2420 passed, 184 skipped\n"), Some(2420));
        assert_eq!(generated("Warnings: some generated"), None);
    }
}
