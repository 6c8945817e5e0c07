//! Builds the binaries that commands start.

use std::path::PathBuf;

use crate::sh;

/// Directory of everything that is built.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| sh::root().join("target"), PathBuf::from)
}

/// Builds the gateway and the engine with a profile and returns their directory.
///
/// With `POINTSMAN_BIN=DIR` in the environment nothing is built, and the binaries of that directory are used.
pub(crate) fn build(profile: &str) -> anyhow::Result<PathBuf> {
    if let Some(bin) = std::env::var_os("POINTSMAN_BIN") {
        return Ok(bin.into());
    }
    let mut cargo = sh::cargo();
    cargo.args(["build", "--profile", profile, "--locked"]);
    if profile == "dev" {
        // With the features of the whole workspace, so that the tests use what is compiled here.
        cargo.args(["--workspace", "--bin", "pointsman", "--bin", "pointsman-sim"]);
    } else {
        cargo.args(["--package", "pointsman-gateway", "--package", "pointsman-sim"]);
    }
    sh::run(&mut cargo)?;
    Ok(target_dir().join(if profile == "dev" { "debug" } else { profile }))
}
