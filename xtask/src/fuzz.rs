//! `fuzz`: the targets of `fuzz/`, each for some minutes, with cargo-fuzz.

use std::process::Command;

use anyhow::{Context as _, bail};

use crate::sh;

const TARGETS: [&str; 6] = ["kv_events", "zmtp", "sse", "json_splice", "http", "sequence"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The targets: `kv_events`, `zmtp`, `sse`, `json_splice`, `http`, `sequence`.
    #[arg(required_unless_present = "all")]
    targets: Vec<String>,
    /// Every target, one after the other.
    #[arg(long)]
    all: bool,
    /// Minutes for each target.
    #[arg(long, default_value_t = 10)]
    minutes: u32,
}

/// Runs the targets; the first finding ends it. cargo-fuzz says where the input lies.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let targets: Vec<&str> =
        if args.all { TARGETS.to_vec() } else { args.targets.iter().map(String::as_str).collect() };
    if let Some(other) = targets.iter().find(|target| !TARGETS.contains(target)) {
        bail!("there is no target `{other}`, only {}", TARGETS.join(", "));
    }
    if !sh::succeeds(Command::new("cargo-fuzz").arg("--version")) {
        bail!("cargo-fuzz is not installed: cargo install cargo-fuzz");
    }
    for target in targets {
        let seconds = args.minutes.saturating_mul(60);
        let mut fuzz = sh::cargo();
        // The host has no unsafe code for a sanitizer to watch; the compiler's own checks are on. cargo-fuzz passes flags
        // that a stable compiler takes only so.
        fuzz.env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", "--sanitizer", "none", target, "--"]);
        fuzz.args([&format!("-max_total_time={seconds}"), "-rss_limit_mb=2048", "-timeout=10"]);
        fuzz.args(["-print_final_stats=1", "-verbosity=1"]);
        sh::run(&mut fuzz).with_context(|| format!("target {target}"))?;
    }
    Ok(())
}
