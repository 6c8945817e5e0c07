//! Clients that leave at random times: upstream work stops where it may, and what was committed is consumed.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rand::RngExt;
use serde_json::json;

use super::{Outcome, booked, by_reason, engines, turns};
use crate::{
    engine::{self, Engine, Pace},
    fleet, sh,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Clients.
    #[arg(long, default_value_t = 2_000)]
    clients: u64,
    /// Clients at once.
    #[arg(long, default_value_t = 40)]
    at_once: usize,
}

/// When each marked stream was seen to be left, by the engine; nanoseconds of the shared clock.
static LEFT: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn noticed(marker: u64) {
    if let Ok(mut left) = LEFT.lock() {
        left.push((marker, engine::now()));
    }
}

pub(super) fn run(args: &Args, bin: &Path) -> anyhow::Result<()> {
    let mut outcome = Outcome::default();
    stops_at_once(args, bin, &mut outcome)?;
    for dialect in ["vllm", "sglang"] {
        consumes(args, bin, dialect, &mut outcome)?;
    }
    outcome.end()
}

/// How soon the decode leg ends once its client left after the first token (E2), on engines that look for it every 2 ms.
fn stops_at_once(args: &Args, bin: &Path, outcome: &mut Outcome) -> anyhow::Result<()> {
    let pace = Pace {
        prefill: Duration::from_millis(20),
        event: Duration::from_millis(2),
        events: 2_000,
        left: Some(noticed),
        ..Pace::default()
    };
    let engine = Engine::start(pace)?;
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let workers = ["prefill", "decode"]
        .map(|role| format!("role={role},engine=vllm,url=http://{}/{role}", engine.address));
    let fleet = fleet::gateway(bin, dir.path(), Vec::new(), "", &workers)?;
    let gone: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());
    let progress = sh::progress(args.clients, "clients");
    turns(args.clients, args.at_once, |turn| {
        let stay = Duration::from_millis(rand::rng().random_range(0..250));
        if visit(&fleet.client(), Some(turn), stay, true).unwrap_or(false)
            && let Ok(mut gone) = gone.lock()
        {
            gone.push((turn, engine::now()));
        }
        progress.inc(1);
    });
    progress.finish_and_clear();
    thread::sleep(Duration::from_millis(500));
    let left = LEFT.lock().map(|left| left.clone()).unwrap_or_default();
    let gone = gone.into_inner().unwrap_or_default();
    let mut took: Vec<u64> = gone
        .iter()
        .filter_map(|(turn, at)| {
            let (_, seen) = left.iter().find(|(marker, _)| marker == turn)?;
            Some(seen.saturating_sub(*at) / 1_000)
        })
        .collect();
    took.sort_unstable();
    let at =
        |share: usize| took.get((took.len().saturating_sub(1)) * share / 100).copied().unwrap_or(u64::MAX);
    let missed = gone.len() - took.len();
    outcome.row("clients that left after the first token", gone.len(), !gone.is_empty());
    outcome.row("of these, decode legs that were not ended", missed, missed == 0);
    let shown = format!("{:.1} / {:.1} ms", at(50) as f64 / 1e3, at(99) as f64 / 1e3);
    outcome.row("client left -> engine sees it, p50 / p99 (limit 100 ms)", shown, at(99) < 100_000);
    let left = booked(&fleet, Duration::from_secs(5))?;
    outcome.row("bookings left", left, left == 0);
    Ok(())
}

/// What was committed is consumed, on engines that count handoffs strictly.
fn consumes(args: &Args, bin: &Path, dialect: &str, outcome: &mut Outcome) -> anyhow::Result<()> {
    let dir = tempfile::Builder::new().prefix("pointsman-storm-").tempdir()?;
    let (mut processes, mut workers) = (Vec::new(), Vec::new());
    for role in ["prefill", "decode"] {
        for place in 0..2 {
            let flags = ["--engine", dialect, "--role", role, "--bootstrap-port", "0", "--lease-s", "5"];
            let times = ["--overhead-ms", "20", "--prefill-ms-per-token", "0.05", "--itl-ms", "5"];
            let flags: Vec<&str> = flags.into_iter().chain(times).collect();
            let process = fleet::engine(bin, dir.path(), &format!("{role}-{place}"), &flags)?;
            let mut worker = format!("role={role},engine={dialect},url=http://{}", process.listening());
            if dialect == "sglang" && role == "prefill" {
                worker.push_str(&format!(",bootstrap_port={}", process.told["bootstrap_port"]));
            }
            workers.push(worker);
            processes.push(process);
        }
    }
    let fleet = fleet::gateway(bin, dir.path(), processes, "", &workers)?;
    let served = AtomicU64::new(0);
    let progress = sh::progress(args.clients, dialect);
    turns(args.clients, args.at_once, |_| {
        let stay = Duration::from_millis(rand::rng().random_range(0..250));
        let stream = rand::rng().random_bool(0.7);
        let answered = visit(&fleet.client(), None, stay, stream).unwrap_or(false);
        served.fetch_add(u64::from(answered), Ordering::Relaxed);
        progress.inc(1);
    });
    progress.finish_and_clear();
    let left = booked(&fleet, Duration::from_secs(10))?;
    thread::sleep(Duration::from_secs(6));
    let handoffs = by_reason(&fleet, "pointsman_handoffs_total")?;
    let complete = handoffs.get("complete").copied().unwrap_or(0);
    outcome.row(
        &format!("{dialect}: clients, of which saw a token"),
        format!("{}, {}", args.clients, served.into_inner()),
        true,
    );
    if dialect == "vllm" {
        // Both ends of a pull count it.
        let pulled = engines(&fleet, "/handoffs/pulled") / 2;
        outcome.row("vllm: handoffs committed, pulled", format!("{complete}, {pulled}"), complete == pulled);
    }
    let aborted = engines(&fleet, "/aborted");
    outcome.row(&format!("{dialect}: sequences aborted"), aborted, true);
    for (what, pointer) in [
        ("handoffs stranded", "/stranded"),
        ("blocks pinned", "/pinned_blocks"),
        ("sequences running", "/running"),
        ("sequences waiting", "/waiting"),
        ("handoffs used twice", "/handoffs/reused"),
        ("rooms used twice", "/duplicate_rooms"),
    ] {
        let count = engines(&fleet, pointer);
        outcome.row(&format!("{dialect}: {what}"), count, count == 0);
    }
    outcome.row(&format!("{dialect}: bookings left"), left, left == 0);
    Ok(())
}

/// A client that reads for `stay` and then leaves; whether it saw a token.
fn visit(address: &str, marker: Option<u64>, stay: Duration, stream: bool) -> anyhow::Result<bool> {
    let body = json!({
        "model": "tiny", "stream": stream, "max_tokens": 400, "ignore_eos": true, "marker": marker.unwrap_or(0),
        "messages": [{ "role": "user", "content": format!("{} leaves ", rand::random::<u32>()).repeat(12) }],
    })
    .to_string();
    let mut out = TcpStream::connect(address)?;
    let leaves = Instant::now() + stay;
    write!(
        out,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    out.set_read_timeout(Some(Duration::from_millis(2)))?;
    let mut reader = BufReader::new(out);
    let (mut token, mut line) = (false, Vec::new());
    while Instant::now() < leaves {
        // A read that timed out keeps what it has in `line`.
        match reader.read_until(b'\n', &mut line) {
            Ok(0) => break,
            Ok(_) => {
                token |=
                    line.windows(10).any(|window| window == b"\"content\":") && !line.ends_with(b"\"\"}\n");
                line.clear();
            }
            Err(_) => {}
        }
    }
    Ok(token)
}
