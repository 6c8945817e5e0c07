//! Installs the WebAssembly targets, for the commands that build.

use std::process::Command;

use anyhow::bail;
use pointsman_guest_build::{Target, has_target};

use crate::sh;

/// Installs the missing targets. Returns an error that names other ways to install them.
pub(crate) fn run() -> anyhow::Result<()> {
    let missing: Vec<&str> = [Target::Unknown, Target::Wasip2]
        .into_iter()
        .filter_map(|target| match has_target(target) {
            Ok(true) => None,
            Ok(false) | Err(_) => Some(target.triple()),
        })
        .collect();
    if missing.is_empty() {
        sh::status("setup: the WebAssembly targets are installed");
        return Ok(());
    }
    let mut rustup = Command::new("rustup");
    rustup.current_dir(sh::root()).args(["target", "add"]).args(&missing);
    if let Err(error) = sh::run(&mut rustup) {
        bail!(
            "could not install the Rust targets {}, which policies are built for: {error:#}\nInstall them for the \
             toolchain of rust-toolchain.toml with `rustup target add {}`, or from your distribution.",
            missing.join(" and "),
            missing.join(" ")
        );
    }
    Ok(())
}
