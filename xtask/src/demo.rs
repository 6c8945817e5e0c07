//! `demo`: builds the programs and runs `pointsman demo`.

use std::{process::Command, time::Instant};

use crate::{
    fleet::{self, GATEWAY, LAB},
    sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Arguments of `pointsman demo`. `cargo xtask demo -- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    arguments: Vec<String>,
}

/// Runs the demo, built with the profile that the tests use.
///
/// # Errors
/// The build fails, or an event of the demo does not end as expected.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    sh::status(
        "Building the gateway, the simulated engine and three policies (the first build compiles about 500 \
         crates; cargo shows its progress below)",
    );
    let started = Instant::now();
    let bin = fleet::build_programs("dev", &[GATEWAY, LAB])?;
    sh::status(&format!("built in {:.0} s", started.elapsed().as_secs_f64()));
    sh::run(Command::new(bin.join(GATEWAY.name)).arg("demo").args(&args.arguments))
}
