//! `bench`: criterion's benches, and whole routers side by side.

mod criterion;
mod gateway;
mod index;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The criterion benches, all or one.
    Criterion(criterion::Args),
    /// The gateway beside nginx and direct calls: CPU time, added latency, memory; interleaved rounds.
    Gateway(gateway::Args),
    /// The prefix index beside that of NVIDIA Dynamo's KV router: blocks stored, lookups, bytes; interleaved rounds.
    Index(index::Args),
}

/// Runs what was asked for; all criterion benches when nothing was.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    match &args.what {
        None => criterion::run(&criterion::Args::default()),
        Some(What::Criterion(args)) => criterion::run(args),
        Some(What::Gateway(args)) => gateway::run(args),
        Some(What::Index(args)) => index::run(args),
    }
}
