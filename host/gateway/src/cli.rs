//! The command line.

use std::{
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use pointsman_policy_tools::PolicyCommand;
use pointsman_workers::WorkerSpec;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    config::{Config, reload::ConfigSource},
    daemon::Daemon,
};

/// Gateway daemon for disaggregated LLM serving, routed by WebAssembly policies.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Log lines as JSON.
    #[arg(long, global = true)]
    log_json: bool,
}

const EXAMPLES: &str = "\
Examples:
  pointsman serve --worker role=prefill,engine=vllm,url=http://10.0.0.1:8000 \\
                  --worker role=decode,engine=vllm,url=http://10.0.0.2:8000 --policies ./policies
  pointsman serve --config pointsman.toml
  pointsman check-config --config pointsman.toml
  pointsman policy new shortest-queue --world selector
  pointsman policy test shortest_queue.wasm --cases cases.toml
  pointsman policy bench shortest_queue.wasm
  pointsman policy run shortest_queue.wasm --receipts decisions.jsonl
  pointsman policy inspect prefill.wasm
  pointsman policy push prefill.wasm oci:./layout:1.0.0
  pointsman policy pull oci:./layout:1.0.0 -o prefill.wasm
  pointsman policy promote prefill --from canary --admin http://127.0.0.1:9090

The log level is set by the environment variable RUST_LOG (default: info).";

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve clients until SIGTERM or SIGINT, then drain. SIGHUP reads the configuration again.
    Serve(Box<ServeArgs>),
    /// Check a configuration and report every problem in it.
    CheckConfig(Box<ServeArgs>),
    /// Write, test, measure and inspect policies, and replay recorded decisions with them.
    #[command(subcommand)]
    Policy(PolicyCommand),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// TOML configuration; flags win over it.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Address of the clients' listener [default: 127.0.0.1:8080].
    #[arg(long)]
    listen: Option<SocketAddr>,
    /// Address of the operators' listener [default: 127.0.0.1:9090].
    #[arg(long)]
    admin_listen: Option<SocketAddr>,
    /// Directory of policies: `prefill.wasm`, `decode.wasm`, `aggregated.wasm`, `decode-override.wasm`.
    #[arg(long)]
    policies: Option<PathBuf>,
    /// Refuse requests when there is no prefill worker, instead of prefilling locally.
    #[arg(long)]
    enforce_disagg: bool,
    /// A worker: role=prefill|decode|aggregated,engine=vllm|sglang|openai,url=http://HOST:PORT and further
    /// id, model, dp_size, bootstrap_host, bootstrap_port, transport, label.KEY, taint, lora, local_prefill,
    /// prefill_cancellable, max_concurrency, total_blocks, api_key. May be given many times.
    #[arg(long = "worker", value_name = "KEY=VALUE,…")]
    workers: Vec<String>,
}

impl Cli {
    /// Runs the command.
    #[must_use]
    pub fn run(self) -> ExitCode {
        start_log(self.log_json);
        let outcome = match self.command {
            Command::Serve(args) => serve(*args),
            Command::CheckConfig(args) => args.config().and_then(|config| summarize(&config)),
            Command::Policy(command) => command.run(),
        };
        match outcome {
            Ok(code) => code,
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "pointsman: {error:#}");
                ExitCode::from(2)
            }
        }
    }
}

impl ServeArgs {
    fn config(&self) -> anyhow::Result<Config> {
        let parse = |flag: &String| WorkerSpec::parse_flag(flag).with_context(|| format!("--worker {flag}"));
        let workers = self.workers.iter().map(parse).collect::<anyhow::Result<Vec<_>>>()?;
        let config = Config::load(self.config.as_deref(), |config| {
            config.server.listen = self.listen.unwrap_or(config.server.listen);
            config.server.admin_listen = self.admin_listen.unwrap_or(config.server.admin_listen);
            config.policies.dir = self.policies.clone().or(config.policies.dir.take());
            config.routing.enforce_disagg |= self.enforce_disagg;
            config.workers.extend(workers);
        })?;
        Ok(config)
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let config = args.config()?;
    let path = args.config.clone();
    let source = path.is_some().then(|| ConfigSource { path, read: Arc::new(move || args.config()) });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let running = Daemon::start_from(&config, source).await?;
        print(&format!("{{\"listening\":\"{}\",\"admin\":\"{}\"}}\n", running.address, running.admin))?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        loop {
            tokio::select! {
                _ = terminate.recv() => break,
                interrupted = tokio::signal::ctrl_c() => break interrupted?,
                _ = hang_up.recv() => {
                    if let Err(error) = running.reload().await {
                        tracing::warn!(%error, "configuration not reloaded");
                    }
                }
            }
        }
        tracing::info!("draining");
        running.drain().await;
        Ok(ExitCode::SUCCESS)
    })
}

fn summarize(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = format!(
        "listen {}\nadmin {}\nenforce_disagg {}\npolicies {}\n",
        config.server.listen,
        config.server.admin_listen,
        config.routing.enforce_disagg,
        config.policies.dir.as_deref().unwrap_or(Path::new("(built-in only)")).display(),
    );
    for worker in &config.workers {
        text.push_str(&format!("worker {} {} {} {}\n", worker.id, worker.role, worker.engine, worker.url));
    }
    print(&(text + "ok\n"))?;
    Ok(ExitCode::SUCCESS)
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn start_log(json: bool) {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json { log.json().init() } else { log.init() }
}
