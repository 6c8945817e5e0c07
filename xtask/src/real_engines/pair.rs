//! `e2e-vllm`, `e2e-mooncake`, `e2e-sglang`: run a real prefill and a real decode engine on CPU behind the
//! gateway: vLLM with NIXL, vLLM with Mooncake over TCP, and SGLang with Mooncake over TCP.
//!
//! Greedy output through both legs must equal that of one plain engine, token by token; with SGLang also for
//! lists of prompts. The engines' own counters must show that KV was transferred. Engines must not hold
//! requests or blocks of disconnected clients for longer than the lease. When a decode engine is killed, its
//! stream must end with one valid error event. With vLLM and NIXL, streams must also continue on another
//! worker when their engine is killed or drained. SGLang pairs hang on several choices, so the gateway must
//! refuse them.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::ensure;
use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, timeout};

use super::{
    PATIENT, RealEngine, checks,
    continuations::{self, Form, Leaves},
    engines::{Installed, Kind, Part},
    upgrade,
};
use crate::{
    client::{CHAT, Client},
    fleet::{self, Fleet},
    metrics_text::samples,
    setup, sh,
    table::Checks,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Virtual environment with the engine; created if it does not exist [default: target/venv-vllm or
    /// target/venv-sglang].
    #[arg(long)]
    venv: Option<PathBuf>,
    /// Number of prompts to compare.
    #[arg(long, default_value_t = 30)]
    prompts: usize,
    /// Only move a fleet from a pair of this version of vLLM to one of the newest that is tested, under load.
    /// Only of `e2e-vllm`.
    #[arg(long, value_name = "VERSION", conflicts_with = "prompts")]
    upgrade_from: Option<String>,
}

/// Maximum time until the engines hold nothing of clients that disconnected: the lease after which vLLM frees
/// blocks that were not pulled (30 s), and some seconds. SGLang looks for such clients every few seconds.
const SETTLES: Duration = Duration::from_secs(45);
/// Maximum time until a request that would hang is refused.
const REFUSED: Duration = Duration::from_secs(5);
/// Gauges that show the requests and blocks of vLLM.
const HELD: [&str; 3] =
    ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"];
/// Number of clients that disconnect early.
const LEAVERS: usize = 30;
/// Streams that run when a plain engine of `e2e-vllm` is killed, in each form of continuation.
const STREAMS: usize = 25;
/// Number of blocks of an engine.
const BLOCKS: u32 = 512;

/// One run of a command.
struct Run {
    kind: Kind,
    bin: PathBuf,
    /// Logs, configurations and policies of the run.
    dir: TempDir,
    installed: Installed,
    prompts: Vec<String>,
    checks: Checks,
}

/// Runs every check and prints the table.
pub(crate) async fn run(args: &Args, kind: Kind) -> anyhow::Result<()> {
    ensure!(args.prompts > 0, "--prompts 0 compares nothing: pass at least 1");
    setup::run()?;
    let mut run = Run {
        kind,
        bin: fleet::build("release")?,
        dir: tempfile::Builder::new().prefix("pointsman-engines-").tempdir()?,
        installed: Installed::at(kind, args.venv.as_deref())?,
        prompts: (0..args.prompts).map(checks::prompt).collect(),
        checks: Checks::default(),
    };
    if let Some(version) = &args.upgrade_from {
        return run.upgraded_from(version).await;
    }
    let (plain, expected) = run.plain_engine().await?;
    let streams = if kind == Kind::VllmNixl { STREAMS } else { 0 };
    let undisturbed = continuations::undisturbed(&plain, streams).await?;
    if streams > 0 {
        run.continued(plain, &undisturbed).await?;
    } else {
        drop(plain);
    }
    sh::status("starting a prefill and a decode engine (about 3 min)");
    let mut prefill = run.start("prefill", Part::Prefill)?;
    let mut decode = run.start("decode", Part::Decode)?;
    prefill.ready().await?;
    decode.ready().await?;
    let workers = [run.worker(&prefill, "prefill"), run.worker(&decode, "decode")];
    let fleet = run.gateway(PATIENT, &workers).await?;
    let is_sglang = kind == Kind::Sglang;
    if streams > 0 {
        run.continued_pairs(&workers, &undisturbed).await?;
    }
    let Run { prompts, mut checks, .. } = run;
    checks::compare(&fleet.client, &prompts, &expected, &mut checks).await?;
    if is_sglang {
        checks::batches(&fleet.client, &prompts, &expected, &mut checks).await?;
        several_choices(&fleet.client, &mut checks).await?;
    }
    transferred(kind, &decode, &mut checks).await?;
    checks::leave_early(&fleet.client, LEAVERS, &prompts, is_sglang).await?;
    let held = held(kind, &[&prefill, &decode]).await?;
    let what = format!("held after {LEAVERS} clients disconnected (leases that ended)");
    checks.check(&what, format!("{held} ({})", expired(kind, &prefill).await?), held == 0.0);
    checks.none("bookings left in the gateway", fleet.booked(Duration::from_secs(5)).await?);
    checks::kill_mid_stream(&fleet.client, &mut decode, &mut checks).await?;
    checks.finish()
}

impl Run {
    fn start(&self, name: &str, part: Part) -> anyhow::Result<RealEngine> {
        self.installed.start(name, part, self.dir.path(), BLOCKS)
    }

    /// Returns the `--worker` flag of an engine. The gateway finds the role of SGLang by itself.
    fn worker(&self, engine: &RealEngine, role: &str) -> String {
        if self.kind == Kind::Sglang { engine.worker.clone() } else { engine.as_worker(role) }
    }

    async fn gateway(&self, config: &str, workers: &[String]) -> anyhow::Result<Fleet> {
        fleet::gateway(&self.bin, self.dir.path(), config, workers).await
    }

    /// Returns one plain engine and its answers. Also tests this engine as an aggregated worker of the
    /// gateway.
    async fn plain_engine(&mut self) -> anyhow::Result<(RealEngine, Vec<Vec<u64>>)> {
        sh::status("starting one plain engine (about 90 s)");
        let mut plain = self.start("plain", Part::Plain)?;
        plain.ready().await?;
        let expected = checks::answers(&plain.client(), &self.prompts).await?;
        let fleet = self.gateway(PATIENT, &[self.worker(&plain, "aggregated")]).await?;
        let body = json!({
            "model": "tiny", "stream": true, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
            "stream_options": { "include_usage": true },
            "messages": [{ "role": "user", "content": checks::prompt(0) }],
        });
        let streamed = fleet.client.stream_chat(&[], body.to_string()).await;
        let shown = streamed.problem.unwrap_or_else(|| format!("{} events", streamed.events));
        self.checks.check("one plain engine through the gateway, streamed", shown, streamed.complete);
        if self.kind == Kind::Sglang {
            let metrics = fleet.metrics().await?;
            let feeds = samples(&metrics, "pointsman_kv_feed_live");
            let live = feeds.iter().filter(|one| one.value == 1.0).count();
            self.checks.check("feeds of KV events that configured themselves", live, live == 1);
        }
        Ok((plain, expected))
    }

    /// Kills one of two plain engines under streams, twice in each form of continuation.
    async fn continued(&mut self, first: RealEngine, expected: &[String]) -> anyhow::Result<()> {
        let mut engines = vec![first];
        for (turn, form) in [Form::Exact, Form::Text, Form::Exact, Form::Text].into_iter().enumerate() {
            sh::status(&format!("starting a second plain engine, to be killed (turn {} of 4)", turn + 1));
            let mut second = self.start(&format!("plain-{turn}"), Part::Plain)?;
            second.ready().await?;
            engines.push(second);
            let workers: Vec<String> =
                engines.iter().map(|engine| self.worker(engine, "aggregated")).collect();
            let fleet = self.gateway(&form.config(), &workers).await?;
            let mut dying = engines.remove(0);
            let (how, checks) = (form.name(), &mut self.checks);
            let leaves = Leaves::Killed(&mut dying);
            continuations::read_through(&fleet, form, how, leaves, expected, checks).await?;
        }
        Ok(())
    }

    /// Moves a fleet from a pair of this version to a pair of the installed one.
    async fn upgraded_from(mut self, version: &str) -> anyhow::Result<()> {
        ensure!(self.kind == Kind::VllmNixl, "--upgrade-from is an option of e2e-vllm only");
        let venv = format!("target/venv-vllm-{version}");
        let installed = Installed::of_version(self.kind, Path::new(&venv), Some(version))?;
        sh::status(&format!("starting a pair of {version} (about 3 min)"));
        let pair = async |installed: &Installed, version: &str| {
            let start = |name: &str, part| {
                installed.start(&format!("{name}-{version}"), part, self.dir.path(), BLOCKS)
            };
            let mut pair = [start("prefill", Part::Prefill)?, start("decode", Part::Decode)?];
            for engine in &mut pair {
                engine.ready().await?;
            }
            anyhow::Ok(pair)
        };
        let mut old = pair(&installed, version).await?;
        let roles = ["prefill", "decode"].into_iter().zip(upgrade::OLD);
        let workers = old.iter().zip(roles);
        let workers: Vec<String> =
            workers.map(|(engine, (role, id))| format!("{},id={id}", engine.as_worker(role))).collect();
        let fleet = self.gateway(PATIENT, &workers).await?;
        let start_new = async || pair(&self.installed, "new").await;
        upgrade::run(&fleet, &mut old, start_new, &mut self.checks).await?;
        self.checks.finish()
    }

    /// Drains a second decode engine under the streams of pairs, and then kills it.
    async fn continued_pairs(&mut self, workers: &[String], expected: &[String]) -> anyhow::Result<()> {
        sh::status("starting a second decode engine, to be killed");
        let mut dying = self.start("decode-1", Part::Decode)?;
        dying.ready().await?;
        let workers = [workers, &[self.worker(&dying, "decode")]].concat();
        for killed in [false, true] {
            let fleet = self.gateway(&Form::Exact.config(), &workers).await?;
            let (how, leaves) = match killed {
                false => ("pairs, drained", Leaves::Drained(&dying)),
                true => ("pairs, killed", Leaves::Killed(&mut dying)),
            };
            let checks = &mut self.checks;
            continuations::read_through(&fleet, Form::Exact, how, leaves, expected, checks).await?;
        }
        Ok(())
    }
}

async fn transferred(kind: Kind, decode: &RealEngine, checks: &mut Checks) -> anyhow::Result<()> {
    if kind == Kind::Sglang {
        let moved = decode.metric("sglang:num_requests_total", "").await?;
        checks.check("requests that the decode engine finished", moved, moved > 0.0);
        return Ok(());
    }
    // With Mooncake, the sending engine counts.
    if kind == Kind::VllmNixl {
        let bytes = decode.metric("vllm:nixl_bytes_transferred_sum", "").await?;
        checks.check("bytes of KV that the decode engine pulled", format!("{bytes:.0}"), bytes > 0.0);
    }
    let by_source = "vllm:prompt_tokens_by_source_total";
    let external = decode.metric(by_source, "external_kv_transfer").await?;
    let computed = decode.metric(by_source, "local_compute").await?;
    let shown = format!("{external:.0} (computed {computed:.0})");
    checks.check("prompt tokens from the prefill engine", shown, external > computed);
    Ok(())
}

/// Checks that the gateway refuses several choices before it sends anything.
async fn several_choices(client: &Client, checks: &mut Checks) -> anyhow::Result<()> {
    let body = json!({ "model": "tiny", "n": 2, "messages": [{ "role": "user", "content": "hello" }] });
    let asked = client.send(Method::POST, CHAT, &[], Bytes::from(body.to_string()));
    let status = match timeout(REFUSED, asked).await {
        Ok(answer) => answer?.status().to_string(),
        Err(_) => format!("no answer within {REFUSED:?}"),
    };
    checks.check("two choices", &status, status == StatusCode::BAD_REQUEST.to_string());
    Ok(())
}

/// Returns what the engines hold, once it is nothing or a time limit has passed: requests of SGLang in any
/// queue, requests and blocks of vLLM.
async fn held(kind: Kind, engines: &[&RealEngine]) -> anyhow::Result<f64> {
    let deadline = Instant::now() + SETTLES;
    loop {
        let mut held = 0.0;
        for engine in engines {
            if kind == Kind::Sglang {
                let loads = engine.client().json("/v1/loads").await?;
                held += loads["loads"].as_array().into_iter().flatten().map(requests).sum::<u64>() as f64;
                continue;
            }
            for gauge in HELD {
                held += engine.metric(gauge, "").await?;
            }
        }
        if held == 0.0 || Instant::now() > deadline {
            return Ok(held);
        }
        sleep(Duration::from_millis(500)).await;
    }
}

fn requests(load: &Value) -> u64 {
    let queues = load["disaggregation"].as_object().into_iter().flatten();
    let queues = queues.filter(|(name, _)| name.ends_with("_reqs")).map(|(_, count)| count);
    let counts = [&load["num_running_reqs"], &load["num_waiting_reqs"]].into_iter().chain(queues);
    counts.filter_map(Value::as_u64).sum()
}

/// Returns the number of leases that ended before their blocks were pulled; SGLang has none.
async fn expired(kind: Kind, prefill: &RealEngine) -> anyhow::Result<f64> {
    match kind {
        Kind::VllmNixl => prefill.metric("vllm:nixl_num_kv_expired_reqs_total", "").await,
        Kind::VllmMooncake => prefill.metric("vllm:mooncake_num_kv_expired_reqs_total", "").await,
        Kind::Sglang => Ok(0.0),
    }
}
