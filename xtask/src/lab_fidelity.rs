//! `lab-fidelity`: runs the same trace through a gateway with simulated engines in real time, and through the
//! lab.
//!
//! The lab repeats the gateway's random draws: both choose at random between equal workers, and the gateway's
//! receipts contain the seeds. Both use the same engine model, so the comparison covers everything else:
//! HTTP, KV events over ZMQ, scraped load figures, and the order of events. With `--vllm`, see `real`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use self::slice::Request;
use crate::{
    client::Client,
    fleet::{self, EngineSpec},
    load::at_times,
    sh,
    stats::{quantile, sorted},
    table::Checks,
};

mod real;
mod slice;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mooncake trace with blocks of 512 tokens.
    #[arg(long)]
    trace: PathBuf,
    /// Number of requests from the start of the trace.
    #[arg(long, default_value_t = 150)]
    requests: usize,
    /// Factor by which requests follow each other faster than in the trace. With more concurrent requests,
    /// one ends more often within milliseconds of a decision, and then the loads differ.
    #[arg(long, default_value_t = 0.25)]
    speed: f64,
    /// Number of engines; with --pairs, of each role.
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Use prefill and decode engines instead of aggregated ones.
    #[arg(long)]
    pairs: bool,
    /// A native mode or a built-in policy, used by both the gateway and the lab.
    #[arg(long, default_value = "kv-aware")]
    arm: String,
    /// Use two real vLLM engines on CPU, from this virtual environment, which is created if it does not
    /// exist: round-robin, kv-aware and the default in turns, prompts and answers a 32nd as long.
    #[arg(long, value_name = "VENV", conflicts_with_all = ["pairs", "engines", "arm"])]
    vllm: Option<PathBuf>,
    /// With --vllm: number of turns.
    #[arg(long, default_value_t = 3, requires = "vllm")]
    rounds: u32,
    /// Directory to keep the slice, the draws, the receipts and the lab's outcomes in.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// Minimum share of equal decisions.
const EQUAL: f64 = 0.95;
/// Largest relative difference of a time.
const LIMIT: f64 = 0.10;
/// Maximum time for one answer.
const ANSWER: Duration = Duration::from_secs(300);

const NATIVE: [&str; 5] = ["kv", "round-robin", "random", "power-of-two", "least-loaded"];

/// Time of the transfer of a token's KV, microseconds. The lab divides bytes by a bandwidth instead.
const TRANSFER_US_PER_TOKEN: f64 = 5.0;

/// One request as its client saw it.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    ttft_ms: f64,
    cached: u64,
    /// Workers that computed the prompt and that generated the tokens.
    workers: [u64; 2],
}

impl Args {
    fn roles(&self) -> &'static [&'static str] {
        if self.pairs { &["prefill", "decode"] } else { &["aggregated"] }
    }
}

/// Prints the figures of both; returns an error when a difference exceeds its limit.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    if let Some(venv) = &args.vllm {
        return real::run(args, venv).await;
    }
    let bin = fleet::build_programs("release", &[fleet::GATEWAY, fleet::ENGINE, fleet::LAB])?;
    let requests = slice::read(&args.trace, args.requests, args.speed)?;
    let temporary = tempfile::Builder::new().prefix("pointsman-fidelity-").tempdir()?;
    let dir = args.keep.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(dir)?;
    let trace = dir.join("slice.jsonl");
    std::fs::write(&trace, slice::write(&requests))?;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let (gateway, draws) = gateway(args, &bin, dir, &requests).await?;
    std::fs::write(dir.join("draws.jsonl"), draws)?;
    let lab = lab(args, &bin, dir, &trace)?;
    let after = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    sh::status(&format!("load average before and after: {} / {}", load.trim(), after.trim()));
    report(args, &requests, &gateway, &lab)
}

