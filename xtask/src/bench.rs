//! `bench`: criterion's benches, routers side by side, and the prefix index beside another one.

mod criterion;
pub(crate) mod gateway;
mod index;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    bench: Option<Bench>,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// Run the criterion benches, all or one.
    Criterion(criterion::Args),
    /// Measure the gateway beside nginx and direct calls: CPU time, added latency, memory; in interleaved
    /// rounds.
    Gateway(gateway::Args),
    /// Measure the prefix index beside that of NVIDIA Dynamo's KV router: events, lookups, bytes;
    /// interleaved.
    Index(index::Args),
}

/// Runs a bench; all criterion benches when none is named.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    match &args.bench {
        None => criterion::run(&criterion::Args::default()),
        Some(Bench::Criterion(args)) => criterion::run(args),
        Some(Bench::Gateway(args)) => gateway::run(args).await,
        Some(Bench::Index(args)) => index::run(args),
    }
}
