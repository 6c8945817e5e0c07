//! `pointsman calibrate`: measures engines, and fits the engine model of the lab to them.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context as _, bail, ensure};
use clap::{ArgGroup, Args};
use pointsman_cli::print;
use pointsman_lab::calibrate::{
    Calibration, DesignLimits, LogArgs, Measurements, calibrate, calibrate_log, design, fleet_text,
};
use pointsman_lab::output_file;
use pointsman_workers::Role;
use serde::Deserialize;
use tokio::time::Duration;

use self::{
    access::AccessArgs,
    capacity::CapacityArgs,
    plan::{Kind, Phase, WARM_UP},
};

mod access;
mod capacity;
mod plan;
mod send;
mod session;
mod target;

/// Default longest prompt, tokens.
const DEFAULT_MAX_PROMPT: u32 = 2_048;

/// Default maximum number of requests.
const DEFAULT_MAX_REQUESTS: u32 = 200;

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Sends requests with random prompts of its own, so that no prefix cache helps, and measures the streams. \
Measure an engine without other traffic: what others send is not in the model. The limits are never exceeded; \
Ctrl-C ends the measurement and uses what there is.

Examples:
  pointsman calibrate --url http://10.0.0.1:8000 --dry-run
  pointsman calibrate --url http://10.0.0.1:8000 -o fleet.toml
  pointsman calibrate --url http://GATEWAY:8080 --prefill http://10.0.0.1:8000 \\
                      --decode http://10.0.0.2:8000 -o fleet.toml
  pointsman calibrate --log /var/log/pointsman --since 2h -o fleet.toml

Exit code: 0 when the model was fitted; 2 when an argument or an engine is not usable.")]
#[command(group = ArgGroup::new("measurements").args(["url", "from", "log"]).required(true).multiple(true))]
pub(crate) struct CalibrateArgs {
    /// Address of an aggregated engine; with --prefill and --decode, of the gateway in front of them.
    #[arg(long)]
    url: Option<String>,
    /// Address of the prefill engine of a pair. It is measured directly; then the pair is measured through
    /// --url.
    #[arg(long, requires = "decode")]
    prefill: Option<String>,
    /// Address of the decode engine of a pair.
    #[arg(long, requires = "prefill")]
    decode: Option<String>,
    /// Measure each engine of a pair while the other is idle, for engines that do not share hardware. Without
    /// this flag, both engines are measured at the same time, so that the figures hold when both run.
    #[arg(long, requires = "prefill")]
    apart: bool,
    /// Fit the measurements of an earlier run (the file of its --json) instead of measuring.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["url", "dry_run"])]
    from: Option<PathBuf>,
    #[command(flatten)]
    log: LogArgs,
    /// Model [default: the only model of the server or the log].
    #[arg(long)]
    model: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    /// Maximum number of requests [default: 200]; with --log, number of the log's last requests that are used
    /// [default: 5000].
    #[arg(long, value_parser = clap::value_parser!(u32).range(10..=100_000))]
    max_requests: Option<u32>,
    /// Maximum time, seconds. Measurements that ended until then are used.
    #[arg(long, default_value = "600", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    max_seconds: u64,
    /// Maximum number of concurrent requests.
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    max_concurrency: u32,
    /// Shortest prompt, tokens.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    min_prompt_tokens: u32,
    /// Longest prompt, tokens [default: 2048, or the longest that the model allows].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    max_prompt_tokens: Option<u32>,
    /// Output tokens of a request; the check uses a quarter to twice this number.
    #[arg(long, default_value = "32", value_parser = clap::value_parser!(u32).range(2..=10_000))]
    output_tokens: u32,
    #[command(flatten)]
    capacity: CapacityArgs,
    /// Seed of the prompts, their lengths and their order.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Print the requests that would be sent, without sending a prompt.
    #[arg(long)]
    dry_run: bool,
    /// File to write the fleet to. The file must not exist.
    #[arg(short, long, value_name = "FILE", value_parser = output_file)]
    output: Option<PathBuf>,
    /// File to write measurements, figures and errors to, as JSON. The file must not exist.
    #[arg(long, value_name = "FILE", value_parser = output_file)]
    json: Option<PathBuf>,
    /// Replace files that exist.
    #[arg(long)]
    force: bool,
}

