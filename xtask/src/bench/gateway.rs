//! `bench gateway`: routers in turn, round by round, in one run, in front of the same engine and the same clients.
//!
//! The figure of merit is the router's own CPU time; the engine and the clients live in this process, share its clock, and
//! stamp every event, so that a hop is measured from the engine's write to the client's read.

use std::{io::Write as _, path::PathBuf, time::Duration};

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::{fleet, setup, sh};

mod client;
mod cpu;
mod engines;
mod routers;
mod scenario;
mod versus;

use engines::Engines;
use routers::Router;
use scenario::{Figures, Scenario};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds; figures are medians over them, ratios are taken within a round.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Scenarios by letter; all when not given.
    #[arg(long, value_delimiter = ',')]
    scenarios: Vec<String>,
    /// A share of each scenario's requests, for a quick look.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// A Python environment with rivals in it (vllm-router, sglang-router): they are measured in the same rounds.
    #[arg(long)]
    rivals: Option<PathBuf>,
    /// Directory with another build of `pointsman`: both builds run in every round, and the ratios are printed.
    #[arg(long, value_name = "DIR")]
    versus: Option<PathBuf>,
    /// A model folder with tokenizer.json: the scenarios that count in tokens run too.
    #[arg(long)]
    tokenizer: Option<PathBuf>,
    /// A JSON line a figure is appended here.
    #[arg(long, default_value = "target/bench/gateway.jsonl")]
    out: PathBuf,
}

/// Runs the rounds and prints the table.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds 0 measures nothing");
    setup::run()?;
    let programs = Programs {
        bin: fleet::build()?,
        versus: args.versus.clone(),
        rivals: args.rivals.clone(),
        tokenizer: args.tokenizer.clone(),
    };
    if let Some(versus) = &args.versus {
        let binary = versus.join("pointsman");
        ensure!(binary.is_file(), "--versus: {} does not exist", binary.display());
    }
    let chosen: Vec<&Scenario> = scenario::ALL
        .iter()
        .filter(|one| !one.tokens || args.tokenizer.is_some())
        .filter(|one| args.scenarios.is_empty() || args.scenarios.iter().any(|name| name == one.name))
        .collect();
    ensure!(!chosen.is_empty(), "no such scenario; there are: {}", scenario::names());
    let out = sh::root().join(&args.out);
    std::fs::create_dir_all(out.parent().context("--out names no file")?)?;
    let mut out = std::fs::OpenOptions::new().append(true).create(true).open(out)?;
    let commit = sh::commit();
    let mut comparison = Vec::new();
    for scenario in chosen {
        sh::tell(&format!("({}) {}", scenario.name, scenario.says));
        let rounds = (0..args.rounds)
            .map(|round| one_round(scenario, &programs, args.scale, round))
            .collect::<anyhow::Result<Vec<_>>>()?;
        for (name, figures) in table(scenario, &programs.routers(scenario), &rounds) {
            let line = json!({
                "commit": commit, "scenario": scenario.name, "router": name, "rounds": args.rounds, "figures": figures,
            });
            writeln!(out, "{line}")?;
        }
        comparison.push(versus::row(scenario.name, &rounds));
    }
    if args.versus.is_some() {
        versus::print(&comparison);
    }
    Ok(())
}

/// Where the routers' programs are.
#[derive(Debug)]
struct Programs {
    bin: PathBuf,
    versus: Option<PathBuf>,
    rivals: Option<PathBuf>,
    tokenizer: Option<PathBuf>,
}

impl Programs {
    /// The routers that take part.
    fn routers(&self, scenario: &Scenario) -> Vec<Router> {
        let here = |router: &Router| match router {
            Router::Versus => self.versus.is_some(),
            other => !other.is_rival() || self.rivals.is_some(),
        };
        Router::ALL.into_iter().filter(|router| here(router) && router.can(scenario)).collect()
    }
}

type Round = Vec<(&'static str, Figures)>;

fn one_round(scenario: &Scenario, programs: &Programs, scale: f64, round: usize) -> anyhow::Result<Round> {
    let engines = Engines::start(scenario)?;
    let mut figures = Vec::new();
    let routers = programs.routers(scenario);
    // Each round begins with another router, so that none is always first.
    let order = routers.iter().cycle().skip(round % routers.len()).take(routers.len());
    for kind in order {
        let router = kind.start(scenario, &engines, programs).with_context(|| kind.name().to_owned())?;
        std::thread::sleep(Duration::from_millis(300));
        scenario.run(&router, (scale * 0.1).min(0.1)).with_context(|| kind.name().to_owned())?;
        let measured = scenario.run(&router, scale).with_context(|| kind.name().to_owned())?;
        sh::tell(&format!("  round {round} {:<13} {}", kind.name(), measured.short()));
        figures.push((kind.name(), measured));
    }
    Ok(figures)
}

fn table(
    scenario: &Scenario,
    routers: &[Router],
    rounds: &[Round],
) -> Vec<(&'static str, serde_json::Value)> {
    sh::print(&format!(
        "\n({}) {}\n{:<13} {:>12} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>9} {:>9}",
        scenario.name,
        scenario.says,
        "router",
        "CPU s/1000",
        "x nginx",
        "us/event",
        "TTFT p50",
        "TTFT p99",
        "hop p50",
        "hop p99",
        "ev/chunk",
        "req/s",
        "RSS MB"
    ));
    let of = |name: &str, figure: fn(&Figures) -> f64| -> Vec<f64> {
        rounds
            .iter()
            .flatten()
            .filter(|(other, _)| *other == name)
            .map(|(_, figures)| figure(figures))
            .collect()
    };
    let cpu = |figures: &Figures| figures.cpu_per_1000_s;
    let floor = of("nginx", cpu);
    let mut lines = Vec::new();
    for kind in routers {
        let name = kind.name();
        let ratio: Vec<f64> = of(name, cpu).iter().zip(&floor).map(|(cpu, floor)| cpu / floor).collect();
        let shown = [
            median(of(name, cpu)),
            median(ratio.clone()),
            median(of(name, |figures| figures.cpu_per_event_us)),
            median(of(name, |figures| figures.ttft_p50_ms)),
            median(of(name, |figures| figures.ttft_p99_ms)),
            median(of(name, |figures| figures.hop_p50_us)),
            median(of(name, |figures| figures.hop_p99_us)),
            median(of(name, |figures| figures.events_per_chunk)),
            median(of(name, |figures| figures.per_second)),
            median(of(name, |figures| figures.rss_mb)),
        ];
        let [per_1000, ratio, per_event, p50, p99, hop50, hop99, chunk, rate, rss] = shown;
        sh::print(&format!(
            "{name:<13} {per_1000:>12.3} {ratio:>9.2} {per_event:>9.2} {p50:>9.3} {p99:>9.3} {hop50:>9.0} {hop99:>9.0} {chunk:>8.2} {rate:>9.0} {rss:>9.1}"
        ));
        lines.push((
            name,
            json!({
                "cpu_s_per_1000": per_1000, "ratio_to_nginx": ratio, "cpu_us_per_event": per_event,
                "ttft_ms": [p50, p99], "hop_us": [hop50, hop99], "events_per_chunk": chunk,
                "requests_per_s": rate, "rss_mb": rss,
            }),
        ));
    }
    lines
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
