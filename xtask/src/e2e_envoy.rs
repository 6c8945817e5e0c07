//! `e2e-envoy`: compares a real Envoy, with two gateways as endpoint pickers, with one of the gateways in
//! gateway mode. The same clients send the same requests to both. Then policies are swapped while requests
//! come through Envoy.

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use pointsman_guest_build::GuestBuild;
use tokio::time::Instant;

use crate::{
    beside::Beside,
    fleet::{self, EngineSpec, Fleet, Process, free_port},
    load::{Arrivals, Kind, Load, Prompt, Recorder, Target},
    metrics_text::sum_with,
    poll::until,
    proc, sh,
    stats::{quantile, sorted},
    table::Checks,
};

mod program;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of requests in each measurement.
    #[arg(long, default_value_t = 4_000)]
    requests: u64,
    /// Number of concurrent requests.
    #[arg(long, default_value_t = 16)]
    clients: u32,
    /// Number of policy swaps under load.
    #[arg(long, default_value_t = 20)]
    swaps: u64,
    /// Number of tokens in an answer.
    #[arg(long, default_value_t = 8)]
    tokens: u32,
    /// Profile of the binaries.
    #[arg(long, default_value = "release")]
    profile: String,
}

/// Number of engines behind both.
const ENGINES: usize = 4;
/// Maximum time that Envoy and the picker may add to the median time to first token of lone requests.
const MAX_ADDED_TTFT: Duration = Duration::from_millis(20);
/// Maximum time until a swapped policy is in force.
const SWAP_TIME: Duration = Duration::from_secs(60);
/// Policies to install in turn. The second one is the default, so installing it first would change nothing.
const POLICIES: [&str; 2] = ["least-loaded", "kv-aware"];
const SLOT: &str = "aggregated";

/// Results of one measurement.
#[derive(Debug)]
struct Measured {
    per_second: f64,
    /// Times to the first token, sorted, milliseconds.
    ttft: Vec<f64>,
    failed: u64,
    problems: Vec<String>,
    /// CPU time for a request in each process, microseconds.
    cpu: Vec<f64>,
}

/// Runs the check.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let program = program::find()?;
    let bin = fleet::build(&args.profile)?;
    let dir = tempfile::Builder::new().prefix("pointsman-envoy-").tempdir()?;
    let spec = EngineSpec::new("vllm", SLOT, "--overhead-ms 2 --prefill-ms-per-token 0 --itl-ms 1");
    let (mut engines, mut workers) = (Vec::new(), Vec::new());
    for place in 1..=ENGINES {
        let engine = spec.start(&bin, dir.path(), place)?;
        workers.push(spec.worker_flag(place, &engine.announced));
        engines.push(engine);
    }
    let mut gateways = Vec::new();
    for name in ["a", "b"] {
        let dir = dir.path().join(name);
        std::fs::create_dir_all(&dir)?;
        let config = format!("[ext_proc]\nlisten = \"127.0.0.1:{}\"\n", free_port()?);
        gateways.push(fleet::gateway(&bin, &dir, &config, &workers).await?);
    }
    let (envoy, address) = program::start(&program, dir.path(), &gateways).await?;
    let mut checks = Checks::default();
    checks.show("Envoy", program::version(&program)?);
    compare(args, &gateways, &envoy, &address, &mut checks).await?;
    swap(args, &gateways, &address, &mut checks).await?;
    for gateway in &gateways {
        checks.none("bookings left", gateway.booked(Duration::from_secs(10)).await?);
    }
    checks.finish()
}

/// Measures gateway mode and Envoy with the same requests.
async fn compare(
    args: &Args,
    gateways: &[Fleet],
    envoy: &Process,
    address: &str,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    let first = gateways.first().context("no gateway runs")?;
    let pids: Vec<u32> = gateways.iter().map(|gateway| gateway.gateway.pid()).collect();
    let own = first.gateway.listening();
    let mut alone = Vec::new();
    for address in [own.as_str(), address] {
        // These requests warm caches up.
        measure(args, address, &[], (args.requests / 10, args.clients)).await?;
        // With one request at a time, no request waits for a processor.
        alone.push(measure(args, address, &[], (args.requests / 10, 1)).await?);
    }
    let load = (args.requests, args.clients);
    let own = measure(args, &own, pids.get(..1).unwrap_or_default(), load).await?;
    let all = [&[envoy.pid()][..], &pids].concat();
    let carried = measure(args, address, &all, load).await?;
    for (name, measured) in [("gateway mode", &own), ("through Envoy", &carried)] {
        checks.none(&format!("{name}: failed requests {}", measured.problems.join("; ")), measured.failed);
        checks.show(&format!("{name}: requests/s"), format!("{:.0}", measured.per_second));
        let ttft = [0.5, 0.99].map(|share| quantile(&measured.ttft, share));
        checks.show(&format!("{name}: TTFT p50, p99"), format!("{:.2} ms, {:.2} ms", ttft[0], ttft[1]));
        let cpu: Vec<String> = measured.cpu.iter().map(|cpu| format!("{cpu:.0}")).collect();
        let of = if measured.cpu.len() == 1 { "the gateway" } else { "Envoy, pickers" };
        checks.show(&format!("{name}: CPU of a request ({of})"), format!("{} µs", cpu.join(" + ")));
    }
    let lone: Vec<f64> = alone.iter().map(|measured| quantile(&measured.ttft, 0.5)).collect();
    checks.show(
        "one request at a time: TTFT p50, through Envoy",
        format!("{:.2} ms, {:.2} ms", lone[0], lone[1]),
    );
    let (added, limit) = (lone[1] - lone[0], MAX_ADDED_TTFT.as_secs_f64() * 1e3);
    checks.check("TTFT p50 that Envoy and the picker add to one", format!("{added:.2} ms"), added <= limit);
    for (name, gateway) in ["first", "second"].into_iter().zip(gateways) {
        let metrics = gateway.metrics().await?;
        let picked = sum_with(&metrics, "pointsman_ext_proc_picks_total", &[("result", "picked")]);
        checks.check(&format!("endpoints picked by the {name} gateway"), picked, picked > 0.0);
    }
    Ok(())
}