fn report(args: &Args, requests: &[Request], gateway: &[Seen], lab: &[Seen]) -> anyhow::Result<()> {
    ensure!(gateway.len() == lab.len(), "the lab ran {} of {} requests", lab.len(), gateway.len());
    let mut checks = Checks::default();
    for (place, role) in args.roles().iter().enumerate() {
        let equal = gateway.iter().zip(lab).filter(|(one, other)| one.workers[place] == other.workers[place]);
        let share = ratio(equal.count() as u64, gateway.len() as u64);
        let text = format!("{:.1} % of {}", share * 100.0, gateway.len());
        checks.check(&format!("equal decisions, {role}"), text, share >= EQUAL);
    }
    for (name, place) in [("TTFT p50", 0.5), ("TTFT p90", 0.9)] {
        let of = |all: &[Seen]| quantile(&sorted(all.iter().map(|seen| seen.ttft_ms).collect()), place);
        let (real, virtual_) = (of(gateway), of(lab));
        let text = format!("{real:.1} / {virtual_:.1} ms");
        checks.check(&format!("{name}, gateway / lab"), text, (virtual_ / real - 1.0).abs() <= LIMIT);
    }
    let prompt: u64 = requests.iter().map(|request| request.input_length).sum();
    let hits = |all: &[Seen]| ratio(all.iter().map(|seen| seen.cached).sum(), prompt);
    let (real, virtual_) = (hits(gateway), hits(lab));
    checks.show("hit rate, gateway / lab", format!("{real:.4} / {virtual_:.4}"));
    checks.finish()
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Sends the requests to a gateway. Returns the results of each client, and the draws of the decisions.
async fn gateway(
    args: &Args,
    bin: &Path,
    dir: &Path,
    requests: &[Request],
) -> anyhow::Result<(Vec<Seen>, String)> {
    let rank = if NATIVE.contains(&args.arm.as_str()) { "native" } else { "builtin" };
    let mut config =
        "[routing]\nblock_size = 512\n[probe]\nload_interval = \"1s\"\n[decisions]\nkeep = 100000\n"
            .to_owned();
    for role in args.roles() {
        config.push_str(&format!("[policies.slots.{role}]\n{rank} = \"{}\"\n", args.arm));
    }
    let flags = format!(
        "--step-time dynamo --blocks 2048 --block-size 512 --max-num-seqs 256 --max-batched-tokens 8192 --jitter 0 \
         --max-model-len 1048576 --kv-events-port 0 --kv-transfer-us-per-token {TRANSFER_US_PER_TOKEN}"
    );
    let of_role = |role: &&str| vec![EngineSpec::new("vllm", role, &flags); args.engines];
    let engines: Vec<EngineSpec> = args.roles().iter().flat_map(of_role).collect();
    let fleet = fleet::start(bin, dir, &engines, &config).await?;
    fleet.kv_feeds(engines.len(), Duration::from_secs(10)).await?;
    let one = |number: usize| {
        let client = &fleet.client;
        async move {
            let request = &requests[number];
            send(client, number, &request.prompt(), request.output_length).await
        }
    };
    let times = requests.iter().map(|request| Duration::from_millis(200) + request.at());
    let answers = at_times(times, one).await.into_iter().enumerate();
    let seen = answers.map(|(number, answer)| answer.with_context(|| format!("request {number}")));
    let mut seen = seen.collect::<anyhow::Result<Vec<_>>>()?;
    let export = fleet.admin.get("/decisions/export").await?;
    std::fs::write(dir.join("receipts.jsonl"), &export)?;
    let draws = take_decisions(&export, &mut seen)?;
    Ok((seen, draws))
}

/// Sends one request and reads its whole stream.
async fn send(client: &Client, number: usize, prompt: &[u32], output: u64) -> anyhow::Result<Seen> {
    let answer = timeout(ANSWER, stream(client, number, prompt, output)).await;
    answer.unwrap_or_else(|_| bail!("no whole answer within {ANSWER:?}"))
}

async fn stream(client: &Client, number: usize, prompt: &[u32], output: u64) -> anyhow::Result<Seen> {
    let body = json!({
        "model": "tiny", "prompt": prompt, "max_tokens": output.max(1),
        "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true },
    })
    .to_string();
    let id = format!("fidelity-{number}");
    let started = Instant::now();
    let mut stream = client.stream("/v1/completions", &[("x-request-id", &id)], body).await?;
    ensure!(stream.status == 200, "the gateway answered {}", stream.status);
    let (mut seen, mut first, mut done) = (Seen::default(), None, false);
    while let Some(event) = stream.next().await? {
        first.get_or_insert_with(|| started.elapsed());
        done |= event.contains("[DONE]");
        if event.contains("\"prompt_tokens_details\"") {
            let usage: Value = serde_json::from_str(event.trim_start_matches("data: "))?;
            let cached = &usage["usage"]["prompt_tokens_details"]["cached_tokens"];
            seen.cached = cached.as_u64().context("the usage has no cached tokens")?;
        }
    }
    ensure!(done, "the stream ended without [DONE]");
    seen.ttft_ms = first.context("the stream had no event")?.as_secs_f64() * 1e3;
    Ok(seen)
}

/// Adds the chosen workers from the receipts to `seen`. Returns the draws in the lab's format.
fn take_decisions(export: &str, seen: &mut [Seen]) -> anyhow::Result<String> {
    let mut draws = String::new();
    let mut found = 0;
    for line in export.lines() {
        let receipt: Value = serde_json::from_str(line)?;
        let id = receipt["request_id"].as_str().and_then(|id| id.strip_prefix("fidelity-"));
        let Some(number) = id.and_then(|id| id.parse::<usize>().ok()) else { continue };
        // A decode override chooses no worker.
        if receipt["slot"] == "decode-override" {
            continue;
        }
        let seen = seen.get_mut(number).context("a receipt of no request")?;
        let worker = receipt["choice"]["worker"].as_u64().context("a receipt without a choice")?;
        // For a leg that was retried, the last worker counts.
        seen.workers[usize::from(receipt["leg"] == "decode")] = worker;
        let draw =
            json!({ "request": number, "leg": receipt["leg"], "seed": receipt["call"]["seed"] }).to_string();
        draws.push_str(&draw);
        draws.push('\n');
        found += 1;
    }
    let decided = seen.iter().all(|seen| seen.workers[0] > 0);
    ensure!(decided, "the gateway kept {found} receipts, which are not all of {} requests", seen.len());
    Ok(draws)
}

fn lab(args: &Args, bin: &Path, dir: &Path, trace: &Path) -> anyhow::Result<Vec<Seen>> {
    let fleet = dir.join("fleet.toml");
    let mut text = "block_tokens = 512\nscrape_interval_ms = 1000\n".to_owned();
    for role in args.roles() {
        text.push_str(&format!(
            "[[engines]]\nrole = \"{role}\"\ncount = {}\nblocks = 2048\nmax_num_seqs = 256\n\
             max_batched_tokens = 8192\nstep_time = \"dynamo\"\n",
            args.engines
        ));
    }
    // 1,000 bytes in N microseconds are 1 / N gigabytes a second.
    text.push_str(&format!(
        "[links]\nbytes_per_token = 1000\ngigabytes_per_second = {}\nlatency_ms = 0\n",
        1.0 / TRANSFER_US_PER_TOKEN
    ));
    std::fs::write(&fleet, text)?;
    let output = dir.join("lab.jsonl");
    let mut lab = Command::new(bin.join(fleet::LAB.name));
    lab.args(["trace", "run"]).arg(trace).args(["--arm", &args.arm]).arg("--fleet").arg(&fleet);
    lab.arg("--draws").arg(dir.join("draws.jsonl")).arg("--output").arg(&output);
    sh::run(&mut lab)?;
    outcomes(&output)
}

/// Reads what the lab wrote of each request.
fn outcomes(file: &Path) -> anyhow::Result<Vec<Seen>> {
    let text = std::fs::read_to_string(file)?;
    let seen = text.lines().map(|line| {
        let line: Value = serde_json::from_str(line)?;
        ensure!(line["ended"] == "complete", "the lab did not complete a request: {line}");
        Ok(Seen {
            ttft_ms: line["ttft_ms"].as_f64().unwrap_or_default(),
            cached: line["cached_tokens"].as_u64().unwrap_or_default(),
            // The gateway's ids count from 1.
            workers: ["prefill_worker", "decode_worker"].map(|leg| line[leg].as_u64().map_or(0, |at| at + 1)),
        })
    });
    seen.collect()
}