/// The part of the JSON report that `--from` reads.
#[derive(Deserialize)]
struct Earlier {
    measurements: Measurements,
}

impl CalibrateArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let mut files = self.output.iter().chain(&self.json);
        if let Some(path) = files.find(|path| !self.force && path.exists()) {
            bail!("`{}` exists: give another file, or `--force` to replace it", path.display());
        }
        if let Some(log) = &self.log.log {
            let (model, capacity) = (self.model.as_deref(), self.capacity.given());
            let fitted = calibrate_log(log, &self.log, model, self.max_requests, capacity)?;
            if let Some(path) = &self.json {
                write(path, &serde_json::to_vec_pretty(&serde_json::json!({"calibration": fitted}))?)?;
            }
            return self.report_result(&fitted);
        }
        let measured = match &self.from {
            Some(file) => Some(earlier(file)?),
            None => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(self.measure())?
            }
        };
        let Some(measured) = measured else { return Ok(ExitCode::SUCCESS) };
        let fitted = calibrate(&measured);
        // The measurements are written first, so that they are kept if they cannot be fitted.
        if let Some(path) = &self.json {
            let report = serde_json::json!({"measurements": measured, "calibration": fitted.as_ref().ok()});
            write(path, &serde_json::to_vec_pretty(&report)?)?;
        }
        self.report_result(&fitted?)
    }

    /// Prints the fitted figures, and writes the fleet file.
    fn report_result(&self, fitted: &Calibration) -> anyhow::Result<ExitCode> {
        print(&fitted.table())?;
        if let Some(path) = &self.output {
            write(path, fleet_text(&fitted.fleet, &notes(fitted, self.log.log.is_some())).as_bytes())?;
            print(&format!("\nwritten: {}\n", path.display()))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Measures the engines; returns `None` after a dry run.
    async fn measure(&self) -> anyhow::Result<Option<Measurements>> {
        let url = self.url.as_deref().context("--url is missing")?;
        let server = plan::Server::find(&self.access.target(url)?, self.model.as_deref()).await?;
        let phases = self.phases(url, &server).await?;
        print(&plan::text(&phases, &server.model, self.max_seconds))?;
        if self.dry_run {
            return Ok(None);
        }
        session::measure(&phases, server.model, self.seed, Duration::from_secs(self.max_seconds))
            .await
            .map(Some)
    }

    /// Plans the requests to each server, within the limits.
    async fn phases(&self, url: &str, server: &plan::Server) -> anyhow::Result<Vec<Phase>> {
        let engines = match (&self.prefill, &self.decode) {
            (Some(prefill), Some(decode)) => vec![(Role::Prefill, prefill.as_str()), (Role::Decode, decode)],
            _ => vec![(Role::Aggregated, url)],
        };
        let is_pair = engines.len() > 1;
        let together = is_pair && !self.apart;
        let warm_up = WARM_UP * (u32::try_from(engines.len())? + u32::from(is_pair));
        let requests = self.max_requests.unwrap_or(DEFAULT_MAX_REQUESTS);
        let budget = plan::Budget::of(requests.saturating_sub(warm_up), engines.len(), together);
        let (mut phases, mut beside) = (Vec::new(), Vec::new());
        let (mut smallest, mut longest, mut decode_url) = (u64::MAX, server.max_length, None);
        for (role, url) in engines {
            let target = self.access.target(url)?;
            // A gateway does not report the longest prompt of its engines.
            let length = plan::Server::find(&target, Some(&server.model)).await?.max_length;
            longest = [longest, length].into_iter().flatten().min();
            let capacity = self.capacity.find(&target).await?;
            smallest = smallest.min(u64::from(capacity.blocks) * u64::from(capacity.block_tokens));
            let limits = self.limits(longest, smallest)?;
            // Each engine has its own order, so that different bursts meet.
            let seed = self.seed.wrapping_add(beside.len() as u64);
            let bursts = DesignLimits { burst_requests: budget.engine, mix_requests: 0, seed, ..limits };
            decode_url = Some(url);
            if together {
                let lone = DesignLimits { burst_requests: budget.alone, max_concurrency: 1, ..bursts };
                phases.push(Phase { kind: Kind::Alone(role), target, design: design(&lone) });
                let target = self.access.target(url)?;
                beside.push(Phase { kind: Kind::Together(role, capacity), target, design: design(&bursts) });
            } else {
                phases.push(Phase { kind: Kind::Engine(role, capacity), target, design: design(&bursts) });
            }
        }
        phases.append(&mut beside);
        let limits = self.limits(longest, smallest)?;
        if let Some(decode_url) = decode_url.filter(|_| is_pair) {
            let kind = Kind::Pair(Box::new(self.access.target(decode_url)?));
            let lone =
                DesignLimits { burst_requests: budget.pair, mix_requests: 0, max_concurrency: 1, ..limits };
            let target = self.access.target(url)?;
            phases.push(Phase { kind, target, design: design(&lone) });
        }
        let mix = DesignLimits { burst_requests: 0, mix_requests: budget.mix, seed: self.seed + 1, ..limits };
        let target = self.access.target(url)?;
        phases.push(Phase { kind: Kind::Mix, target, design: design(&mix) });
        Ok(phases)
    }

    fn limits(&self, max_length: Option<u32>, kv_tokens: u64) -> anyhow::Result<DesignLimits> {
        let longest_answer = self.output_tokens.saturating_mul(2);
        let room = max_length.unwrap_or(u32::MAX).min(u32::try_from(kv_tokens).unwrap_or(u32::MAX));
        let room = room.saturating_sub(longest_answer);
        let max_prompt = self.max_prompt_tokens.unwrap_or(DEFAULT_MAX_PROMPT.min(room));
        ensure!(
            max_prompt <= room,
            "--max-prompt-tokens {max_prompt}: with answers of {longest_answer} tokens the engine takes prompts of at \
             most {room}"
        );
        ensure!(
            self.min_prompt_tokens < max_prompt,
            "--min-prompt-tokens {} is not below the longest prompt of {max_prompt} tokens; lower it",
            self.min_prompt_tokens,
        );
        Ok(DesignLimits {
            burst_requests: 0,
            mix_requests: 0,
            max_concurrency: self.max_concurrency,
            min_prompt: self.min_prompt_tokens,
            max_prompt,
            output_tokens: self.output_tokens,
            kv_tokens,
            seed: self.seed,
        })
    }
}

fn earlier(file: &Path) -> anyhow::Result<Measurements> {
    let read = || -> anyhow::Result<Earlier> { Ok(serde_json::from_slice(&std::fs::read(file)?)?) };
    let earlier =
        read().with_context(|| format!("--from {}: not the JSON of an earlier run", file.display()))?;
    Ok(earlier.measurements)
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the comments of the fleet file: the source of the figures, and their errors.
fn notes(fitted: &Calibration, from_log: bool) -> Vec<String> {
    let engines =
        if from_log { "as many engines as the log names" } else { "one engine of each role. Set `count`" };
    let mut notes = vec![format!("Written by `pointsman calibrate`: {engines}.")];
    if let Some(held_out) = &fitted.held_out {
        notes.push(format!(
            "Median errors on {} requests that were not fitted: TTFT {:.1} %, ITL {:.1} %, E2E {:.1} %.",
            held_out.ttft.requests,
            held_out.ttft.median_percent,
            held_out.itl.median_percent,
            held_out.e2e.median_percent,
        ));
    }
    notes.extend(fitted.warnings.iter().map(|warning| format!("Warning: {warning}")));
    notes
}