/// Returns clients that send requests for streams to an address.
fn load(args: &Args, address: &str, (requests, clients): (u64, u32)) -> (Load, Target) {
    let load = Load {
        arrivals: Arrivals::Clients(clients),
        kinds: vec![Kind::Stream],
        prompt: Prompt::Distinct(u64::MAX),
        tokens: (args.tokens, args.tokens),
        requests,
        ..Load::default()
    };
    (load, Target { address: address.to_owned(), authority: None, instance: 1 })
}

/// Measures the times of requests, and the CPU time of the processes `pids`.
async fn measure(args: &Args, address: &str, pids: &[u32], load: (u64, u32)) -> anyhow::Result<Measured> {
    let used: Vec<u64> = pids.iter().map(|pid| proc::cpu_nanos(*pid)).collect();
    let clients = self::load(args, address, load);
    let begun = Instant::now();
    let recorder = Arc::<Recorder>::default();
    recorder.start(clients.0, &clients.1)?.end().await?;
    let took = begun.elapsed();
    let answers = recorder.take();
    let per_request = |nanos: u64| nanos as f64 / 1e3 / load.0.max(1) as f64;
    let spent = pids.iter().zip(used).map(|(pid, before)| per_request(proc::cpu_nanos(*pid) - before));
    let ttft = answers.iter().filter_map(|answer| Some(answer.ttft?.as_secs_f64() * 1e3));
    Ok(Measured {
        per_second: load.0 as f64 / took.as_secs_f64(),
        ttft: sorted(ttft.collect()),
        failed: answers.iter().filter(|one| one.failed() || one.ttft.is_none()).count() as u64,
        problems: recorder.problems(),
        cpu: spent.collect(),
    })
}

/// Swaps policies in both gateways while requests come through Envoy.
async fn swap(args: &Args, gateways: &[Fleet], address: &str, checks: &mut Checks) -> anyhow::Result<()> {
    let mut policies = Vec::new();
    for name in POLICIES {
        policies.push(GuestBuild::new(&sh::root(), &format!("policy-{name}")).build()?);
    }
    let (load, target) = load(args, address, (u64::MAX, args.clients));
    let beside = Beside::start(gateways.first().context("no gateway runs")?, &target, load)?;
    let swapped = install(args, gateways, &policies).await?;
    let (sent, failed, problems) = beside.stop().await;
    checks.check("policies swapped under load in both gateways", swapped, swapped == args.swaps);
    checks.check("requests through Envoy meanwhile", sent, sent > args.swaps);
    checks.none(&format!("failed requests {}", problems.join("; ")), failed as u64);
    Ok(())
}

/// Installs the policies in turn. Each one must be in force in both gateways before the next one is
/// installed.
async fn install(args: &Args, gateways: &[Fleet], policies: &[Vec<u8>]) -> anyhow::Result<u64> {
    for (turn, policy) in (0..args.swaps).zip(policies.iter().cycle()) {
        let mut before = Vec::new();
        for gateway in gateways {
            before.push(generation(gateway).await?);
            gateway.drop_policy(&format!("{SLOT}.wasm"), policy)?;
        }
        for (gateway, before) in gateways.iter().zip(before) {
            let swapped = || async { Ok((generation(gateway).await? != before).then_some(())) };
            until(&format!("policy {turn} is in force"), SWAP_TIME, swapped).await?;
        }
    }
    Ok(args.swaps)
}

async fn generation(gateway: &Fleet) -> anyhow::Result<Option<u64>> {
    Ok(gateway.slot(SLOT).await?["generation"].as_u64())
}
