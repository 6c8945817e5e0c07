//! `curl-errors`: every row of table I of docs/behaviour.md, with `curl` against real processes. Prints what
//! was sent and what came back, and checks status and code.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use pointsman_guest_build::GuestBuild;

use crate::{
    certificates::Certificates,
    fleet::{self, EngineSpec, Fleet},
    setup, sh,
    table::Checks,
};

mod rows;

use rows::{ROWS, Row};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the transcript to this file, as Markdown.
    #[arg(long)]
    write: Option<PathBuf>,
    /// Run only the rows whose code contains this.
    #[arg(long, default_value = "")]
    only: String,
}

/// Longest time of a row's script.
const LIMIT: Duration = Duration::from_secs(60);

const HEAD: &str = "# Errors\n\n\
    Every row of [table I](behaviour.md), as `curl` shows it. `cargo xtask curl-errors --write FILE`\n\
    runs these commands on a gateway with simulated engines, checks status and code, and writes this page.\n\
    `$GATEWAY` is the address for clients, `$ADMIN` the one for operators, `$CHAT` is\n\
    `$GATEWAY/v1/chat/completions`, and `ask` is `curl -si -H 'content-type: application/json'`. `$DIGEST` is\n\
    what `pointsman key new --argon2` prints. Answers are shown without the headers `date`, `content-type`,\n\
    `content-length`, `connection`, `x-request-id`.\n";

/// Headers that say nothing about an error.
const HIDDEN: [&str; 6] =
    ["date:", "content-type:", "content-length:", "connection:", "x-request-id:", "transfer-encoding:"];

/// Runs every row; returns an error when one has another status or code, or when the table has one that no
/// row shows.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let policy = GuestBuild::new(&sh::root(), "policy-tenant-limit").build()?;
    let bin = fleet::build("release")?;
    let mut checks = Checks::default();
    let mut page = HEAD.to_owned();
    for row in ROWS.iter().filter(|row| row.code.contains(&args.only)) {
        let transcript = show(row, &bin, &policy).await.with_context(|| row.code.to_owned())?;
        let passed = row.expects.iter().all(|text| transcript.contains(text));
        checks.check(row.code, row.expects.join(", "), passed);
        if !passed {
            sh::status(&transcript);
        }
        let _ = write!(page, "\n## `{}`\n\n{}\n", row.code, row.condition);
        if !row.config.is_empty() {
            let _ = write!(page, "\n```toml\n{}\n```\n", row.config.trim());
        }
        let _ = write!(page, "\n```console\n{transcript}\n```\n");
    }
    if args.only.is_empty() {
        let missing = missing(&std::fs::read_to_string(sh::root().join("docs/behaviour.md"))?);
        checks.check("codes of the table without a row", missing.join(", "), missing.is_empty());
    }
    if let Some(file) = &args.write {
        std::fs::write(file, page)?;
    }
    checks.finish()
}

/// Codes of table I that no row shows.
fn missing(behaviour: &str) -> Vec<String> {
    let table = behaviour
        .lines()
        .skip_while(|line| !line.starts_with("## I."))
        .take_while(|line| !line.starts_with("- I1 "));
    let cells = table.filter_map(|line| line.split('|').nth(3));
    let codes: BTreeSet<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    let shown: BTreeSet<&str> = ROWS.iter().map(|row| row.code).collect();
    codes.difference(&shown).map(|code| (*code).to_owned()).collect()
}

/// Starts what a row needs, runs its script, and returns the commands and their output.
async fn show(row: &Row, bin: &Path, policy: &[u8]) -> anyhow::Result<String> {
    let dir = tempfile::Builder::new().prefix("pointsman-errors-").tempdir()?;
    let parts = dir.path().join("policies/parts");
    std::fs::create_dir_all(&parts)?;
    std::fs::write(parts.join("tenant-limit.wasm"), policy)?;
    let engines: Vec<EngineSpec> = row.engines.iter().map(|(role, flags)| engine(role, flags)).collect();
    Certificates::write(dir.path())?;
    let mut config = row.config.replace("$DIR", &dir.path().to_string_lossy());
    if config.contains("$DIGEST") {
        config = config.replace("$DIGEST", &fresh_digest(bin)?);
    }
    let fleet = fleet::start(bin, dir.path(), &engines, &config).await?;
    let output = script(&fleet, row.script, dir.path()).await?;
    Ok(tidy(row.script, &output))
}

/// Returns the argon2id digest of a new key. A digest on the page would be known to everyone.
fn fresh_digest(bin: &Path) -> anyhow::Result<String> {
    let mut command = Command::new(bin.join("pointsman"));
    let made = command.args(["key", "new", "--id", "slow", "--argon2"]).output()?;
    ensure!(made.status.success(), "`pointsman key new` failed: {}", String::from_utf8_lossy(&made.stderr));
    let entry = String::from_utf8(made.stdout)?;
    let digest = entry.lines().find_map(|line| line.strip_prefix("digest = "));
    Ok(digest.context("`pointsman key new` printed no digest")?.trim_matches(['"', '\'']).to_owned())
}

fn engine(role: &str, flags: &str) -> EngineSpec {
    let (flags, worker) = flags.split_once("; ").unwrap_or((flags, ""));
    let spec = EngineSpec::new("vllm", role, &format!("--jitter 0 {flags}"));
    if worker.is_empty() { spec } else { spec.worker(worker) }
}

async fn script(fleet: &Fleet, script: &str, dir: &Path) -> anyhow::Result<String> {
    let gateway = format!("http://{}", fleet.gateway.listening());
    let text = format!("ask() {{ curl -si -w '\\n' -H 'content-type: application/json' \"$@\"; }}\n{script}");
    let mut command = Command::new("bash");
    command.args(["-c", &text]).current_dir(dir);
    command.env("CHAT", format!("{gateway}/v1/chat/completions")).env("GATEWAY", gateway);
    command.env("ADMIN", format!("http://{}", fleet.admin_address()));
    command.env("PID", fleet.gateway.pid().to_string());
    let run = tokio::task::spawn_blocking(move || command.output());
    let output = tokio::time::timeout(LIMIT, run).await.context("the script takes too long")???;
    let text = String::from_utf8(output.stdout)?;
    ensure!(!text.is_empty(), "the script printed nothing: {}", String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

/// Returns the commands and their output without headers that say nothing.
fn tidy(script: &str, output: &str) -> String {
    let mut text = String::new();
    for line in script.trim().lines() {
        let _ = writeln!(text, "$ {line}");
    }
    let mut blank = true;
    for line in output.lines().map(str::trim_end) {
        let hidden = HIDDEN.iter().any(|name| line.to_ascii_lowercase().starts_with(name));
        if hidden || (line.is_empty() && blank) {
            continue;
        }
        blank = line.is_empty();
        text.push_str(line);
        text.push('\n');
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::{missing, tidy};

    #[test]
    fn headers_that_say_nothing_are_left_out() {
        let output =
            "HTTP/1.1 429 Too Many Requests\r\ndate: now\r\nretry-after: 1\r\n\r\n{\"error\":{}}\n\n\n";
        let shown = "$ ask $CHAT\nHTTP/1.1 429 Too Many Requests\nretry-after: 1\n\n{\"error\":{}}";
        assert_eq!(tidy("ask $CHAT\n", output), shown);
    }

    #[test]
    fn a_code_without_a_row_is_found() {
        let table =
            "## I. X\n| a | b | c |\n| - | - | - |\n| x | 418 | `teapot` / `deadline` |\n- I1 Errors.\n";
        assert_eq!(missing(table), ["teapot"]);
    }
}
