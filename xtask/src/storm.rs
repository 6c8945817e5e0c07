//! `storm`: faults and disconnects against real processes. Nothing may leak, be stranded or hang.

use crate::{fleet, setup};

mod clients;
mod disconnect;
mod engines;
mod faults;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    storm: Storm,
}

#[derive(Debug, clap::Subcommand)]
enum Storm {
    /// Send requests while 5 % of all legs meet a fault of every kind.
    Faults(faults::Args),
    /// Send requests whose clients disconnect at random times.
    Disconnect(disconnect::Args),
    /// Send requests while one worker of each leg misbehaves in every way, is stopped or killed.
    Engines(engines::Args),
    /// Send malformed, slow, unread and abandoned requests beside a well-behaved client.
    Clients(clients::Args),
}

/// Runs a storm; returns an error when a check failed.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let bin = fleet::build("release")?;
    match &args.storm {
        Storm::Faults(args) => faults::run(args, &bin).await,
        Storm::Disconnect(args) => disconnect::run(args, &bin).await,
        Storm::Engines(args) => engines::run(args, &bin).await,
        Storm::Clients(args) => clients::run(args, &bin).await,
    }
}

/// Engine counters that must be zero after a storm, with their names in `/sim/state`.
const LEAKS: [(&str, &str); 4] = [
    ("sequences still running", "/running"),
    ("sequences still waiting", "/waiting"),
    ("handoffs used twice", "/handoffs/reused"),
    ("bootstrap rooms used twice", "/duplicate_rooms"),
];
