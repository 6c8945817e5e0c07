//! `test`: everything, after the set-up. nextest when it is there, else cargo's own runner.

use crate::{setup, sh};

/// Sets up and runs every test.
pub(crate) fn run() -> anyhow::Result<()> {
    setup::run()?;
    if sh::succeeds(sh::cargo().args(["nextest", "--version"])) {
        sh::run(sh::cargo().args([
            "nextest",
            "run",
            "--workspace",
            "--locked",
            "--no-fail-fast",
            "--status-level",
            "fail",
        ]))?;
        // nextest leaves documentation examples out.
        return sh::run(sh::cargo().args(["test", "--workspace", "--locked", "--doc", "--quiet"]));
    }
    sh::run(sh::cargo().args(["test", "--workspace", "--locked"]))
}
