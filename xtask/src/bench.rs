//! `bench`: compares routers with each other, and counts instructions. `cargo bench` runs criterion's
//! benches.

mod gateway;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Compare the gateway with nginx and direct calls, in interleaved rounds: CPU time, added latency,
    /// memory.
    Gateway(gateway::Args),
    /// Count the instructions of a request and of an event with callgrind, and compare them with
    /// tests/instructions.toml; needs valgrind.
    Instructions(gateway::instructions::Args),
}

/// Runs a bench.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    match &args.bench {
        Bench::Gateway(args) => gateway::run(args).await,
        Bench::Instructions(args) => gateway::instructions::run(args).await,
    }
}
