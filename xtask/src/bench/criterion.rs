//! `bench criterion`: the criterion benches.

use crate::{setup, sh};

#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Run only this bench, for example `policy_call` or `pipeline`.
    bench: Option<String>,
}

/// Runs the benches of the workspace.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let mut cargo = sh::cargo();
    cargo.args(["bench", "--workspace", "--locked"]);
    match &args.bench {
        Some(bench) => cargo.args(["--bench", bench]),
        None => cargo.arg("--benches"),
    };
    sh::run(&mut cargo)
}
