//! The engine as a process: prints its address and ends on SIGTERM.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use crate::client::*;
use serde_json::{Value, json};

#[tokio::test]
async fn a_parent_finds_the_port_and_ends_it() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pointsman-sim"))
        .args([
            "--role",
            "prefill",
            "--engine",
            "vllm",
            "--listen",
            "127.0.0.1:0",
            "--model",
            "small",
            "--speedup",
            "100",
        ])
        .args(["--fault", r#"{"kind":"status","status":418,"leg":"aggregated"}"#])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let addr = said["listening"].as_str().unwrap().parse().unwrap();
    let body = json!({"model": "small", "prompt": "hi", "max_tokens": 1});
    assert_eq!(try_post(addr, "/v1/completions", &body).await.unwrap().status, 418);
    let kill = Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(kill.success());
    assert!(child.wait().unwrap().success(), "SIGTERM is an orderly end");
}

#[test]
fn a_port_that_is_taken_is_named_with_what_to_do() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap();
    let args = ["--role", "prefill", "--engine", "vllm", "--listen", &addr.to_string()];
    let output = Command::new(env!("CARGO_BIN_EXE_pointsman-sim")).args(args).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let said = format!("cannot listen on port {} of 127.0.0.1: Address already in use", addr.port());
    assert!(!output.status.success() && stderr.contains(&said), "{stderr}");
    assert!(stderr.contains("; give another one with --listen"), "{stderr}");
    assert_eq!(stderr.matches("Address already in use").count(), 1, "{stderr}");
}

#[test]
fn invalid_settings_are_refused_with_their_values() {
    for (args, said) in [
        (["--speedup", "-1"], "speedup `-1`"),
        (["--fault", "{}"], "missing field `kind`"),
        (["--itl-ms", "-5"], "`-5`"),
    ] {
        let args = [format!("{}={}", args[0], args[1])];
        let output = Command::new(env!("CARGO_BIN_EXE_pointsman-sim")).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && stderr.contains(said), "{stderr}");
    }
    let help = Command::new(env!("CARGO_BIN_EXE_pointsman-sim")).arg("--help").output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    for flag in ["--overhead-ms", "--kv-transfer-us-per-token", "--bootstrap-port", "--fault"] {
        assert!(help.contains(flag), "{flag}");
    }
}
