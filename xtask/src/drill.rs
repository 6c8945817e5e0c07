//! `drill`: runs real processes under load and causes faults. Each scenario is a row of a table. The row also
//! contains the requirements for the end.

use std::{path::Path, time::Duration};

use anyhow::ensure;

pub(crate) use self::{
    rig::Rig,
    scenario::FleetSpec,
    timelines::replicas::{LARGE, REPLICAS},
};
use self::{run::Options, scenario::Scenario};
use crate::{
    fleet, setup, sh,
    table::{Checks, columns},
};

mod beside;
mod clients;
mod engines;
mod hostile;
mod injected_faults;
mod judge;
mod record;
mod rig;
mod run;
mod scenario;
#[cfg(test)]
mod tests;
mod timelines;

/// Maximum time from the repair of a fault until everything works again.
const HEAL: Duration = Duration::from_secs(15);

/// Arguments of `drill`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Names of scenarios; `disconnect` selects all whose names begin with `disconnect-`.
    #[arg(required_unless_present = "list")]
    names: Vec<String>,
    /// List the scenarios without running them.
    #[arg(long)]
    list: bool,
    /// Minutes of the last phase [default: the scenario's own]. In a much shorter phase, memory use still
    /// grows.
    #[arg(long)]
    minutes: Option<f64>,
    /// Factor on the number of requests of a scenario that counts requests, and on the number of clients of
    /// `clients`.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Seed of random faults and of generated files.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the cases of `engines`, `clients` and `hostile` whose names contain this text.
    #[arg(long, default_value = "")]
    only: String,
}

/// Way in which a row runs.
enum How {
    /// Phases over time.
    Timeline(&'static Scenario),
    /// Cases that run during a steady load.
    Engines,
    Clients,
    Hostile,
}

/// A scenario.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) purpose: &'static str,
    /// Time limit in `nightly`, minutes.
    pub(crate) minutes: u64,
    /// Duration of the last phase in `nightly`, minutes; `None` for the scenario's own.
    pub(crate) nightly: Option<&'static str>,
    /// Programs that the scenario needs besides those of the repository.
    pub(crate) needs: &'static [&'static str],
    how: How,
}

const fn row(name: &'static str, minutes: u64, how: How, purpose: &'static str) -> Row {
    Row { name, purpose, minutes, nightly: None, needs: &[], how }
}

/// All scenarios.
#[rustfmt::skip]
pub(crate) const ROWS: &[Row] = &[
    row("faults", 30, How::Timeline(&timelines::FAULTS), "10,000 requests while 5 % of all legs meet a fault"),
    row("disconnect-notice", 10, How::Timeline(&timelines::DISCONNECT_NOTICE),
        "2,000 clients that leave: engines notice within 100 ms"),
    row("disconnect-vllm", 10, How::Timeline(&timelines::DISCONNECT_VLLM),
        "2,000 clients that leave: committed handoffs are pulled, nothing is stranded"),
    row("disconnect-sglang", 10, How::Timeline(&timelines::DISCONNECT_SGLANG),
        "2,000 clients that leave: bootstrap rooms are used once, nothing is stranded"),
    row("engines", 30, How::Engines, "80 kinds of misbehaviour of engines on every leg, kills and stops"),
    row("clients", 20, How::Clients, "malformed, slow, unread and abandoned requests, floods of HTTP/2"),
    row("hostile", 60, How::Hostile, "bad policies of every kind under load, three passes"),
    row("reloads", 20, How::Timeline(&timelines::RELOADS),
        "1,000 policy reloads under load: none fails, decisions stay quick, memory stays"),
    row("overload", 20, How::Timeline(&timelines::OVERLOAD),
        "ten times the capacity for five minutes: goodput, memory, refusals, recovery"),
    row("fairness-equal", 5, How::Timeline(&timelines::fairness::EQUAL),
        "two tenants, one sends 20 times as much: equal shares"),
    row("fairness-weighted", 5, How::Timeline(&timelines::fairness::WEIGHTED),
        "two tenants, one sends 20 times as much: shares of 3 to 1"),
    row("fairness-first-tokens", 8, How::Timeline(&timelines::fairness::FIRST_TOKENS),
        "the light tenant's first tokens come as soon as without the heavy one"),
    row("soak", 150, How::Timeline(&timelines::SOAK),
        "everything changes for two hours: no unexplained error, nothing grows"),
    Row { nightly: Some("15"), needs: &["nats-server", "etcd"],
        ..row("chaos", 40, How::Timeline(&timelines::replicas::CHAOS),
            "three gateways; engines, gateways, NATS, etcd and networks fail at random") },
    Row { needs: &["nats-server"],
        ..row("replicas", 10, How::Timeline(&REPLICAS),
            "three gateways; an engine, NATS, a gateway and a network fail in turn") },
];

/// Runs scenarios one after another. Returns an error when a requirement was not met.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    if args.list {
        let cells = |row: &Row| vec![row.name.to_owned(), row.purpose.to_owned(), row.needs.join(", ")];
        columns(&ROWS.iter().map(cells).collect::<Vec<_>>()).iter().for_each(|line| sh::print(line));
        return Ok(());
    }
    ensure!(args.scale > 0.0, "--scale {}: expected a number above 0", args.scale);
    ensure!(args.minutes.is_none_or(|minutes| minutes > 0.0), "--minutes: expected a number above 0");
    let rows = choose(&args.names)?;
    setup::run()?;
    let bin = fleet::build("release")?;
    let mut failed = Vec::new();
    for row in rows {
        sh::print(&format!("\n## {}: {}\n", row.name, row.purpose));
        if let Err(error) = one(row, args, &bin).await {
            sh::status(&format!("{}: {error:#}", row.name));
            failed.push(row.name);
        }
    }
    ensure!(failed.is_empty(), "scenarios that fell short: {}", failed.join(", "));
    Ok(())
}

async fn one(row: &Row, args: &Args, bin: &Path) -> anyhow::Result<()> {
    let mut checks = Checks::default();
    match row.how {
        How::Timeline(scenario) => {
            let options = Options { minutes: args.minutes, scale: args.scale, seed: args.seed };
            run::run(scenario, bin, options, &mut checks).await?;
        }
        How::Engines => engines::run(&args.only, bin, &mut checks).await?,
        How::Clients => clients::run(&args.only, args.scale, bin, &mut checks).await?,
        How::Hostile => hostile::run(&args.only, args.seed, bin, &mut checks).await?,
    }
    checks.finish()
}

/// Returns rows by their names or by the beginning of their names.
pub(crate) fn choose(names: &[String]) -> anyhow::Result<Vec<&'static Row>> {
    let fits = |row: &Row, name: &str| {
        row.name == name || row.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
    };
    for name in names {
        let all: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        let known = ROWS.iter().any(|row| fits(row, name));
        ensure!(known, "no scenario is called `{name}`: expected {}", all.join(", "));
    }
    Ok(ROWS.iter().filter(|row| names.iter().any(|name| fits(row, name))).collect())
}
