//! Load of the index bench: a trace of prompts, served by modelled engines, and the event payloads that they
//! send.

use std::{
    collections::HashMap,
    io::{BufRead as _, BufReader},
    path::PathBuf,
};

use anyhow::{Context as _, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde::Deserialize;

use crate::{
    engine::{Change, Engine, Tenant},
    sides::Who,
    wire,
};

/// Tokens per hash id of a Mooncake trace.
const ID_TOKENS: usize = 512;

/// Options of the load.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// Mooncake trace, JSON lines with `hash_ids` [default: the excerpt in tests/fixtures].
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Number of engines.
    #[arg(long, default_value_t = 64)]
    pub workers: u64,
    /// Tokens per block. A hash id of the trace stands for 512 tokens.
    #[arg(long, default_value_t = 64)]
    pub block_tokens: usize,
    /// Capacity of an engine's cache in tokens.
    #[arg(long, default_value_t = 1_000_000)]
    pub cache_tokens: usize,
    /// Maximum number of prompts of the trace.
    #[arg(long)]
    pub prompts: Option<usize>,
}

/// One message of an engine.
#[derive(Clone, Debug)]
pub struct Payload {
    /// Sender.
    pub who: Who,
    /// Msgpack.
    pub bytes: Vec<u8>,
    /// Number of stored blocks.
    pub stored: u64,
}

/// The load.
#[derive(Debug)]
pub struct Load {
    /// Messages in order.
    pub payloads: Vec<Payload>,
    /// Prompts as block numbers.
    pub prompts: Vec<Vec<u64>>,
    /// Number of pairs of engine and block at the end.
    pub resident: u64,
    /// Tokens per block.
    pub block_tokens: usize,
}

#[derive(Deserialize)]
struct Line {
    hash_ids: Vec<u64>,
}

impl Load {
    /// Replays the trace on the modelled engines.
    ///
    /// # Errors
    /// The trace cannot be read, or 512 is not a multiple of the block size.
    pub fn new(args: &LoadArgs) -> anyhow::Result<Self> {
        ensure!(
            args.block_tokens > 0 && ID_TOKENS.is_multiple_of(args.block_tokens),
            "512 is no multiple of {} tokens",
            args.block_tokens
        );
        let prompts = prompts(args)?;
        let mut engines: Vec<Engine> =
            (0..args.workers).map(|_| Engine::new(args.cache_tokens / args.block_tokens)).collect();
        let mut random = StdRng::seed_from_u64(7);
        let mut last: HashMap<u64, usize> = HashMap::new();
        let mut payloads = Vec::new();
        for ids in &prompts {
            // Three of four prompts that continue an earlier one go to the same engine, others to a random
            // one.
            let known = ids.iter().skip(ID_TOKENS / args.block_tokens).rev().find_map(|id| last.get(id));
            let stays = known.filter(|_| random.random_bool(0.75)).copied();
            let place = stays.unwrap_or_else(|| random.random_range(0..engines.len()));
            last.extend(ids.iter().map(|id| (*id, place)));
            for change in engines[place].serve(Tenant::default(), ids) {
                let stored =
                    if let Change::Stored { blocks, .. } = &change { blocks.len() as u64 } else { 0 };
                let bytes = wire::encode(&change, args.block_tokens)?;
                payloads.push(Payload { who: (place as u64 + 1, 0), bytes, stored });
            }
        }
        let resident = engines.iter().map(|engine| engine.len() as u64).sum();
        Ok(Self { payloads, prompts, resident, block_tokens: args.block_tokens })
    }

    /// Returns the total number of stored blocks.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.payloads.iter().map(|payload| payload.stored).sum()
    }
}

fn prompts(args: &LoadArgs) -> anyhow::Result<Vec<Vec<u64>>> {
    let excerpt = concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/mooncake_conversation_400.jsonl");
    let path = args.trace.clone().unwrap_or_else(|| excerpt.into());
    let file = std::fs::File::open(&path).with_context(|| format!("trace `{}`", path.display()))?;
    let parts = (ID_TOKENS / args.block_tokens) as u64;
    let lines = BufReader::new(file).lines().take(args.prompts.unwrap_or(usize::MAX));
    lines
        .map(|line| {
            let line: Line = serde_json::from_str(&line?)?;
            Ok(line.hash_ids.iter().flat_map(|id| (0..parts).map(move |part| id * parts + part)).collect())
        })
        .collect()
}
