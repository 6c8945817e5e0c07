//! Credential helpers of Docker: `docker-credential-NAME get`.

use std::{io, process::Stdio, time::Duration};

use serde::Deserialize;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
};

use super::error::{RegistryError, clean};

/// Longest time that a helper may take; some ask a cloud for a token.
const DEADLINE: Duration = Duration::from_secs(30);
/// Longest answer of a helper that is read, bytes.
const MAX_ANSWER_BYTES: u64 = 64 << 10;
/// Part of a helper's message when it has no credentials for the registry.
const NOT_FOUND: &str = "credentials not found";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    username: String,
    secret: String,
}

/// Asks a helper for user and secret of a registry. Returns none if it has none.
pub(super) async fn get(name: &str, registry: &str) -> Result<Option<(String, String)>, RegistryError> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !name.chars().all(good) {
        return Err(RegistryError::new(
            format!("\"{}\" is not the name of a credential helper", clean(name)),
            "correct credsStore or credHelpers in Docker's configuration",
        ));
    }
    let program = format!("docker-credential-{name}");
    let fail = |problem: String| {
        let advice = "install the helper, or correct credsStore or credHelpers in Docker's configuration";
        RegistryError::new(format!("the credential helper {program} {problem}"), advice)
    };
    let answer = tokio::time::timeout(DEADLINE, run(&program, registry)).await;
    let answer = answer.map_err(|_| fail(format!("did not answer within {} s", DEADLINE.as_secs())))?;
    let (success, output) = answer.map_err(|error| fail(format!("cannot be run: {error}")))?;
    if output.len() as u64 > MAX_ANSWER_BYTES {
        return Err(fail(format!("answered with more than {MAX_ANSWER_BYTES} bytes")));
    }
    if !success {
        let text = String::from_utf8_lossy(&output);
        if text.contains(NOT_FOUND) {
            return Ok(None);
        }
        return Err(fail(format!("failed: {}", clean(&text))));
    }
    let answer: Answer = serde_json::from_slice(&output)
        .map_err(|_| fail("answered with something other than JSON with Username and Secret".to_owned()))?;
    Ok(Some((answer.username, answer.secret)))
}

async fn run(program: &str, registry: &str) -> io::Result<(bool, Vec<u8>)> {
    let mut child = Command::new(program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    if let Some(mut stdin) = stdin {
        // A helper need not read its input.
        let _ = stdin.write_all(registry.as_bytes()).await;
    }
    let mut output = Vec::new();
    if let Some(stdout) = stdout {
        stdout.take(MAX_ANSWER_BYTES + 1).read_to_end(&mut output).await?;
    }
    if output.len() as u64 > MAX_ANSWER_BYTES {
        return Ok((false, output));
    }
    Ok((child.wait().await?.success(), output))
}
