//! The README's first commands work as written: simulated engines, a gateway, a request, and a policy.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests may fail as tests do"
)]

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
};

use clap::Parser as _;
use pointsman_embedded_policies::LEAST_LOADED;
use pointsman_gateway::cli::Cli;
use serde_json::Value;

/// The commands of a section of the README, one text for each block.
fn blocks(title: &str) -> Vec<String> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = fs::read_to_string(readme).unwrap();
    let section = readme.split("\n## ").find(|section| section.lines().next() == Some(title)).unwrap();
    section.split("```\n").skip(1).step_by(2).map(str::to_owned).collect()
}

/// Ends what a shell started.
struct Shell(Child);

impl Drop for Shell {
    fn drop(&mut self) {
        // The shell leads a process group: engines and gateway are in it.
        let group = format!("-{}", self.0.id());
        let _ = Command::new("kill").args(["-TERM", "--", &group]).status();
        let _ = self.0.wait();
    }
}

#[test]
fn the_commands_of_the_readme_work_as_written_with_simulated_engines() {
    use std::os::unix::process::CommandExt as _;
    let dir = tempfile::tempdir().unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_pointsman")).parent().unwrap();
    assert!(bin.join("pointsman-sim").exists(), "build the workspace's binaries first: `--workspace --bins`");
    let (install, engines, policy) = (blocks("Install"), blocks("Your engines"), blocks("Your policy"));
    assert!(
        install[0].contains("cargo build --release")
            && install[0].contains("export PATH=\"$PWD/target/release:$PATH\"")
    );
    let (serve, ask) = (&engines[0], &engines[1]);
    // The ports may be taken on this machine: they are the only thing that differs from the text.
    let held: Vec<TcpListener> = (0..5).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let free: Vec<String> = held.iter().map(|port| port.local_addr().unwrap().port().to_string()).collect();
    drop(held);
    let ports = ["8001", "8002", "8003", "8080", "9090"];
    let moved = |text: &str| {
        let moved =
            ports.iter().zip(&free).fold(text.to_owned(), |text, (port, free)| text.replace(port, free));
        // Without flags, these are the defaults.
        moved.replace(
            "pointsman serve ",
            &format!("pointsman serve --listen 127.0.0.1:{} --admin-listen 127.0.0.1:{} ", free[3], free[4]),
        )
    };
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let bash = |script: &str| {
        let mut command = Command::new("bash");
        command.args(["-euc", script]).current_dir(dir.path()).env("PATH", &path).process_group(0);
        command
    };
    let mut serving =
        bash(&moved(serve)).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map(Shell).unwrap();
    let mut out = BufReader::new(serving.0.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"admin\"") {
        line.clear();
        assert!(out.read_line(&mut line).unwrap() > 0, "serve ended");
    }
    // What a command prints, again until it has a text.
    let until = |script: &str, wanted: &str| {
        for _ in 0..400 {
            let mut asked = bash(&moved(script)).stdout(Stdio::piped()).spawn().unwrap();
            let mut text = String::new();
            asked.stdout.take().unwrap().read_to_string(&mut text).unwrap();
            asked.wait().unwrap();
            if text.contains(wanted) {
                return text;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("{script} never prints {wanted}");
    };
    // The gateway learns the model from the engines.
    let answer: Value = serde_json::from_str(&until(ask, "choices")).unwrap();
    assert_eq!(answer["object"], "chat.completion", "{answer}");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() > 0, "{answer}");

    std::os::unix::fs::symlink(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies"),
        dir.path().join("policies"),
    )
    .unwrap();
    for line in policy[0].lines() {
        let command = line.split('#').next().unwrap().trim();
        let words: Vec<&str> = command.split(' ').collect();
        if words[0] == "pointsman" {
            assert!(Cli::try_parse_from(&words).is_ok(), "{command}");
        }
        // A build needs crates, and the cases are of its policy: the ignored tests of `policy new` run both.
        // Here a built-in policy takes the place of the file.
        match words[..3] {
            ["pointsman", "policy", "build"] => {
                fs::write(dir.path().join("shortest/shortest.wasm"), LEAST_LOADED).unwrap();
            }
            ["pointsman", "policy", "test"] => {
                assert!(dir.path().join(words.last().unwrap()).is_file(), "{command}");
            }
            _ => assert!(bash(command).status().unwrap().success(), "{command}"),
        }
    }
    let ask = ask.replace("curl -s ", "curl -si -H 'x-pointsman-decision: 1' ");
    until(&ask, "least-loaded@");
}
