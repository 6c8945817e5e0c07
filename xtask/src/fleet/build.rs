//! Builds the binaries that commands start.

use std::path::PathBuf;

use crate::{setup, sh};

/// Returns the directory of all build results.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh::root().join("target"), PathBuf::from)
}

/// A program, with the package that builds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    package: &'static str,
}

pub(crate) const GATEWAY: Program = Program { name: "pointsman", package: "pointsman-gateway" };
/// The simulated engine.
pub(crate) const ENGINE: Program = Program { name: "pointsman-sim", package: "pointsman-sim" };
/// The program with `compare` and `trace`.
pub(crate) const LAB: Program = Program { name: "pointsman-lab", package: "pointsman-lab-cli" };
/// The program with the commands for policy authors.
pub(crate) const POLICY: Program = Program { name: "pointsman-policy", package: "pointsman-policy-tools" };

/// Builds the gateway and the engine with a profile and returns their directory.
pub(crate) fn build(profile: &str) -> anyhow::Result<PathBuf> {
    build_programs(profile, &[GATEWAY, ENGINE])
}

/// Installs the WebAssembly targets, builds programs with a profile and returns their directory.
///
/// If the environment has `POINTSMAN_BIN=DIR`, nothing is built, and the programs in that directory are used.
pub(crate) fn build_programs(profile: &str, programs: &[Program]) -> anyhow::Result<PathBuf> {
    setup::run()?;
    if let Some(bin) = std::env::var_os("POINTSMAN_BIN").filter(|bin| !bin.is_empty()) {
        return Ok(bin.into());
    }
    let mut cargo = sh::cargo();
    cargo.args(["build", "--profile", profile, "--locked"]);
    if profile == "dev" {
        // The build uses the features of the whole workspace, so that the tests reuse its results.
        cargo.arg("--workspace").args(programs.iter().flat_map(|program| ["--bin", program.name]));
    } else {
        cargo.args(programs.iter().flat_map(|program| ["--package", program.package]));
    }
    sh::run(&mut cargo)?;
    Ok(target_dir().join(if profile == "dev" { "debug" } else { profile }))
}
