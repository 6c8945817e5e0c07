//! `e2e-nats`: three gateways that tell each other their load over the real NATS server, under one load with
//! real processes, beside one gateway, and beside three that tell each other nothing. `drill replicas` takes
//! parts of them away.

use crate::{fleet, table::Checks};

mod load;
mod quality;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of loads; each runs once in each of the three cases.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Seconds of each load.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Requests a second of all gateways together.
    #[arg(long, default_value_t = 30.0)]
    rate: f64,
}

/// Compares; returns an error when a row falls short.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let bin = fleet::build("release")?;
    let mut checks = Checks::default();
    quality::run(args, &bin, &mut checks).await?;
    checks.finish()
}
