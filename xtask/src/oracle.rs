//! `oracle`: hashes, index and cost beside NVIDIA Dynamo's KV router. The comparison is a workspace of its own in
//! `tests/oracle`, because the oracle brings a hundred crates and pins its tokio; CI does not build it.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::ensure;

use crate::sh;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only tests whose names contain this.
    filter: Option<String>,
    /// Write tests/fixtures/oracle_cost.json anew, the oracle's costs that CI compares ours with, before the tests.
    #[arg(long)]
    write_table: bool,
}

/// Runs the comparison's tests.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.write_table {
        let table = cargo("run").args(["--bin", "cost-table"]).stderr(Stdio::inherit()).output()?;
        ensure!(table.status.success(), "no table");
        std::fs::write(sh::root().join("tests/fixtures/oracle_cost.json"), table.stdout)?;
    }
    sh::run(cargo("test").args(["--tests", "--"]).args(&args.filter))
}

/// A cargo command on the comparison's workspace, with a target folder of its own.
pub(crate) fn cargo(command: &str) -> Command {
    let mut cargo = sh::cargo();
    cargo.args([command, "--manifest-path", "tests/oracle/Cargo.toml", "--locked"]);
    cargo.env("CARGO_TARGET_DIR", target());
    cargo
}

/// Where it is built.
pub(crate) fn target() -> PathBuf {
    let around =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh::root().join("target"), PathBuf::from);
    around.join("oracle")
}
