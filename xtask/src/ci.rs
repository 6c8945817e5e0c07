//! `ci`: the checks that every change has to pass.

use std::process::Command;

use crate::{models, setup, sh, spec, structure, test};

mod width;

/// Programs that check the repository when they are installed, and how to install them.
const OPTIONAL: [(&str, &[&str], &str); 2] = [
    ("cargo-deny", &["deny", "check"], "cargo install --locked cargo-deny"),
    ("typos", &[], "cargo install --locked typos-cli"),
];

/// Options of `ci`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Run only the checks that compile nothing of the gateway: format, line width, module rules, clauses.
    #[arg(long)]
    quick: bool,
}

/// Runs every check; the first that fails ends the run.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    width::run()?;
    structure::run(&structure::Args::default())?;
    spec::run(&spec::Args::check())?;
    if args.quick {
        return Ok(());
    }
    setup::run()?;
    let mut clippy = sh::cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    sh::run(&mut clippy)?;
    // Without its optional parts, as `cargo xtask demo` builds the gateway.
    let mut bare = sh::cargo();
    bare.args(["clippy", "--package", "pointsman-gateway", "--no-default-features", "--locked"]);
    sh::run(bare.args(["--", "-D", "warnings"]))?;
    let mut doc = sh::cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--locked", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings");
    sh::run(&mut doc)?;
    let skipped = optional()?;
    models::run(&models::Args::default())?;
    test::run()?;
    for line in &skipped {
        sh::status(line);
    }
    Ok(())
}

/// Runs the optional programs. Returns a line for each that is not installed.
fn optional() -> anyhow::Result<Vec<String>> {
    let mut skipped = Vec::new();
    for (program, args, install) in OPTIONAL {
        if sh::succeeds(Command::new(program).arg("--version")) {
            let mut command = if args.is_empty() { Command::new(program) } else { sh::cargo() };
            sh::run(command.args(args).current_dir(sh::root()))?;
        } else {
            skipped.push(format!("not checked: {program} is not installed ({install})"));
        }
    }
    Ok(skipped)
}
