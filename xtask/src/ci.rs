//! `ci`: the checks that every change has to pass.

use std::process::Command;

use crate::{models, setup, sh, structure, test};

mod width;

/// Programs that check the repository when they are installed, and how to install them.
const OPTIONAL: [(&str, &[&str], &str); 2] = [
    ("cargo-deny", &["deny", "check"], "cargo install --locked cargo-deny"),
    ("typos", &[], "cargo install --locked typos-cli"),
];

/// Runs every check; the first that fails ends the run.
pub(crate) fn run() -> anyhow::Result<()> {
    setup::run()?;
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    // Old code still breaks these two; they report until it does not.
    for report in [width::run(), structure::run(&structure::Args::default())] {
        report.unwrap_or_else(|error| sh::status(&format!("not enforced yet: {error}")));
    }
    let mut clippy = sh::cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    sh::run(&mut clippy)?;
    let mut doc = sh::cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--locked", "--quiet"]);
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
