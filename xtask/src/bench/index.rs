//! `bench index`: the prefix index beside the concurrent tree of NVIDIA Dynamo's KV router.

use std::{path::PathBuf, process::Command};

use anyhow::Context as _;

use crate::{oracle, sh};

/// Options that are passed to the bench in `tests/oracle`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Mooncake trace, JSON lines with `hash_ids` [default: the excerpt in tests/fixtures].
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Engines that serve the trace.
    #[arg(long, default_value_t = 64)]
    workers: u64,
    /// Tokens in a block. A hash id of the trace stands for 512 tokens.
    #[arg(long, default_value_t = 64)]
    block_tokens: usize,
    /// Tokens in an engine's cache; more are evicted.
    #[arg(long, default_value_t = 1_000_000)]
    cache_tokens: usize,
    /// Use only this many prompts of the trace.
    #[arg(long)]
    prompts: Option<usize>,
    /// Rounds; each measures both sides, and ratios are taken within a round.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Writer threads of the oracle; Pointsman has one.
    #[arg(long, default_value_t = 2)]
    oracle_threads: usize,
    /// Blocks stored a second while lookups are timed.
    #[arg(long, default_value_t = 100_000)]
    rate: u64,
    /// Threads that look up without a pause while the second half of the events is applied.
    #[arg(long, default_value_t = 4)]
    readers: usize,
    /// Seconds after which the measurement with these readers ends.
    #[arg(long, default_value_t = 20)]
    readers_limit: u64,
}

/// Builds the bench and runs it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    sh::run(oracle::cargo("build").args(["--release", "--bins"]))?;
    let mut bench = Command::new(oracle::target().join("release/index"));
    let numbers = [
        ("--workers", args.workers.to_string()),
        ("--block-tokens", args.block_tokens.to_string()),
        ("--cache-tokens", args.cache_tokens.to_string()),
        ("--rounds", args.rounds.to_string()),
        ("--oracle-threads", args.oracle_threads.to_string()),
        ("--rate", args.rate.to_string()),
        ("--readers", args.readers.to_string()),
        ("--readers-limit", args.readers_limit.to_string()),
    ];
    numbers.iter().for_each(|(name, value)| {
        bench.args([name, value.as_str()]);
    });
    if let Some(prompts) = args.prompts {
        bench.args(["--prompts", &prompts.to_string()]);
    }
    if let Some(trace) = &args.trace {
        bench.arg("--trace").arg(
            std::fs::canonicalize(trace)
                .with_context(|| format!("could not find the trace {}", trace.display()))?,
        );
    }
    sh::run(&mut bench)
}
