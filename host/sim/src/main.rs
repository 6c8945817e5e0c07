//! `pointsman-sim`: one engine as a process. Prints `{"listening":"HOST:PORT"}` when it serves.

use std::{io::Write as _, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use pointsman_sim::{Dialect, Fault, Role, Sim, SimConfig};
use tokio::signal::unix::{SignalKind, signal};

/// An engine model that speaks the HTTP of vLLM, SGLang or a plain OpenAI server.
///
/// Times are those of the modelled engine, defaults are like an 8B model on an H100; `--speedup` makes its clock faster
/// than the wall's. Ends on SIGTERM or SIGINT.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// The HTTP it speaks.
    #[arg(long, value_enum, default_value = "vllm")]
    engine: EngineArg,
    /// What it serves.
    #[arg(long, value_enum, default_value = "aggregated")]
    role: RoleArg,
    /// Address to listen on; port 0 is any.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Host that handoffs tell other engines [default: the listening address].
    #[arg(long)]
    advertise_host: Option<String>,
    /// Name of its model.
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Longest prompt plus answer, tokens.
    #[arg(long, default_value_t = 131_072)]
    max_model_len: u32,
    /// SGLang: port of a prefill's bootstrap server (0 is any), or the port a decode assumes when a request has none.
    #[arg(long, default_value_t = SimConfig::DEFAULT_BOOTSTRAP_PORT)]
    bootstrap_port: u16,
    /// vLLM: port of a prefill's side channel; 0 is any.
    #[arg(long, default_value_t = 0)]
    side_port: u16,
    /// Data-parallel ranks it claims to have.
    #[arg(long, default_value_t = 1)]
    dp_size: u32,
    /// Fixed part of a prefill, milliseconds.
    #[arg(long, default_value_t = 30.0)]
    overhead_ms: f64,
    /// Prefill of one token that is not cached, milliseconds.
    #[arg(long, default_value_t = 0.2)]
    prefill_ms_per_token: f64,
    /// Inter-token latency of a sequence alone, milliseconds.
    #[arg(long, default_value_t = 12.0)]
    itl_ms: f64,
    /// KV transfer of one prompt token, microseconds.
    #[arg(long, default_value_t = 5.0)]
    kv_transfer_us_per_token: f64,
    /// How much slower a full batch is than a sequence alone.
    #[arg(long, default_value_t = 2.0)]
    load_factor: f64,
    /// Share by which a decode step is slower while a prompt is computed beside it.
    #[arg(long, default_value_t = 0.0)]
    interference: f64,
    /// Standard deviation of all times, as a share; draws are clamped to 0.7.
    #[arg(long, default_value_t = 0.1)]
    jitter: f64,
    /// Seed of jitter and of faults with a share.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Sequences admitted at once.
    #[arg(long, default_value_t = 256)]
    max_num_seqs: u32,
    /// Sequences that may wait; one more is refused with 503.
    #[arg(long, default_value_t = 1024)]
    max_waiting: u32,
    /// KV blocks.
    #[arg(long, default_value_t = 28_000)]
    blocks: u32,
    /// Tokens in a block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// How long pinned blocks wait to be pulled, seconds.
    #[arg(long, default_value_t = 30.0)]
    lease_s: f64,
    /// How long an SGLang leg waits for the other one, seconds.
    #[arg(long, default_value_t = 300.0)]
    room_wait_s: f64,
    /// How many times faster than the wall the engine's clock runs.
    #[arg(long, default_value_t = 1.0)]
    speedup: f64,
    /// Tokens after which the model ends by itself, unless `ignore_eos`.
    #[arg(long, default_value_t = 256)]
    natural_len: u32,
    /// A decode with incomplete parameters is refused instead of killing the engine.
    #[arg(long)]
    tolerant: bool,
    /// Keep this many of the last requests for `GET /sim/requests`, and of disconnects for `GET /sim/disconnects`.
    #[arg(long, default_value_t = 0)]
    record: usize,
    /// Add the time of its write to every event as `"t"`, nanoseconds of the monotonic clock, and write each on its own.
    #[arg(long)]
    stamp: bool,
    /// Serve every endpoint below any first path segment too, so that one engine can stand for many workers.
    #[arg(long)]
    any_prefix: bool,
    /// A fault in force from the start, as JSON, e.g. '{"kind":"status","status":503,"share":0.1,"leg":"prefill"}';
    /// may be given again. Kinds: refuse, status, hang-before-headers, hang-after-headers, stall, cut, garbage,
    /// wrong-content-type, slow-health, first-token-eos, partial-params, transfer-fail.
    #[arg(long = "fault", value_parser = parse_fault)]
    faults: Vec<Fault>,
    /// Worker threads; 0 is one for each core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum EngineArg {
    Vllm,
    Sglang,
    Openai,
}

