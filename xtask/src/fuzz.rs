//! `fuzz`: runs the targets of `fuzz/` and `crates/*/fuzz/` with cargo-fuzz.

use std::process::Command;

use anyhow::{Context as _, bail};

use crate::sh;

const TARGETS: [&str; 7] = ["kv_events", "zmtp", "sse", "json_splice", "http", "sequence", "byte_bpe"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Targets: `kv_events`, `zmtp`, `sse`, `json_splice`, `http`, `sequence`, `byte_bpe`.
    #[arg(required_unless_present = "all")]
    targets: Vec<String>,
    /// Run every target, one after the other.
    #[arg(long)]
    all: bool,
    /// Minutes for each target.
    #[arg(long, default_value_t = 10)]
    minutes: u32,
}

/// Runs the targets until the first finding. cargo-fuzz prints the path of its input.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let targets: Vec<&str> =
        if args.all { TARGETS.to_vec() } else { args.targets.iter().map(String::as_str).collect() };
    if let Some(other) = targets.iter().find(|target| !TARGETS.contains(target)) {
        bail!("no target is called `{other}`: expected {}", TARGETS.join(", "));
    }
    if let Some(reason) = missing() {
        bail!("{reason}");
    }
    for target in targets {
        let seconds = args.minutes.saturating_mul(60);
        let mut fuzz = sh::cargo();
        // The host has no unsafe code for a sanitizer to check, and overflow checks are on. cargo-fuzz passes
        // flags that a stable compiler accepts only with RUSTC_BOOTSTRAP.
        fuzz.env("RUSTC_BOOTSTRAP", "1").args(["fuzz", "run", "--sanitizer", "none", target, "--"]);
        fuzz.args([&format!("-max_total_time={seconds}"), "-rss_limit_mb=2048", "-timeout=10"]);
        fuzz.args(["-print_final_stats=1", "-verbosity=1"]);
        sh::run(&mut fuzz).with_context(|| format!("target {target}"))?;
    }
    Ok(())
}

/// Reason why fuzzing cannot run on this machine.
pub(crate) fn missing() -> Option<String> {
    let installed = sh::succeeds(Command::new("cargo-fuzz").arg("--version"));
    (!installed).then(|| "cargo-fuzz is not installed: cargo install cargo-fuzz".to_owned())
}

#[cfg(test)]
mod tests {
    use super::TARGETS;
    use crate::sh;

    #[test]
    fn the_list_of_targets_is_that_of_the_fuzz_crate() {
        let manifest = std::fs::read_to_string(sh::root().join("fuzz/Cargo.toml")).unwrap();
        let names = manifest.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        let mut names: Vec<&str> = names.filter(|name| !name.contains("fuzz")).collect();
        let mut targets = TARGETS.to_vec();
        names.sort_unstable();
        targets.sort_unstable();
        assert_eq!(targets, names);
    }
}
