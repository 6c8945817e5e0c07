//! `e2e-nats`: gateways that tell each other their load over the real NATS server, with real processes.
//!
//! Three gateways under one load are compared with one gateway, and with three that tell each other nothing.
//! Then a worker, the server and a gateway are killed, and a network is cut, under load.

use crate::{fleet, table::Checks};

pub(crate) mod clients;
mod faults;
mod load;
mod quality;
pub(crate) mod rig;

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
    /// Engines.
    #[arg(long, default_value_t = 6)]
    engines: usize,
    /// Only this part.
    #[arg(long, value_enum)]
    only: Option<Part>,
}

/// A part of the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Comparison of one gateway with three.
    Quality,
    /// Failures.
    Faults,
}

/// Runs both parts; returns an error when a row falls short.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let bin = fleet::build("release")?;
    let mut checks = Checks::default();
    if args.only != Some(Part::Faults) {
        quality::run(args, &bin, &mut checks).await?;
    }
    if args.only != Some(Part::Quality) {
        faults::run(args, &bin, &mut checks).await?;
    }
    checks.finish()
}
