//! The command that runs one engine as a process: `pointsman-sim` and `pointsman sim`.

use std::{io::Write as _, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use crate::{Dialect, Fault, Role, Sim, SimConfig, core::StepTime};

/// Arguments of the command. Durations are in engine time. The defaults model an 8B model on an H100 GPU.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// HTTP dialect.
    #[arg(long, value_enum, default_value = "vllm")]
    engine: Dialect,
    /// Kind of requests to serve.
    #[arg(long, value_enum, default_value = "aggregated")]
    role: Role,
    /// Address to listen on; port 0 for any free port.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Name of the model.
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Maximum length of prompt plus output, tokens.
    #[arg(long, default_value_t = 131_072)]
    max_model_len: u32,
    /// SGLang: port of a prefill engine's bootstrap server (0 for any), or a decode engine's default for that
    /// port.
    #[arg(long, default_value_t = SimConfig::DEFAULT_BOOTSTRAP_PORT)]
    bootstrap_port: u16,
    /// Number of data-parallel ranks to report.
    #[arg(long, default_value_t = 1)]
    dp_size: u32,
    /// Fixed duration of a prefill, in milliseconds.
    #[arg(long, default_value_t = 30.0)]
    overhead_ms: f64,
    /// Prefill duration for each token that is not cached, in milliseconds.
    #[arg(long, default_value_t = 0.2)]
    prefill_ms_per_token: f64,
    /// Inter-token latency of a single sequence, in milliseconds.
    #[arg(long, default_value_t = 12.0)]
    itl_ms: f64,
    /// KV transfer duration for each prompt token, in microseconds.
    #[arg(long, default_value_t = 5.0)]
    kv_transfer_us_per_token: f64,
    /// Slowdown factor of a full batch compared with a single sequence.
    #[arg(long, default_value_t = 2.0)]
    load_factor: f64,
    /// Duration of a step, instead of the latencies above: `dynamo`, `distserve-opt-13b-a100`,
    /// `blis-llama-8b-h100`, or the milliseconds `c0,c1,c2,c3,c4` of
    /// c0 + c1*B + c2*sum(kv) + c3*sum(n) + c4*sum(n^2) with B sequences, kv context and n new tokens.
    #[arg(long)]
    step_time: Option<StepTime>,
    /// Relative standard deviation of all durations; the deviation is limited to 0.7.
    #[arg(long, default_value_t = 0.1)]
    jitter: f64,
    /// Seed of the jitter, and of faults that affect a share of the requests.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Maximum number of admitted sequences.
    #[arg(long, default_value_t = 256)]
    max_num_seqs: u32,
    /// Maximum number of tokens of a step; longer prompts are computed in chunks.
    #[arg(long, default_value_t = 8_192)]
    max_batched_tokens: u32,
    /// Number of KV blocks.
    #[arg(long, default_value_t = 28_000)]
    blocks: u32,
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// Publish KV events (ZMQ) on this port; 0 for any.
    #[arg(long)]
    kv_events_port: Option<u16>,
    /// Topic of the KV events.
    #[arg(long, default_value = "kv-events")]
    kv_events_topic: String,
    /// Serve `/v1/chat/completions/render`, as vLLM does with `--enable-scale-out`.
    #[arg(long)]
    scale_out: bool,
    /// Lease of pinned blocks, in seconds.
    #[arg(long, default_value_t = 30.0)]
    lease_s: f64,
    /// Time that an SGLang leg waits for the other leg, in seconds.
    #[arg(long, default_value_t = 300.0)]
    room_wait_s: f64,
    /// Speed of the engine's clock relative to wall-clock time.
    #[arg(long, default_value_t = 1.0)]
    speedup: f64,
    /// Output tokens after which the model generates EOS, unless `ignore_eos` is set.
    #[arg(long, default_value_t = 256)]
    natural_len: u32,
    /// Number of the last requests to keep for `GET /sim/requests`, and of the last disconnects for `GET
    /// /sim/disconnects`.
    #[arg(long, default_value_t = 0)]
    record: usize,
    /// Add the time at which it is written to every event as `"t"`, nanoseconds of the monotonic clock, and
    /// write each event separately.
    #[arg(long)]
    stamp: bool,
    /// Serve every endpoint below any first path segment too, so that one engine can act as many workers.
    #[arg(long)]
    any_prefix: bool,
    /// A fault that is active from the start, as JSON, for example
    /// '{"kind":"status","status":503,"share":0.1,"leg":"prefill"}'; may be repeated. Kinds: refuse, die,
    /// status, hang-before-headers, hang-after-headers, stall, cut, garbage, wrong-content-type, slow-health,
    /// first-token-eos, partial-params, transfer-fail. `"prompt":"TEXT"` limits it to bodies with that text.
    #[arg(long = "fault", value_parser = parse_fault)]
    faults: Vec<Fault>,
    /// Number of worker threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

/// Time that requests may take to end after a signal.
const GRACE: Duration = Duration::from_secs(2);

impl SimArgs {
    /// Runs the engine until SIGTERM or SIGINT. Prints `{"listening":"HOST:PORT"}` when it is ready.
    ///
    /// # Errors
    /// An argument is not valid, or the engine cannot listen.
    pub fn run(self) -> anyhow::Result<()> {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        if self.threads > 0 {
            runtime.worker_threads(self.threads);
        }
        runtime.enable_all().build().context("no runtime")?.block_on(run(self))
    }
}

async fn run(args: SimArgs) -> anyhow::Result<()> {
    let mut term = signal(SignalKind::terminate()).context("no SIGTERM handler")?;
    let mut int = signal(SignalKind::interrupt()).context("no SIGINT handler")?;
    let sim = Sim::start(config(args)?).await?;
    let mut line = serde_json::json!({"listening": sim.addr(), "bootstrap_port": sim.bootstrap_port()});
    if let (Some(port), Some(line)) = (sim.kv_events_port(), line.as_object_mut()) {
        line.insert("kv_events_port".to_owned(), port.into());
    }
    // A parent process reads the port from this one flushed line.
    writeln!(std::io::stdout(), "{line}").context("stdout is closed")?;
    std::io::stdout().flush()?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    sim.shutdown(GRACE).await;
    Ok(())
}

fn config(args: SimArgs) -> anyhow::Result<SimConfig> {
    let span = |name: &str, value: f64, unit: f64| {
        Duration::try_from_secs_f64(value * unit)
            .with_context(|| format!("--{name} `{value}` is not a duration"))
    };
    Ok(SimConfig {
        dialect: args.engine,
        role: args.role,
        listen: args.listen,
        model: args.model,
        max_model_len: args.max_model_len,
        bootstrap_port: args.bootstrap_port,
        dp_size: args.dp_size,
        overhead: span("overhead-ms", args.overhead_ms, 1e-3)?,
        prefill_per_token: span("prefill-ms-per-token", args.prefill_ms_per_token, 1e-3)?,
        itl: span("itl-ms", args.itl_ms, 1e-3)?,
        transfer_per_token: span("kv-transfer-us-per-token", args.kv_transfer_us_per_token, 1e-6)?,
        load_factor: args.load_factor,
        step_time: args.step_time,
        jitter: args.jitter,
        seed: args.seed,
        max_num_seqs: args.max_num_seqs,
        max_batched_tokens: args.max_batched_tokens,
        blocks: args.blocks,
        block_size: args.block_size,
        kv_events: args.kv_events_port.is_some(),
        kv_events_port: args.kv_events_port.unwrap_or(0),
        kv_events_topic: args.kv_events_topic,
        scale_out: args.scale_out,
        lease: span("lease-s", args.lease_s, 1.0)?,
        room_wait: span("room-wait-s", args.room_wait_s, 1.0)?,
        speedup: args.speedup,
        natural_len: args.natural_len,
        record: args.record,
        stamp: args.stamp,
        any_prefix: args.any_prefix,
        faults: args.faults,
        ..SimConfig::default()
    })
}

fn parse_fault(json: &str) -> Result<Fault, String> {
    serde_json::from_str(json).map_err(|error| error.to_string())
}
