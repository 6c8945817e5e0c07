//! `e2e-nats`: compares several gateways that exchange their load over the real NATS server with one gateway,
//! and with as many gateways that do not exchange it. All processes are real, and each case gets the same
//! load. `drill replicas` tests failures of such gateways.

use crate::{fleet, table::Checks};

mod churn;
mod load;
mod quality;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of loads. Each load runs once in each of the three cases.
    #[arg(long, default_value_t = 3)]
    seeds: u64,
    /// Duration of each load, seconds.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Requests a second of all gateways together.
    #[arg(long, default_value_t = 30.0)]
    rate: f64,
    /// Eight gateways and 120 engines instead of three and six.
    #[arg(long)]
    large: bool,
    /// Conversations of agents, which grow with each turn, instead of prompts with common beginnings. Each
    /// turn goes to a random gateway.
    #[arg(long)]
    agents: bool,
    /// Kill an engine and start it again, then a gateway, and so on, all the time. A single gateway is not
    /// killed.
    #[arg(long)]
    churn: bool,
}

/// Runs the comparison. Returns an error when a requirement was not met.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let bin = fleet::build("release")?;
    let mut checks = Checks::default();
    quality::run(args, &bin, &mut checks).await?;
    checks.finish()
}
