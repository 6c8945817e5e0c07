//! Bytes an index holds after a load, by a counting allocator (`cargo xtask bench index` runs it once for
//! each side). A process of its own, because counting slows every allocation.

use std::io::Write as _;

use clap::Parser;
use peak_alloc::PeakAlloc;
use pointsman_oracle::{
    contest::{Ours, Side, Theirs},
    load::{Load, LoadArgs},
};

#[global_allocator]
static COUNTED: PeakAlloc = PeakAlloc;

/// Live bytes of one index after the load.
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
        other => anyhow::bail!("side `{other}` is none of: pointsman, oracle"),
    };
    writeln!(std::io::stdout(), "{bytes}")?;
    Ok(())
}

/// What the decoder remembers is not counted, nor are threads' stacks.
fn bytes<S: Side>(load: &Load) -> anyhow::Result<usize> {
    let before = COUNTED.current_usage();
    let side = S::new(load.block_tokens, 1)?;
    let mut reader = S::Reader::default();
    for (number, payload) in (1..).zip(&load.payloads) {
        side.feed(side.read(&mut reader, payload, number)?);
        // So that no queue grows: its room might stay.
        if number % 64 == 0 {
            side.drain();
        }
    }
    side.drain();
    drop(reader);
    Ok(COUNTED.current_usage().saturating_sub(before))
}
