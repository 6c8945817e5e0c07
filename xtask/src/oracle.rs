//! `oracle`: hashes, index and cost beside NVIDIA Dynamo's KV router. The comparison in `tests/oracle` is a
//! workspace of its own, because the other router brings a hundred crates and pins its tokio. CI does not
//! build it.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::ensure;

use crate::{fleet, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only tests whose names contain this.
    filter: Option<String>,
    /// First rewrite tests/fixtures/oracle_cost.json, the other router's costs that CI compares ours with.
    #[arg(long)]
    write_table: bool,
}

/// Runs the comparison's tests.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.write_table {
        let table = cargo("run").args(["--bin", "cost-table"]).stderr(Stdio::inherit()).output()?;
        ensure!(table.status.success(), "the program cost-table ended with {}", table.status);
        std::fs::write(sh::root().join("tests/fixtures/oracle_cost.json"), table.stdout)?;
    }
    sh::run(cargo("test").args(["--tests", "--"]).args(&args.filter))
}

/// A cargo command on the comparison's workspace, with a target directory of its own.
pub(crate) fn cargo(command: &str) -> Command {
    let mut cargo = sh::cargo();
    cargo.args([command, "--manifest-path", "tests/oracle/Cargo.toml", "--locked"]);
    cargo.env("CARGO_TARGET_DIR", target());
    cargo
}

/// Target directory of the comparison.
pub(crate) fn target() -> PathBuf {
    fleet::target_dir().join("oracle")
}
