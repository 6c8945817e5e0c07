//! `bench index`: compares the prefix index with the concurrent tree of NVIDIA Dynamo's KV router.
//! `tests/oracle` is a separate workspace, because the other router needs a hundred crates and a fixed
//! version of tokio.

use std::process::Command;

use crate::{fleet, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Arguments of the bench. `cargo xtask bench index -- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

/// Builds the bench and runs it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let target = fleet::target_dir().join("oracle");
    let mut build = sh::cargo();
    build.args(["build", "--release", "--bins", "--locked", "--manifest-path", "tests/oracle/Cargo.toml"]);
    sh::run(build.arg("--target-dir").arg(&target))?;
    sh::run(Command::new(target.join("release/index")).args(&args.arguments))
}
