//! The rows of the nightly run: the scenarios of `drill`, and the other checks that take too long for CI.

use std::process::Command;

use anyhow::ensure;

use crate::{ci, drill, e2e_image, e2e_wheel, fleet, page, sh, tls_scan};

/// One row.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) name: &'static str,
    /// Time limit, minutes.
    pub(super) minutes: u64,
    pub(super) purpose: &'static str,
    pub(super) needs: Needs,
    pub(super) run: Run,
}

/// Requirements of a row on the machine.
#[derive(Clone, Copy)]
pub(super) enum Needs {
    /// Programs that must be in PATH.
    Programs(&'static [&'static str]),
    /// Function that returns what is missing.
    Ask(fn() -> Option<String>),
}

/// What a row runs. Every command must succeed.
#[derive(Clone, Copy)]
pub(super) enum Run {
    Xtask(&'static [&'static [&'static str]]),
    Script(&'static [&'static str]),
    /// A scenario of `drill`, with the duration of its last phase in minutes.
    Drill(Option<&'static str>),
    Make(fn() -> Vec<Command>),
}

use Needs::{Ask, Programs};
use Run::{Make, Script, Xtask};

const fn row(name: &'static str, minutes: u64, needs: Needs, run: Run, purpose: &'static str) -> Row {
    Row { name, minutes, purpose, needs, run }
}

/// File with the first requests of Mooncake's conversation trace.
const TRACE: &str = "tests/fixtures/mooncake_conversation_400.jsonl";
/// Environment variable that names a Python with NVIDIA Dynamo.
const DYNAMO: &str = "POINTSMAN_DYNAMO_PYTHON";
const PYTHON: Needs = Programs(&["python3"]);
const VLLM: Needs = Ask(|| no_engine("venv-vllm", "e2e-vllm"));
const ANYWHERE: Needs = Programs(&[]);

/// Rows besides those of `drill`.
#[rustfmt::skip]
const ROWS: &[Row] = &[
    row("demo", 10, ANYWHERE, Xtask(&[&["demo"]]), "the whole product on real processes"),
    row("cold-builds", 60, Programs(&["git"]), Script(&[".ci/cold-builds"]),
        "a fresh clone: the demo, all tests and a release are built in time"),
    row("bench-gateway", 45, Programs(&["nginx"]),
        Xtask(&[&["bench", "gateway", "--rounds", "3", "--scale", "0.3"]]),
        "CPU time, latency and memory beside nginx"),
    row("bench-instructions", 45, Programs(&["valgrind", "perl"]), Xtask(&[&["bench", "instructions"]]),
        "instructions of a request and of an event beside tests/instructions.toml"),
    row("package", 180, Programs(&["cargo-deb", "cargo-cyclonedx", "zip"]), Xtask(&[&["package", "--verify"]]),
        "a release, built twice with equal bytes"),
    row("shadow", 15, ANYWHERE, Xtask(&[&["shadow"]]),
        "a shadow policy agrees as often as the replay of its receipts"),
    row("index-memory", 30, ANYWHERE,
        Make(|| MEMORY_TESTS.iter().map(|(package, file, name)| memory_test(package, file, name)).collect()),
        "ten million blocks within the memory budget, workers that join and leave"),
    row("models", 90, ANYWHERE, Make(|| vec![ci::models(3)]),
        "lock-free code in every order of at most three preemptions"),
    row("fuzz", 75, Programs(&["cargo-fuzz"]), Script(&["fuzz/run.sh", "10"]),
        "every fuzz target for 10 minutes"),
    row("oracle", 30, ANYWHERE, Make(|| vec![oracle()]),
        "hashes, index and cost beside NVIDIA Dynamo's KV router"),
    row("lab-scale", 30, ANYWHERE, Xtask(&[&["lab-scale"]]),
        "a million simulated requests on a thousand engines, within 8 GB"),
    row("lab-suite", 120, ANYWHERE, Xtask(&[&["lab-suite", "--all"]]),
        "the default policy beside every rival on the whole matrix"),
    row("lab-fidelity", 30, ANYWHERE,
        Xtask(&[&["lab-fidelity", "--trace", TRACE], &["lab-fidelity", "--trace", TRACE, "--pairs"]]),
        "the lab decides as a gateway with simulated engines does"),
    row("lab-dynamo", 30, Ask(no_dynamo), Make(|| vec![lab_dynamo()]),
        "the lab beside the offline replay of NVIDIA Dynamo"),
    row("script-policies", 30, Programs(&["python3", "npm"]), Xtask(&[&["policies", "--all", "--test"]]),
        "policies in Python and JavaScript: build, test, measure"),
    row("e2e-sdk", 15, PYTHON, Xtask(&[&["e2e-sdk"]]), "the OpenAI and Anthropic SDKs and LangChain through the gateway"),
    row("api-fuzz", 40, PYTHON, Xtask(&[&["api-fuzz"]]),
        "answers to generated requests are those of the OpenAPI documents"),
    row("tls-scan", 20, Ask(tls_scan::missing), Xtask(&[&["tls-scan"]]),
        "testssl.sh judges both listeners"),
    row("kubernetes", 15, PYTHON, Script(&["deploy/check.sh"]),
        "the Kubernetes files and the chart fit the published schemas"),
    row("e2e-etcd", 15, Programs(&["etcd"]), Xtask(&[&["e2e-etcd"]]),
        "500 workers come and go through the real etcd, which is killed once"),
    row("e2e-kubernetes", 15, ANYWHERE, Xtask(&[&["e2e-kubernetes"]]),
        "500 workers come and go through a double of the Kubernetes API server"),
    row("e2e-nats", 20, Programs(&["nats-server"]), Xtask(&[&["e2e-nats"]]),
        "three gateways that exchange their load choose as well as one"),
    row("e2e-envoy", 30, PYTHON, Xtask(&[&["e2e-envoy"]]), "a real Envoy asks two gateways for endpoints"),
    row("e2e-image", 30, Ask(e2e_image::missing), Xtask(&[&["e2e-image"]]),
        "the image of a release under podman: no rights, read-only root"),
    row("e2e-wheel", 30, Ask(e2e_wheel::missing), Xtask(&[&["e2e-wheel"]]),
        "the wheel of a release, installed by path into a fresh environment"),
    row("e2e-vllm", 60, VLLM, Xtask(&[&["e2e-vllm"]]), "real vLLM engines, KV over NIXL"),
    row("e2e-mooncake", 60, VLLM, Xtask(&[&["e2e-mooncake"]]), "real vLLM engines, KV over Mooncake"),
    row("e2e-kv", 60, VLLM, Xtask(&[&["e2e-kv"]]), "predicted and reported cached blocks of real vLLM engines"),
    row("e2e-sglang", 60, Ask(|| no_engine("venv-sglang", "e2e-sglang")), Xtask(&[&["e2e-sglang"]]),
        "real SGLang engines, KV over Mooncake"),
    row("page", 15, Ask(|| page::requirements().err().map(|error| format!("{error:#}"))), Xtask(&[&["page"]]),
        "the admin page in Chromium"),
];

/// Tests of the index's memory: package, file and name. Each test runs in its own process, so that it does
/// not measure the memory of another test.
const MEMORY_TESTS: [(&str, &str, &str); 6] = [
    ("pointsman-workers", "churn", "h4_workers_that_join_and_leave_leak_nothing"),
    ("pointsman-workers", "churn", "h4_five_thousand_workers_join_and_leave_at_once"),
    ("prefix-index", "memory", "h4_evicting_a_block_takes_the_same_time_for_shallow_and_deep_prompts"),
    ("prefix-index", "memory", "h4_ten_million_blocks_by_events_stay_within_the_budget"),
    ("prefix-index", "memory", "h4_ten_million_blocks_by_one_engine_s_events_stay_within_the_budget"),
    ("prefix-index", "memory", "h4_twenty_million_blocks_by_decisions_stay_within_the_budget"),
];

impl Row {
    /// Returns the cells of the row for `--list`.
    pub(super) fn describe(&self) -> Vec<String> {
        vec![self.name.to_owned(), format!("{} min", self.minutes), self.purpose.to_owned()]
    }

    /// Returns the reason why the row cannot run on this machine.
    pub(super) fn missing(&self) -> Option<String> {
        match self.needs {
            Programs(programs) => first_missing(programs),
            Ask(ask) => ask(),
        }
    }

    pub(super) fn commands(&self) -> Vec<Command> {
        match &self.run {
            Xtask(all) => all.iter().map(|args| xtask(args)).collect(),
            Script(words) => {
                let mut bash = Command::new("bash");
                bash.args(*words).current_dir(sh::root());
                vec![bash]
            }
            Run::Drill(None) => vec![xtask(&["drill", self.name])],
            Run::Drill(Some(minutes)) => vec![xtask(&["drill", self.name, "--minutes", minutes])],
            Make(make) => make(),
        }
    }
}

/// Returns all rows: first the scenarios, except the longest, which comes last.
pub(super) fn rows() -> Vec<Row> {
    let scenarios = drill::ROWS.iter().map(|one| {
        let (needs, run) = (Programs(one.needs), Run::Drill(one.nightly));
        Row { name: one.name, minutes: one.minutes, purpose: one.purpose, needs, run }
    });
    let mut rows: Vec<Row> = scenarios.chain(ROWS.iter().copied()).collect();
    // The longest row comes last, because a hosted runner may stop before its end.
    rows.sort_by_key(|row| row.name == "soak");
    rows
}

/// Returns rows by name, or all rows when no name is given.
pub(super) fn choose(names: &[String]) -> anyhow::Result<Vec<Row>> {
    let rows = rows();
    for name in names {
        let all: Vec<&str> = rows.iter().map(|row| row.name).collect();
        ensure!(all.contains(&name.as_str()), "no row is called `{name}`: expected {}", all.join(", "));
    }
    let wanted = |row: &Row| names.is_empty() || names.iter().any(|name| name == row.name);
    Ok(rows.into_iter().filter(wanted).collect())
}

/// Returns a command that runs this program with other arguments. Each row is a process, so that its time
/// limit can end it.
fn xtask(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
    command.args(args);
    command
}

fn memory_test(package: &str, file: &str, name: &str) -> Command {
    let mut test = sh::cargo();
    test.args(["test", "--release", "--locked", "--package", package, "--test", file, name]);
    test.args(["--", "--exact", "--include-ignored", "--nocapture"]);
    test
}

fn oracle() -> Command {
    let mut test = sh::cargo();
    test.args(["test", "--tests", "--locked", "--manifest-path", "tests/oracle/Cargo.toml", "--target-dir"]);
    test.arg(fleet::target_dir().join("oracle"));
    test
}

fn lab_dynamo() -> Command {
    xtask(&["lab-dynamo", "--python", &std::env::var(DYNAMO).unwrap_or_default(), "--trace", TRACE])
}

fn no_dynamo() -> Option<String> {
    std::env::var_os(DYNAMO).is_none().then(|| format!("{DYNAMO} names no Python with NVIDIA Dynamo"))
}

/// Returns what to do if an engine is not installed. Real engines need gigabytes, so a nightly run does not
/// install them.
fn no_engine(venv: &str, command: &str) -> Option<String> {
    let found = sh::root().join("target").join(venv).is_dir();
    (!found).then(|| format!("target/{venv} is missing: `cargo xtask {command}` installs it"))
}

fn first_missing(programs: &[&str]) -> Option<String> {
    let missing = programs.iter().find(|program| !sh::is_installed(program))?;
    Some(format!("{missing} is not installed"))
}

#[cfg(test)]
mod tests {
    use super::{MEMORY_TESTS, ROWS, Run, choose, first_missing, rows};
    use crate::sh;

    /// Commands that CI runs, and `nightly` itself.
    const IN_CI: [&str; 6] = ["setup", "ci", "test", "book", "spec", "nightly"];
    /// Commands that a row runs indirectly.
    const BY_OTHERS: [(&str, &str); 2] = [("drill", "faults"), ("lab-dynamo", "lab-dynamo")];

    #[test]
    fn every_command_is_one_of_ci_or_a_row() {
        let in_rows: Vec<&str> = ROWS
            .iter()
            .flat_map(|row| match row.run {
                Run::Xtask(all) => all.iter().filter_map(|args| args.first().copied()).collect(),
                _ => Vec::new(),
            })
            .collect();
        let rows = rows();
        for command in crate::commands() {
            let by = BY_OTHERS.iter().find(|(name, _)| *name == command);
            let known = IN_CI.contains(&command.as_str())
                || in_rows.contains(&command.as_str())
                || by.is_some_and(|(_, row)| rows.iter().any(|one| one.name == *row));
            assert!(known, "`cargo xtask {command}` is in neither CI nor `nightly`: add a row, or remove it");
        }
    }

    #[test]
    fn rows_are_chosen_by_name_and_have_names_of_their_own() {
        let all = choose(&[]).unwrap();
        let names: std::collections::BTreeSet<_> = all.iter().map(|row| row.name).collect();
        assert_eq!(names.len(), all.len());
        assert!(
            ["faults", "engines", "clients", "chaos", "cold-builds"].iter().all(|name| names.contains(name))
        );
        let one = choose(&["fuzz".to_owned()]).unwrap();
        assert_eq!(one.iter().map(|row| row.name).collect::<Vec<_>>(), ["fuzz"]);
        let error = choose(&["fuz".to_owned()]).err().unwrap().to_string();
        assert!(error.starts_with("no row is called `fuz`: expected faults"), "{error}");
    }

    #[test]
    fn scripts_of_rows_exist_and_a_missing_program_is_named() {
        for row in ROWS {
            if let Run::Script([script, ..]) = row.run {
                assert!(sh::root().join(script).is_file(), "{script}");
            }
        }
        let missing = first_missing(&["sh", "sh-no-such-program"]);
        assert_eq!(missing, Some("sh-no-such-program is not installed".into()));
    }

    #[test]
    fn the_memory_tests_exist() {
        for (package, file, name) in MEMORY_TESTS {
            let folder = if package == "prefix-index" { "crates/prefix-index" } else { "host/workers" };
            let path = sh::root().join(folder).join("tests").join(format!("{file}.rs"));
            let source = std::fs::read_to_string(path).unwrap();
            assert!(source.contains(&format!("fn {name}(")), "{file}.rs has no test {name}");
        }
    }
}