#[derive(Clone, Copy, ValueEnum)]
enum RoleArg {
    Prefill,
    Decode,
    Aggregated,
}

/// How long requests may go on after a signal.
const GRACE: Duration = Duration::from_secs(2);

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .init();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if args.threads > 0 {
        runtime.worker_threads(args.threads);
    }
    runtime.enable_all().build().context("no runtime")?.block_on(run(args))
}

async fn run(args: Args) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("no SIGTERM handler")?;
    let mut int = signal(SignalKind::interrupt()).context("no SIGINT handler")?;
    let sim = Sim::start(config(args)?).await?;
    let line = serde_json::json!({"listening": sim.addr(), "bootstrap_port": sim.bootstrap_port()});
    // One line, flushed: a parent reads it to find the port.
    writeln!(std::io::stdout(), "{line}").context("stdout is closed")?;
    std::io::stdout().flush()?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    sim.shutdown(GRACE).await;
    Ok(())
}

fn config(args: Args) -> anyhow::Result<SimConfig> {
    let span = |name: &str, value: f64, unit: f64| {
        Duration::try_from_secs_f64(value * unit)
            .with_context(|| format!("--{name} `{value}` is no duration"))
    };
    Ok(SimConfig {
        dialect: match args.engine {
            EngineArg::Vllm => Dialect::Vllm,
            EngineArg::Sglang => Dialect::Sglang,
            EngineArg::Openai => Dialect::Openai,
        },
        role: match args.role {
            RoleArg::Prefill => Role::Prefill,
            RoleArg::Decode => Role::Decode,
            RoleArg::Aggregated => Role::Aggregated,
        },
        listen: args.listen,
        advertise_host: args.advertise_host,
        model: args.model,
        max_model_len: args.max_model_len,
        bootstrap_port: args.bootstrap_port,
        side_port: args.side_port,
        dp_size: args.dp_size,
        overhead: span("overhead-ms", args.overhead_ms, 1e-3)?,
        prefill_per_token: span("prefill-ms-per-token", args.prefill_ms_per_token, 1e-3)?,
        itl: span("itl-ms", args.itl_ms, 1e-3)?,
        transfer_per_token: span("kv-transfer-us-per-token", args.kv_transfer_us_per_token, 1e-6)?,
        load_factor: args.load_factor,
        interference: args.interference,
        jitter: args.jitter,
        seed: args.seed,
        max_num_seqs: args.max_num_seqs,
        max_waiting: args.max_waiting,
        blocks: args.blocks,
        block_size: args.block_size,
        lease: span("lease-s", args.lease_s, 1.0)?,
        room_wait: span("room-wait-s", args.room_wait_s, 1.0)?,
        speedup: args.speedup,
        natural_len: args.natural_len,
        tolerant: args.tolerant,
        record: args.record,
        stamp: args.stamp,
        any_prefix: args.any_prefix,
        faults: args.faults,
    })
}

fn parse_fault(json: &str) -> Result<Fault, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}
