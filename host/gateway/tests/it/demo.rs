//! `pointsman demo`: six engines, a gateway and a recorded trace, as real processes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use crate::programs;

fn demo(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).arg("demo").args(arguments).env("PATH", "/nonexistent").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn each_event_of_the_demo_ends_as_it_must() {
    let output = demo(Path::new(programs::pointsman()), &["--requests", "150"]);
    let (told, said) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{told}{said}");
    for event in ["hot swap", "refused file", "looping policy", "killed worker"] {
        let line = told.lines().find(|line| line.starts_with(event));
        assert!(line.is_some_and(|line| line.ends_with("  ok")), "{event}: {told}");
    }
    assert!(said.contains("The operators' page: http://127.0.0.1:"), "{said}");
    assert!(told.contains("pointsman demo --keep"), "{told}");
}

/// Processes of a demo that were left running.
struct Kept(Vec<String>);

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(&self.0).status();
    }
}

#[test]
fn what_a_kept_demo_tells_people_to_run_works() {
    let output = demo(Path::new(programs::pointsman()), &["--requests", "60", "--keep"]);
    let told = text(&output.stdout);
    let line =
        |start: &str| told.lines().find_map(|line| line.trim().strip_prefix(start)).unwrap_or_default();
    let (pids, files) = line("kill ").split_once("; rm -r ").unwrap_or_default();
    let _kept = Kept(pids.split(' ').map(str::to_owned).collect());
    assert!(output.status.success() && files.contains("/pointsman-demo-"), "{told}{}", text(&output.stderr));
    let run = |command: &str| Command::new("sh").args(["-c", command]).output().unwrap();
    let dir = Path::new(programs::pointsman()).parent().unwrap();
    let answer = run(&format!("curl {}", line("curl ")));
    assert!(text(&answer.stdout).contains("data: [DONE]"), "{}", text(&answer.stdout));
    let status = run(&format!("{}/pointsman {}", dir.display(), line("pointsman ")));
    assert!(text(&status.stdout).contains("ready        yes: tiny"), "{}", text(&status.stdout));
    assert!(run(&format!("cp {}", line("cp "))).status.success());
    fs::remove_dir_all(files).unwrap();
}

#[test]
fn without_the_gateway_beside_it_the_demo_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let lab = Path::new(programs::pointsman()).with_file_name("pointsman-lab");
    let alone = dir.path().join("pointsman-lab");
    // A link would lead the program back to its own directory.
    fs::hard_link(&lab, &alone).or_else(|_| fs::copy(&lab, &alone).map(drop)).unwrap();
    let output = demo(&alone, &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("has no program `pointsman`; install the whole package"));
}

#[test]
fn a_trace_that_cannot_be_used_is_an_error_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let (absent, other) = (dir.path().join("absent.jsonl"), dir.path().join("other.jsonl"));
    fs::write(&other, "{\"a\": 1}\n").unwrap();
    let program = Path::new(programs::pointsman());
    for (file, problem) in [(&absent, "could not read"), (&other, "{\"a\": 1}")] {
        let output = demo(program, &["--trace", file.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(problem), "{}", text(&output.stderr));
        assert!(!text(&output.stderr).contains("Starting"), "{}", text(&output.stderr));
    }
    let output = demo(program, &["--requests", "0"]);
    assert!(text(&output.stderr).contains("--requests is 0"), "{}", text(&output.stderr));
}
