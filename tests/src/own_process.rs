//! Tests that change their process, or measure all of it: the limit of open files, the subscriber of
//! log lines, threads, memory.

use std::{env, path::PathBuf, process::Command};

/// Set in the process that runs one test alone.
const ALONE: &str = "POINTSMAN_TEST_ALONE";

/// Goes on in a process that runs no other test. Elsewhere, as under `cargo test`, runs the test that has
/// this line in such a process and returns from it.
#[macro_export]
macro_rules! own_process {
    () => {{
        fn here() {}
        if !$crate::own_process::is_alone(std::any::type_name_of_val(&here)) {
            return;
        }
    }};
}

/// Returns true in a process that runs no other test. Elsewhere runs the test around `place`, the path of a
/// function in it, in such a process and returns false.
///
/// # Panics
/// When the test fails there.
#[must_use]
pub fn is_alone(place: &str) -> bool {
    let nextest = env::var("NEXTEST_EXECUTION_MODE").is_ok_and(|mode| mode == "process-per-test");
    if nextest || env::var_os(ALONE).is_some() {
        return true;
    }
    run_alone(place, ALONE, Command::new);
    false
}

/// Runs the test around `place` in a process that has this variable. Returns its stderr.
#[expect(clippy::panic, reason = "a part of a test")]
pub(crate) fn run_alone(place: &str, variable: &str, command: impl FnOnce(PathBuf) -> Command) -> String {
    // The harness names tests without the crate. The place is in the closure of an async test.
    let path = place.split("::").skip(1).take_while(|part| !part.starts_with("{{") && *part != "here");
    let name = path.collect::<Vec<_>>().join("::");
    let program = env::current_exe().unwrap_or_else(|error| panic!("the path of this program: {error}"));
    let output = command(program).args([&*name, "--exact", "--nocapture"]).env(variable, "1").output();
    let output = output.unwrap_or_else(|error| panic!("start a process for {name}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{name} alone:\n{text}{failed}");
    failed.into_owned()
}
