//! Developer and set-up commands. One file a command.

#![expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
#![expect(clippy::disallowed_types, reason = "tools without tokio measure with the standard clock")]

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod churn;
mod ci;
mod demo;
mod e2e_kv;
mod e2e_sdk;
mod e2e_vllm;
mod engine;
mod fleet;
mod fuzz;
mod hostile;
mod http;
mod langs;
mod load;
mod models;
mod oracle;
mod page;
mod policies;
mod reload;
mod setup;
mod sh;
mod shadow;
mod spec;
mod storm;
mod structure;
mod test;

/// Developer and set-up commands of Pointsman.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print sizes of the source tree; fail when it breaks a module rule.
    Structure(structure::Args),
    /// Install the WebAssembly targets that policies are built for.
    Setup,
    /// Run the main job: engines, gateway, clients, policies swapped live; prints a table.
    Demo(demo::Args),
    /// Set up, then run every test.
    Test,
    /// What CI runs: format, lints, docs, tests.
    Ci,
    /// Run the benches.
    Bench(bench::Args),
    /// Build every policy into target/policies.
    Policies(policies::Args),
    /// Build, test and measure the policies in Python and JavaScript; needs python3 and npm, not part of CI.
    Langs,
    /// Stream a chat completion with the OpenAI Python SDK through a running gateway.
    E2eSdk,
    /// Requests through faults of every kind, and clients that leave; checks that nothing is lost.
    Storm(storm::Args),
    /// Every number of docs/behaviour.md with the tests that are named by it.
    Spec(spec::Args),
    /// Real vLLM engines (prefill and decode, NIXL, on CPU) behind the gateway: same tokens, KV transferred, nothing leaked.
    E2eVllm(e2e_vllm::Args),
    /// Real vLLM engines with KV events: predicted cached blocks beside reported ones, hit rate beside round-robin's.
    E2eKv(e2e_kv::Args),
    /// Hashes, index and cost beside NVIDIA Dynamo's KV router (crate `dynamo-kv-router`); not part of CI.
    Oracle(oracle::Args),
    /// What threads share without a lock, in every order (the loom model checker), and each rule broken once; part of CI.
    Models(models::Args),
    /// Memory of the index: ten million blocks within its budget, and workers that come and go leave nothing.
    Churn,
    /// Fuzz what reads bytes of strangers: events, frames, streams, bodies (needs cargo-fuzz).
    Fuzz(fuzz::Args),
    /// The admin port's page in Chromium, before real processes; writes docs/page.png. Needs chromium, node and npm, not part of CI.
    Page,
    /// Bad policies of every kind, one after another, into a gateway under load: each ends as it must, no request fails.
    Hostile(hostile::Args),
    /// Reload a policy many times under load and time each from rename to first decision.
    Reload(reload::Args),
    /// A trace served by kv-aware while another policy looks on; then its receipts are decided again by that policy.
    Shadow(shadow::Args),
    /// A thousand reloads under a steady load: nothing fails, decisions near a swap are as quick, memory stays.
    ReloadSoak(reload::soak::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Structure(args) => structure::run(&args),
        Command::Setup => setup::run(),
        Command::Demo(args) => demo::run(&args),
        Command::Test => test::run(),
        Command::Ci => ci::run(),
        Command::Bench(args) => bench::run(&args),
        Command::Policies(args) => policies::run(&args),
        Command::Langs => langs::run(),
        Command::E2eSdk => e2e_sdk::run(),
        Command::Storm(args) => storm::run(&args),
        Command::Spec(args) => spec::run(&args),
        Command::E2eVllm(args) => e2e_vllm::run(&args),
        Command::E2eKv(args) => e2e_kv::run(&args),
        Command::Oracle(args) => oracle::run(&args),
        Command::Models(args) => models::run(&args),
        Command::Churn => churn::run(),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Page => page::run(),
        Command::Hostile(args) => hostile::run(&args),
        Command::Reload(args) => reload::run(&args),
        Command::Shadow(args) => shadow::run(&args),
        Command::ReloadSoak(args) => reload::soak::run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            sh::tell(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
