//! `pointsman check-config`: workers and sources of workers that cannot serve, and what the gateway needs later.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{fs, path::Path, process::Command};

/// Exit code and stderr of `check-config` for a configuration in a directory.
fn check(dir: &Path, text: &str) -> (Option<i32>, String) {
    fs::write(dir.join("p.toml"), text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["check-config", "p.toml"]).current_dir(dir).env("NO_COLOR", "1").env_remove("RUST_LOG");
    let ran = command.output().unwrap();
    (ran.status.code(), String::from_utf8(ran.stderr).unwrap())
}

#[test]
fn k5_an_api_key_of_several_lines_is_named_in_files_and_in_defaults() {
    let dir = tempfile::tempdir().unwrap();
    let text = "[[workers]]\nrole = 'decode'\nengine = 'vllm'\nurl = 'http://h:1'\napi_key = { file = 'key' }\n\
                [[discovery.dns]]\nname = 'a'\nrecord = 'a.b'\n\
                defaults = { engine = 'vllm', role = 'decode', api_key = { file = 'key' } }\n";
    fs::write(dir.path().join("key"), "sk-SECRET\nSECRET\n").unwrap();
    let (code, told) = check(dir.path(), text);
    for path in ["p.toml:5:1: workers[0].api_key", "p.toml:9:48: discovery.dns[0].defaults.api_key"] {
        // K5.5
        assert!(told.contains(&format!("{path}: the key has several lines: give one line\n")), "{told}");
    }
    assert!(code == Some(2) && !told.contains("SECRET"), "{told}");
    fs::write(dir.path().join("key"), "sk-SECRET\n").unwrap();
    let (code, told) = check(dir.path(), text);
    // K5.5
    assert_eq!(code, Some(0), "{told}");
}
