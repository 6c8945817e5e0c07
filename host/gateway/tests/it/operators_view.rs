//! Tests of the real binary as an operator sees it: refusals at the start, and log lines that others cannot
//! forge.

#![allow(clippy::expect_used, reason = "helpers of tests")]

use std::{
    fs,
    io::Read as _,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use tokio::time::Instant;

use crate::process::{POINTSMAN, command};

fn pointsman(arguments: &[&str]) -> Command {
    let mut command = command(POINTSMAN, arguments);
    command.stdout(Stdio::null());
    command
}

fn refused(arguments: &[&str]) -> String {
    let output = pointsman(arguments).output().expect("the binary runs");
    let text = String::from_utf8(output.stderr).expect("text");
    assert_eq!(output.status.code(), Some(2), "{text}");
    text
}

#[test]
fn an_admin_listener_on_the_network_needs_a_token_or_a_word_that_it_is_meant() {
    let text = refused(&["serve", "--listen", "127.0.0.1:0", "--admin-listen", "0.0.0.0:0"]);
    assert!(
        text.contains("`0.0.0.0:0` can be reached from the network, and there is no admin token"),
        "{text}"
    );
    let dir = tempfile::tempdir().expect("a folder");
    let token = |name: &str, text: &str| {
        let file = dir.path().join(name);
        fs::write(&file, text).expect("written");
        format!("{{ file = {file:?} }}")
    };
    let (good, empty) = (token("good", "a-token-of-operators\n"), token("empty", "\n"));
    for (key, value, passes) in [
        ("ADMIN_INSECURE", "true", true),
        ("ADMIN_TOKEN", good.as_str(), true),
        ("ADMIN_TOKEN", empty.as_str(), false),
    ] {
        let mut check = pointsman(&["check-config", "--admin-listen", "0.0.0.0:0"]);
        let check = check.env(format!("POINTSMAN__SERVER__{key}"), value).output().expect("the binary runs");
        let text = String::from_utf8_lossy(&check.stderr).into_owned();
        assert_eq!(check.status.success(), passes, "{key} = {value}: {text}");
        // An empty token is refused for what it is.
        assert!(passes || text.contains("empty"), "{key} = {value}: {text}");
    }
}

#[test]
fn no_message_shows_a_worker_s_key() {
    let worker = "role=prefill,engine=vllm,url=http://127.0.0.1:9,api_key=sk-SECRET,colour=red";
    let text = refused(&["check-config", "--worker", worker]);
    assert!(text.contains("api_key=[secret]") && text.contains("colour"), "{text}");
    assert!(!text.contains("SECRET"), "{text}");
}

#[test]
fn n7_a_worker_that_is_a_url_alone_is_answered_with_the_form() {
    // N7.25
    let text = refused(&["check-config", "--worker", "http://127.0.0.1:8001"]);
    let form = "--worker http://127.0.0.1:8001: is not of the form role=prefill|decode|aggregated,\
                engine=vllm|sglang|trtllm|openai,url=http://HOST:PORT";
    assert!(text.contains(form) && text.matches("--worker").count() == 1, "{text}");
    let text = refused(&["check-config", "--worker", "http://user:SECRET@127.0.0.1:8001"]);
    assert!(text.contains("http://[secret]@127.0.0.1:8001") && !text.contains("SECRET"), "{text}");
    let text = refused(&["check-config", "--worker", "http://user:SEC,RET@127.0.0.1:8001"]);
    assert!(text.contains("[secret]") && !text.contains("SEC") && !text.contains("RET@"), "{text}");
}

#[test]
fn a_configuration_error_names_line_column_and_key_and_no_secret() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("p.toml");
    fs::write(&file, "[server]\nthreads = 1\n  admin_token = 7007\n").expect("written");
    let text = refused(&["check-config", "--config", file.to_str().expect("a path")]);
    assert!(text.contains("p.toml:3:3: server.admin_token: invalid type: integer"), "{text}");
    assert!(!text.contains("7007"), "{text}");
}

#[test]
fn a_policy_file_s_name_neither_forges_a_log_line_nor_moves_the_cursor() {
    let dir = tempfile::tempdir().expect("a folder");
    let name = "x\n2026-01-01T00:00:00.000000Z  INFO audit: forged\u{1b}[2J.wasm";
    fs::write(dir.path().join(name), "garbage").expect("written");
    let text = log_of(dir.path(), "forged");
    let line = text.lines().find(|line| line.contains("forged")).expect("the file is logged");
    assert!(!line.starts_with("2026-01-01") && line.contains("\\n2026-01-01"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text:?}");
}

/// Serves with a policy directory until the log contains `wanted`; returns the log.
fn log_of(policies: &Path, wanted: &'static str) -> String {
    let policies = policies.to_str().expect("a path");
    let arguments =
        ["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--policies", policies];
    let mut child = pointsman(&arguments).stderr(Stdio::piped()).spawn().expect("the binary runs");
    let mut stderr = child.stderr.take().expect("piped");
    let reader = std::thread::spawn(move || {
        let (mut text, mut buffer) = (String::new(), [0; 4_096]);
        while !text.lines().any(|line| line.contains(wanted) && text.ends_with('\n')) {
            match stderr.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(read) => text.push_str(&String::from_utf8_lossy(buffer.get(..read).unwrap_or_default())),
            }
        }
        text
    });
    let begun = Instant::now();
    while !reader.is_finished() && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().expect("killed");
    child.wait().expect("ended");
    reader.join().expect("read")
}
