//! `bench`: routers side by side, and the prefix index beside another one. `cargo bench` runs criterion's
//! benches.

pub(crate) mod gateway;
mod index;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Measure the gateway beside nginx and direct calls: CPU time, added latency, memory; in interleaved
    /// rounds.
    Gateway(gateway::Args),
    /// Measure the prefix index beside that of NVIDIA Dynamo's KV router: events, lookups, bytes;
    /// interleaved.
    Index(index::Args),
}

/// Runs a bench.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    match &args.bench {
        Bench::Gateway(args) => gateway::run(args).await,
        Bench::Index(args) => index::run(args),
    }
}
