//! `drill`: runs real processes under load and causes faults. Each scenario is a row of a table, which also
//! contains the requirements for the end.

use std::{path::Path, time::Duration};

use anyhow::ensure;

pub(crate) use self::{
    rig::Rig,
    scenario::{Fault, FleetSpec, Scenario},
};
use self::{run::Options, scenario::Scenarios};
use crate::{
    fleet, sh,
    table::{Checks, columns},
};

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

/// Returns all scenarios.
pub(crate) fn scenarios() -> anyhow::Result<Vec<Scenario>> {
    let all: Scenarios = toml::from_str(include_str!("../drill/scenarios.toml"))?;
    Ok(all.row)
}

/// Runs scenarios one after another. Returns an error when a requirement was not met.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    if args.list {
        let cells = |row: &Scenario| vec![row.name.clone(), row.purpose.clone(), row.needs.join(", ")];
        columns(&scenarios()?.iter().map(cells).collect::<Vec<_>>()).iter().for_each(|line| sh::print(line));
        return Ok(());
    }
    ensure!(args.scale > 0.0, "--scale {}: expected a number above 0", args.scale);
    ensure!(args.minutes.is_none_or(|minutes| minutes > 0.0), "--minutes: expected a number above 0");
    let rows = choose(&args.names)?;
    let bin = fleet::build("release")?;
    let mut failed = Vec::new();
    for row in rows {
        sh::print(&format!("\n## {}: {}\n", row.name, row.purpose));
        if let Err(error) = one(&row, args, &bin).await {
            sh::status(&format!("{}: {error:#}", row.name));
            failed.push(row.name);
        }
    }
    ensure!(failed.is_empty(), "scenarios that fell short: {}", failed.join(", "));
    Ok(())
}

async fn one(row: &Scenario, args: &Args, bin: &Path) -> anyhow::Result<()> {
    let mut checks = Checks::default();
    match row.name.as_str() {
        "engines" => engines::run(&args.only, bin, &mut checks).await?,
        "clients" => clients::run(&args.only, args.scale, bin, &mut checks).await?,
        "hostile" => hostile::run(&args.only, args.seed, bin, &mut checks).await?,
        _ => {
            let options = Options { minutes: args.minutes, scale: args.scale, seed: args.seed };
            run::run(row, bin, options, &mut checks).await?;
        }
    }
    checks.finish()
}

/// Returns scenarios by their names or by the beginning of their names.
pub(crate) fn choose(names: &[String]) -> anyhow::Result<Vec<Scenario>> {
    let fits = |row: &Scenario, name: &str| {
        row.name == name || row.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
    };
    let mut rows = scenarios()?;
    for name in names {
        let all: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        let known = rows.iter().any(|row| fits(row, name));
        ensure!(known, "no scenario is called `{name}`: expected {}", all.join(", "));
    }
    rows.retain(|row| names.iter().any(|name| fits(row, name)));
    Ok(rows)
}
