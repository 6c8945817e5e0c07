//! `ci`: what has to be green.

use crate::{models, setup, sh, test};

/// Format, lints, docs, models, tests; the first that fails ends it.
pub(crate) fn run() -> anyhow::Result<()> {
    setup::run()?;
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    sh::run(sh::cargo().args([
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ]))?;
    let mut doc = sh::cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--locked", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings");
    sh::run(&mut doc)?;
    models::run(&models::Args::default())?;
    test::run()
}
