//! The command line.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use pointsman_admin_cli::AdminCommand;
use pointsman_cli::{DEFAULT_LOG, LogArgs, exit_code, print, start_log, with_negative_numbers};
use pointsman_policy_admin::PolicyAdminCommand;
use pointsman_policy_runtime::run_compiler_process;
use pointsman_workers::{WorkerSpec, url_without_secrets};
use tokio::{
    runtime::Handle,
    signal::unix::{Signal, SignalKind, signal},
};
use tokio_util::task::TaskTracker;

use crate::{
    config::{
        Config, Environment,
        reload::{ConfigSource, ReadConfig},
    },
    daemon::{Daemon, InheritedSockets, service_manager},
    version::VERSION,
};

mod check;
mod config;
mod generate;
mod key;
mod programs;

/// Gateway daemon for disaggregated LLM serving, routed by WebAssembly policies.
#[derive(Debug, Parser)]
#[command(name = "pointsman", version = VERSION, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

const EXAMPLES: &str = "\
Examples:
  pointsman serve --worker role=prefill,engine=vllm,url=http://10.0.0.1:8000 \\
                  --worker role=decode,engine=vllm,url=http://10.0.0.2:8000 --policies ./policies
  pointsman serve --config pointsman.toml
  pointsman config example > pointsman.toml
  pointsman check-config pointsman.toml
  pointsman config show --config pointsman.toml
  pointsman import llm-d epp.yaml > pointsman.toml
  pointsman import vllm-router -- --worker-urls http://10.0.0.1:8000 > pointsman.toml
  pointsman key new --id team-a-1 --tenant team-a >> pointsman.toml
  pointsman policy new shortest-queue --world selector
  pointsman policy build shortest-queue
  pointsman policy test shortest-queue/shortest-queue.wasm
  pointsman policy bench shortest-queue/shortest-queue.wasm
  pointsman policy run shortest-queue/shortest-queue.wasm --receipts decisions.jsonl
  pointsman policy inspect prefill.wasm
  pointsman policy push prefill.wasm registry.example.com/team/prefill:1.0.0
  pointsman policy pull registry.example.com/team/prefill:1.0.0 -o prefill.wasm
  pointsman compare --trace requests.jsonl --engines 8 --arm kv-aware --arm round-robin
  pointsman calibrate --url http://10.0.0.1:8000 --output fleet.toml
  pointsman policy promote prefill --from canary --gateway http://127.0.0.1:9090
  pointsman status
  pointsman workers --watch
  pointsman drain 3 --wait --timeout 5m
  pointsman decisions --last 20 --slot prefill
  pointsman top

The log level is set by the environment variable RUST_LOG (default: info).";

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve clients until SIGTERM, SIGINT or SIGQUIT, then drain. SIGHUP reads the configuration again.
    Serve(Box<ServeArgs>),
    /// Check a configuration as `serve` would, and report every problem in it: keys, values and
    /// contradictions, ports, tokenizers, the policy directory and its files.
    CheckConfig(Box<check::CheckArgs>),
    /// Print the schema of the configuration, an example, or the values in force.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Make API keys and tokens of operators, and the digests that the configuration has of them.
    #[command(subcommand)]
    Key(key::KeyCommand),
    /// Reload, promote and roll back the policies of a running gateway.
    #[command(subcommand)]
    Policy(PolicyAdminCommand),
    #[command(flatten)]
    Admin(AdminCommand),
    /// Print the completions of a shell.
    Completions {
        /// The shell, for instance: `pointsman completions bash > /etc/bash_completion.d/pointsman`.
        shell: clap_complete::Shell,
    },
    /// Write the manual pages: pointsman.1 and one for each command, also of the other programs.
    Man {
        /// Directory for the pages; it is created.
        dir: PathBuf,
    },
    /// Compile the policy file on stdin into the compile cache. The daemon runs this for each file.
    #[command(hide = true)]
    CompilePolicy {
        /// Task and limits of the process, as JSON.
        request: String,
    },
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// TOML configuration. Environment variables POINTSMAN__SECTION__KEY and flags take precedence over it.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Address of the clients' listener [default: 127.0.0.1:8080].
    #[arg(long, value_parser = address)]
    listen: Option<SocketAddr>,
    /// Address of the operators' listener [default: 127.0.0.1:9090].
    #[arg(long, value_parser = address)]
    admin_listen: Option<SocketAddr>,
    /// Directory of policies: SLOT.wasm, or SLOT.formula.toml, and for trials SLOT.canary.wasm and
    /// SLOT.shadow.wasm. SLOT is prefill, decode, aggregated or decode-override (which takes no formula).
    #[arg(long)]
    policies: Option<PathBuf>,
    /// A worker: role=prefill|decode|aggregated,engine=vllm|sglang|trtllm|openai,url=http://HOST:PORT and
    /// further keys of `[[workers]]`, such as model, kv_events, bootstrap_port, label.KEY, max_concurrency
    /// (`pointsman config example` has all). May be given many times.
    #[arg(long = "worker", value_name = "KEY=VALUE,…")]
    workers: Vec<String>,
}

fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected IP:PORT such as 127.0.0.1:8080")
}

/// What is wrong with a `--worker` that has no key, such as a URL alone.
const NOT_A_WORKER: &str = "is not of the form role=prefill|decode|aggregated,engine=vllm|sglang|trtllm|openai,\
                            url=http://HOST:PORT";

/// Runs the command that the process was started with, or the program that has it.
#[must_use]
pub fn run() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if let Some(failed) = programs::dispatch(&arguments) {
        return exit_code(Err(failed));
    }
    let mut matches = with_negative_numbers(programs::listed(Cli::command())).get_matches();
    match Cli::from_arg_matches_mut(&mut matches) {
        Ok(cli) => cli.run(),
        Err(error) => error.format(&mut Cli::command()).exit(),
    }
}

impl Cli {
    fn run(self) -> ExitCode {
        if let Command::CompilePolicy { request } = &self.command {
            return run_compiler_process(request);
        }
        // Findings of `check-config` are its output, not log lines.
        let quiet = matches!(self.command, Command::CheckConfig(_));
        let log = start_log(self.log.log_json, if quiet { "off" } else { DEFAULT_LOG });
        let outcome = match self.command {
            Command::Serve(args) => serve(*args),
            Command::CheckConfig(args) => args.run(),
            Command::Config(command) => command.run(),
            Command::Key(command) => command.run(),
            Command::Policy(command) => command.run(),
            Command::Admin(command) => command.run(),
            Command::Completions { shell } => generate::completions(shell),
            Command::Man { dir } => generate::manual_pages(&dir),
            Command::CompilePolicy { .. } => Ok(ExitCode::FAILURE),
        };
        drop(log);
        exit_code(outcome)
    }
}

impl ServeArgs {
    fn config(&self) -> anyhow::Result<Config> {
        Ok(Config::load(self.config.as_deref(), &Environment::of_process(), |config| self.overrule(config))?)
    }

    /// Puts the flags in the place of the file's values.
    fn overrule(&self, config: &mut Config) {
        if let Some(listen) = self.listen {
            config.server.listen = listen;
            config.given_by("server.listen", "--listen");
        }
        if let Some(listen) = self.admin_listen {
            config.server.admin_listen = listen;
            config.given_by("server.admin_listen", "--admin-listen");
        }
        if self.policies.is_some() {
            config.policies.dir.clone_from(&self.policies);
            config.given_by("policies.dir", "--policies");
        }
        // Also the right binary after the file was replaced by another release.
        config.policies.compiler = Some(PathBuf::from("/proc/self/exe"));
        for flag in &self.workers {
            let shown = format!("--worker {}", without_key(flag));
            match WorkerSpec::parse_flag(flag) {
                Ok(worker) => {
                    config.given_by(format!("workers[{}]", config.workers.len()), shown);
                    config.workers.push(worker);
                }
                Err(_) if !flag.contains('=') => config.refuse_flag(shown, NOT_A_WORKER.to_owned()),
                Err(_) => {
                    for problem in WorkerSpec::flag_problems(flag) {
                        config.refuse_flag(shown.clone(), problem.to_string());
                    }
                }
            }
        }
    }
}

/// Time after which an idle thread for blocking work ends. Files are read again each second: with tokio's ten
/// seconds, threads that once worked side by side would all stay.
const BLOCKING_KEEP_ALIVE: Duration = Duration::from_millis(500);

/// Signals that end the gateway: SIGTERM, SIGINT and SIGQUIT.
struct EndSignals([Signal; 3]);

impl EndSignals {
    fn catch() -> std::io::Result<Self> {
        let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::quit()];
        let [terminate, interrupt, quit] = kinds.map(signal);
        Ok(Self([terminate?, interrupt?, quit?]))
    }

    async fn recv(&mut self) {
        let Self([terminate, interrupt, quit]) = self;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
    }
}

