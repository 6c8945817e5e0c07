//! `ci`: the checks that every change must pass.

use std::process::Command;

use crate::{book, fleet, lock_files, setup, sh, spec, structure};

/// How to install the programs that check the repository if they are installed.
const INSTALL_DENY: &str = "cargo-deny is not installed (cargo install --locked cargo-deny)";
const INSTALL_TYPOS: &str = "typos is not installed (cargo install --locked typos-cli)";

/// Options of `ci`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only the checks that compile no part of the gateway: format, module rules with the width of
    /// comments, clauses, lock files, book.
    #[arg(long)]
    quick: bool,
}

/// Runs every check; the first that fails ends the run.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    structure::check()?;
    spec::run(&spec::Args { short: true })?;
    let mut unchecked = lock_files::check()?;
    unchecked.extend(book::run_if_installed()?);
    if args.quick {
        unchecked.iter().for_each(|line| sh::status(line));
        return Ok(());
    }
    setup::run()?;
    let mut clippy = sh::cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    sh::run(&mut clippy)?;
    // The build without optional features.
    let mut bare = sh::cargo();
    bare.args(["clippy", "--package", "pointsman-gateway", "--no-default-features", "--locked"]);
    sh::run(bare.args(["--", "-D", "warnings"]))?;
    let mut doc = sh::cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--locked", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings");
    sh::run(&mut doc)?;
    let mut skipped = optional()?;
    skipped.extend(unchecked);
    sh::run(&mut fuzz_targets())?;
    sh::run(&mut models())?;
    tests()?;
    for line in &skipped {
        sh::status(line);
    }
    Ok(())
}

/// Returns the command that runs the loom model checker on the data that threads share without a lock.
/// `tests/models` is a separate workspace, because it compiles the host's files with `cfg(loom)`.
fn models() -> Command {
    let mut cargo = sh::cargo();
    cargo.args(["run", "--release", "--quiet", "--locked", "--manifest-path", "tests/models/Cargo.toml"]);
    cargo.arg("--target-dir").arg(fleet::target_dir().join("models"));
    cargo
}

/// Returns the command that compiles the fuzz targets. `fuzz` is a separate workspace, so no other check
/// does.
fn fuzz_targets() -> Command {
    let mut cargo = sh::cargo();
    cargo.args(["check", "--quiet", "--locked", "--manifest-path", "fuzz/Cargo.toml"]);
    cargo.arg("--target-dir").arg(fleet::target_dir().join("fuzz"));
    cargo
}

/// Runs every test of the workspace, with nextest when it is installed.
pub(crate) fn tests() -> anyhow::Result<()> {
    setup::run()?;
    if !sh::succeeds(sh::cargo().args(["nextest", "--version"])) {
        return sh::run(sh::cargo().args(["test", "--workspace", "--locked"]));
    }
    // Most tests wait for something: slow engines, deadlines, other processes.
    let threads = 2 * std::thread::available_parallelism()?.get();
    let mut nextest = sh::cargo();
    nextest.args(["nextest", "run", "--workspace", "--locked", "--no-fail-fast", "--status-level", "fail"]);
    nextest.args(["--test-threads", &threads.to_string()]);
    sh::run(&mut nextest)?;
    // nextest does not run documentation examples.
    sh::run(sh::cargo().args(["test", "--workspace", "--locked", "--doc", "--quiet"]))
}

/// Runs the optional programs. Returns a line for each check that could not run.
fn optional() -> anyhow::Result<Vec<String>> {
    let mut skipped = dependencies()?;
    if sh::succeeds(Command::new("typos").arg("--version")) {
        sh::run(Command::new("typos").current_dir(sh::root()))?;
    } else {
        skipped.push(format!("not checked: {INSTALL_TYPOS}"));
    }
    Ok(skipped)
}

/// Checks the dependencies with cargo-deny. The advisories need the RustSec database from GitHub. If it
/// cannot be fetched, only the advisories are left out.
fn dependencies() -> anyhow::Result<Vec<String>> {
    let deny = |args: &[&str]| {
        let mut command = sh::cargo();
        command.arg("deny").args(args).current_dir(sh::root());
        command
    };
    if !sh::succeeds(Command::new("cargo-deny").arg("--version")) {
        return Ok(vec![format!("not checked: {INSTALL_DENY}")]);
    }
    sh::run(&mut deny(&["check", "bans", "licenses", "sources"]))?;
    if !sh::succeeds(&mut deny(&["fetch", "db"])) {
        return Ok(vec!["not checked: advisories (the RustSec database cannot be fetched)".into()]);
    }
    sh::run(&mut deny(&["check", "advisories"]))?;
    Ok(Vec::new())
}
