//! Tests that change their process, or measure all of it: the limit of open files, the subscriber of
//! log lines, threads, memory.

use std::{env, process::Command};

/// Set in the process that runs one test alone.
const ALONE: &str = "POINTSMAN_TEST_ALONE";

/// Returns true in a process that runs no other test. Elsewhere, as under `cargo test`, runs the test called
/// `path` (`concat!(module_path!(), "::name")`) in such a process and returns false.
///
/// # Panics
/// When the test fails there.
#[must_use]
#[expect(clippy::panic, reason = "a part of a test")]
pub fn own_process(path: &str) -> bool {
    let nextest = env::var("NEXTEST_EXECUTION_MODE").is_ok_and(|mode| mode == "process-per-test");
    if nextest || env::var_os(ALONE).is_some() {
        return true;
    }
    // The harness names tests without the crate.
    let (_, name) = path.split_once("::").unwrap_or_else(|| panic!("{path} does not name a crate"));
    let program = env::current_exe().unwrap_or_else(|error| panic!("the path of this program: {error}"));
    let output = Command::new(program).args([name, "--exact", "--nocapture"]).env(ALONE, "1").output();
    let output = output.unwrap_or_else(|error| panic!("start a process for {name}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{name} alone:\n{text}{failed}");
    false
}