/// Ignores SIGUSR1 and SIGUSR2, by which log rotation tells other servers to open their files again.
fn ignore_user_signals(tasks: &TaskTracker) -> std::io::Result<()> {
    for (name, kind) in [("SIGUSR1", SignalKind::user_defined1()), ("SIGUSR2", SignalKind::user_defined2())] {
        let mut user = signal(kind)?;
        tasks.spawn(async move {
            while user.recv().await.is_some() {
                tracing::warn!(signal = name, "signal ignored: logs go to stderr; nothing to reopen");
            }
        });
    }
    Ok(())
}

/// Has a write beyond the limit of file sizes (`ulimit -f`) fail. It would end the process otherwise.
fn survive_file_size_limit() -> std::io::Result<()> {
    // The handler stays for the life of the process.
    signal(SignalKind::from_raw(libc::SIGXFSZ)).map(drop)
}

/// Starts the gateway. Blocks while it reads files and compiles policies.
fn start(args: ServeArgs) -> anyhow::Result<Daemon> {
    let path = args.config.clone();
    let read: ReadConfig = Arc::new(move || args.config());
    let source = path.map(|path| ConfigSource::new(Some(path), Environment::of_process(), read.clone()));
    let config = read()?;
    crate::state::open_files::raise_limit();
    Handle::current().block_on(Daemon::start_from(&config, source, InheritedSockets::of_process()?))
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_name("blocking")
        .thread_keep_alive(BLOCKING_KEEP_ALIVE)
        .build()?;
    let outcome = runtime.block_on(async {
        // A signal that comes before it is caught ends the process.
        let (mut end, mut hang_up) = (EndSignals::catch()?, signal(SignalKind::hangup())?);
        ignore_user_signals(&TaskTracker::new())?;
        survive_file_size_limit()?;
        let running = tokio::select! {
            started = tokio::task::spawn_blocking(|| start(args)) => started??,
            () = end.recv() => {
                tracing::info!("start cancelled by a signal");
                return Ok(ExitCode::SUCCESS);
            }
        };
        let ext_proc =
            running.ext_proc.map(|address| format!(",\"ext_proc\":\"{address}\"")).unwrap_or_default();
        let (address, admin) = (running.address, running.admin);
        let addresses = format!("{{\"listening\":\"{address}\",\"admin\":\"{admin}\"{ext_proc}}}\n");
        if let Err(error) = print(&addresses) {
            tracing::warn!(%error, "addresses not written to stdout");
        }
        service_manager::ready();
        let reload = async {
            while hang_up.recv().await.is_some() {
                let reloaded = running.reload().await;
                let outcome = if reloaded.is_ok() { "done" } else { "refused" };
                tracing::info!(
                    target: "audit",
                    who = "SIGHUP",
                    action = "reload",
                    outcome,
                    "change requested"
                );
                if let Err(error) = reloaded {
                    tracing::warn!(%error, "configuration not reloaded");
                }
            }
        };
        // A reload may wait for policies that compile; the end does not wait for it.
        tokio::select! {
            () = end.recv() => {}
            () = reload => {}
        }
        service_manager::stopping();
        service_manager::ends_within(running.longest_end());
        tokio::select! {
            () = running.delay_drain() => {}
            () = end.recv() => {}
        }
        tracing::info!("draining");
        running.drain().await;
        Ok(ExitCode::SUCCESS)
    });
    // A thread may wait for a file system that does not answer.
    runtime.shutdown_background();
    outcome
}

/// A worker flag without its secrets, for messages. A part without `=` behind another one is the rest of a
/// value with a comma, which may be a secret.
fn without_key(flag: &str) -> String {
    let (mut parts, mut is_first) = (flag.split(',').peekable(), true);
    let parts = std::iter::from_fn(|| {
        let part = parts.next()?;
        let was_first = std::mem::take(&mut is_first);
        let goes_on = parts.peek().is_some_and(|next| !next.contains('='));
        Some(match part.split_once('=') {
            Some(("api_key", _)) => "api_key=[secret]".to_owned(),
            Some(("url", _)) if goes_on => "url=[secret]".to_owned(),
            Some(("url", url)) => format!("url={}", url_without_secrets(url)),
            None if was_first && !goes_on => url_without_secrets(part),
            None => "[secret]".to_owned(),
            _ => part.to_owned(),
        })
    });
    parts.collect::<Vec<_>>().join(",")
}
