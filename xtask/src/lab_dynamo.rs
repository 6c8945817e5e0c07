//! `lab-dynamo`: compares the lab with the offline replay of NVIDIA Dynamo, an independent simulator.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use tokio::time::Instant;

use crate::{fleet, sh, table::columns};

/// Python script that runs the replay and prints its summary as one line of JSON for each mode.
const REPLAY: &str = r#"
import json, sys, time
from dynamo.replay import run_trace_replay
trace, speed = sys.argv[1], float(sys.argv[2])
engine = {"engine": {"block_size": 512, "num_gpu_blocks": 2048}}
for mode in ["kv_router", "round_robin"]:
    begun = time.time()
    report = run_trace_replay(trace, extra_engine_args=engine, num_workers=8, trace_block_size=512,
                              router_mode=mode, arrival_speedup_ratio=speed)
    report = report if isinstance(report, dict) else report.__dict__
    summary = report.get("summary", report)
    summary = summary if isinstance(summary, dict) else summary.__dict__
    print(json.dumps({"mode": mode, "seconds": time.time() - begun, "summary": summary}, default=str))
"#;

/// Figures: the name, the replay's key, and the lab's key.
const FIGURES: [(&str, &str, &str); 8] = [
    ("reuse", "prefix_cache_reused_ratio", "hit_rate"),
    ("TTFT mean, ms", "mean_ttft_ms", "ttft_mean"),
    ("TTFT p50, ms", "median_ttft_ms", "ttft_p50"),
    ("TTFT p90, ms", "p90_ttft_ms", "ttft_p90"),
    ("TTFT p99, ms", "p99_ttft_ms", "ttft_p99"),
    ("ITL mean over requests, ms", "mean_tpot_ms", "itl_mean"),
    ("ITL mean over tokens, ms", "mean_itl_ms", "itl_over_tokens"),
    ("E2E mean, ms", "mean_e2e_latency_ms", "e2e_mean"),
];

/// Largest relative difference of a figure.
const LIMIT: f64 = 0.10;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Python with `ai-dynamo` 1.6.0 installed.
    #[arg(long)]
    python: PathBuf,
    /// Mooncake's conversation trace.
    #[arg(long)]
    trace: PathBuf,
    /// Factors on the rate of arrivals.
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    speeds: Vec<f64>,
}

/// Prints each figure of both simulators; returns an error when one differs by more than 10 %.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let program = fleet::build_programs("release", &[fleet::LAB])?.join(fleet::LAB.name);
    let mut far = Vec::new();
    for speed in &args.speeds {
        let replay = replay(args, *speed)?;
        let begun = Instant::now();
        let lab = lab(&program, args, *speed)?;
        let took = begun.elapsed().as_secs_f64();
        let mut rows = vec![
            ["arrivals", "router", "figure", "replay", "lab", "lab / replay"].map(str::to_owned).to_vec(),
        ];
        for (mode, arm) in [("kv_router", "kv-aware"), ("round_robin", "round-robin")] {
            let theirs =
                replay.iter().find(|line| line["mode"] == mode).context("the replay printed no such mode")?;
            let arms = lab["comparisons"][0]["arms"].as_array().context("the report has no arms")?;
            let ours = arms.iter().find(|line| line["label"] == arm).context("the report has no such arm")?;
            for (name, their_key, our_key) in FIGURES {
                let theirs =
                    theirs["summary"][their_key].as_f64().with_context(|| format!("no {their_key}"))?;
                let ours =
                    ours["figures"][our_key]["mean"].as_f64().with_context(|| format!("no {our_key}"))?;
                let ratio = ours / theirs;
                if (ratio - 1.0).abs() > LIMIT {
                    far.push(format!("{name} of {mode} at {speed}x: {ratio:.3}"));
                }
                let cells = [format!("{theirs:.3}"), format!("{ours:.3}"), format!("{ratio:.3}")];
                rows.push(
                    [vec![format!("{speed}x"), mode.to_owned(), name.to_owned()], cells.to_vec()].concat(),
                );
            }
            sh::status(&format!(
                "{mode} at {speed}x: replay {:.1} s",
                theirs["seconds"].as_f64().unwrap_or_default()
            ));
        }
        sh::status(&format!("lab at {speed}x: {took:.1} s for both arms, one thread"));
        columns(&rows).iter().for_each(|row| sh::print(row));
    }
    ensure!(far.is_empty(), "differ by more than {:.0} %: {}", LIMIT * 100.0, far.join("; "));
    Ok(())
}

fn replay(args: &Args, speed: f64) -> anyhow::Result<Vec<Value>> {
    let mut python = Command::new(&args.python);
    python.arg("-c").arg(REPLAY).arg(&args.trace).arg(speed.to_string());
    // Without this setting it logs every decision.
    python.env("DYN_LOG", "error").env("DYN_FILE_KV", std::env::temp_dir().join("pointsman-lab-dynamo"));
    let output = python.stderr(Stdio::inherit()).output().context("could not start python")?;
    ensure!(output.status.success(), "the replay ended with {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| serde_json::from_str(line).context("the replay printed other text")).collect()
}

fn lab(program: &Path, args: &Args, speed: f64) -> anyhow::Result<Value> {
    let report = tempfile::NamedTempFile::new()?;
    let mut compare = Command::new(program);
    compare.args(["compare", "--engines", "8", "--seeds", "1", "--threads", "1"]);
    compare.args(["--arm", "kv-aware", "--arm", "round-robin", "--speed", &speed.to_string()]);
    compare.arg("--trace").arg(&args.trace).arg("--json").arg(report.path());
    ensure!(compare.stdout(Stdio::null()).status()?.success(), "pointsman-lab compare failed");
    Ok(serde_json::from_slice(&std::fs::read(report.path())?)?)
}
