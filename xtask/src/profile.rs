//! `profile`: counts how often each branch of the gateway is taken while it serves the scenarios of `bench
//! gateway`. The compiler lays the hot path out by these counts (profile-guided optimisation):
//! `package --profile-data`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::{bench::gateway, fleet, setup, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// File of the counts; default: `pointsman.profdata` in the target directory.
    #[arg(long)]
    output: Option<PathBuf>,
    /// Profile of the build: the counts are of use to builds with the same one only.
    #[arg(long, default_value = "dist")]
    profile: String,
}

/// Builds the gateway with counters, has it serve, and writes the counts.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let merge = profdata_tool()?;
    setup::run()?;
    fs::create_dir_all(fleet::target_dir())?;
    let target = fleet::target_dir().canonicalize()?;
    let output = args.output.clone().unwrap_or_else(|| target.join("pointsman.profdata"));
    let (build, counts) = (target.join("profile-build"), target.join("profile-build/counts"));
    let mut cargo = sh::cargo();
    cargo.args(["build", "--locked", "--profile", &args.profile]);
    cargo.args(["--package", "pointsman-gateway", "--package", "pointsman-sim"]);
    cargo.env("CARGO_TARGET_DIR", &build);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", format!("-Cprofile-generate={}", counts.display()));
    sh::run(&mut cargo)?;
    // Build scripts and macros have counters, too.
    if counts.exists() {
        fs::remove_dir_all(&counts).with_context(|| format!("removing {}", counts.display()))?;
    }
    gateway::serve_all(&build.join(&args.profile)).await?;
    let files: Vec<PathBuf> = fs::read_dir(&counts)
        .with_context(|| format!("the gateway wrote no counts to {}", counts.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    ensure!(!files.is_empty(), "the gateway wrote no counts to {}", counts.display());
    sh::run(Command::new(merge).args(["merge", "--sparse", "-o"]).arg(&output).args(files))?;
    sh::print(&format!("the profile is in {}", output.display()));
    Ok(())
}

/// Path of the compiler's tool that merges counts.
fn profdata_tool() -> anyhow::Result<PathBuf> {
    let printed = Command::new("rustc").args(["--print", "target-libdir"]).current_dir(sh::root()).output();
    let printed = printed.context("could not start rustc")?;
    let libraries = String::from_utf8_lossy(&printed.stdout).trim().to_owned();
    let tool = Path::new(&libraries).with_file_name("bin").join("llvm-profdata");
    ensure!(tool.is_file(), "llvm-profdata is missing; install it with `rustup component add llvm-tools`");
    Ok(tool)
}
