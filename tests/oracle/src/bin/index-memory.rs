//! Measures an index's bytes after a load with a counting allocator. The bench `index` runs it once
//! for each side. A process of its own, because counting slows every allocation.

use std::io::Write as _;

use clap::Parser;
use peak_alloc::PeakAlloc;
use pointsman_oracle::{
    contest::{Ours, Side, Theirs},
    load::{Load, LoadArgs},
};

#[global_allocator]
static COUNTED: PeakAlloc = PeakAlloc;

/// Prints the live bytes of one index after the load.
#[derive(Parser)]
struct Cli {
    /// `pointsman` or `oracle`.
    side: String,
    #[command(flatten)]
    load: LoadArgs,
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    let load = Load::new(&cli.load)?;
    let bytes = match cli.side.as_str() {
        Ours::NAME => bytes::<Ours>(&load)?,
        Theirs::NAME => bytes::<Theirs>(&load)?,
        other => anyhow::bail!("unknown side `{other}`: expected pointsman or oracle"),
    };
    writeln!(std::io::stdout(), "{bytes}")?;
    Ok(())
}

/// Returns the live bytes, without the decoder's state and the threads' stacks.
fn bytes<S: Side>(load: &Load) -> anyhow::Result<usize> {
    let before = COUNTED.current_usage();
    let side = S::new(load.block_tokens, 1)?;
    let mut reader = S::Reader::default();
    for (number, payload) in (1..).zip(&load.payloads) {
        side.feed(side.read(&mut reader, payload, number)?);
        // Drain often, so that no queue grows and keeps its capacity.
        if number % 64 == 0 {
            side.drain();
        }
    }
    side.drain();
    drop(reader);
    Ok(COUNTED.current_usage().saturating_sub(before))
}
