//! `bench`: the criterion benches.

use crate::{setup, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only benches whose name contains this, as `policy_call` or `pipeline`.
    filter: Option<String>,
}

/// Runs the benches of the whole workspace.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let mut cargo = sh::cargo();
    cargo.args(["bench", "--workspace", "--locked"]);
    match &args.filter {
        Some(filter) => cargo.args(["--bench", filter]),
        None => cargo.arg("--benches"),
    };
    sh::run(&mut cargo)
}
