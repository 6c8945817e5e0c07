//! Measures the index's writer alone: events, applied in one thread or through the index's own queue.
//! For profiles, and to compare two builds.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use clap::Parser;
use pointsman_oracle::{
    load::{Load, LoadArgs},
    sides::{our_batch, ours},
};
use prefix_index::{IndexConfig, PrefixIndex};

/// Prints the time for each stored block.
#[derive(Parser)]
struct Cli {
    /// Number of rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Send the events to the index's own thread.
    #[arg(long)]
    thread: bool,
    /// Send events with tokens, so that hashing these is measured too.
    #[arg(long)]
    tokens: bool,
    #[command(flatten)]
    load: LoadArgs,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let load = Load::new(&cli.load)?;
    let mut events = Vec::new();
    for payload in &load.payloads {
        events.push((ours(payload.who), our_batch(&payload.bytes)?));
    }
    let mut best = Duration::MAX;
    let per_block = |elapsed: Duration| elapsed.as_secs_f64() * 1e9 / load.stored() as f64;
    for round in 0..cli.rounds {
        let config =
            IndexConfig { byte_budget: 16 << 30, block_size: load.block_tokens, ..IndexConfig::default() };
        let index = if cli.thread { PrefixIndex::new(config)? } else { PrefixIndex::synchronous(config) };
        if !cli.tokens {
            events.iter_mut().for_each(|(_, batch)| index.hash_tokens(batch));
        }
        let events = events.clone();
        let start = Instant::now();
        for ((worker, rank), mut batch) in events {
            while let Err(back) = index.events(worker, rank, batch) {
                batch = back;
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        index.flush();
        let elapsed = start.elapsed();
        best = best.min(elapsed);
        writeln!(std::io::stdout(), "round {round}: {:.1} ns for a stored block", per_block(elapsed))?;
    }
    writeln!(std::io::stdout(), "best: {:.1} ns", per_block(best))?;
    Ok(())
}
