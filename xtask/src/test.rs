//! `test`: every test of the workspace, with nextest when it is installed, else with cargo's own runner.

use crate::{setup, sh};

/// Installs the targets and runs every test.
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
        // nextest does not run documentation examples.
        return sh::run(sh::cargo().args(["test", "--workspace", "--locked", "--doc", "--quiet"]));
    }
    sh::run(sh::cargo().args(["test", "--workspace", "--locked"]))
}
