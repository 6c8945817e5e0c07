//! `bench index`: the prefix index beside the concurrent tree of NVIDIA Dynamo's KV router. `tests/oracle` is
//! a workspace of its own, because the other router brings a hundred crates and pins its tokio.

use std::process::Command;

use crate::{fleet, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Arguments of the bench; `cargo xtask bench index -- --help` lists them.
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
