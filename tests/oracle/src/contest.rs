//! Both indexes behind one interface, so that one bench runs both in the same way.

use std::collections::HashMap;

use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, LocalBlockHash, RouterEvent, ThreadPoolIndexer,
    zmq_wire::ZmqEventNormalizer,
};
use prefix_index::{BlockHash, DpRank, IndexConfig, Overlaps, PrefixIndex, WorkerId, events::Batch};

use crate::{
    engine::Tenant,
    load::Payload,
    sides::{Who, our_batch, our_hashes, ours, their_event, their_hashes},
};

/// An index that applies events and serves lookups.
pub trait Side: Sized + Sync {
    /// Name in the report.
    const NAME: &'static str;
    /// A decoded event.
    type Event: Clone + Send;
    /// State of the decoder.
    type Reader: Default;
    /// Hashes of a prompt's blocks.
    type Prompt: Sync;
    /// Buffers of a lookup.
    type Scratch: Default;

    /// Creates an empty index.
    fn new(block_tokens: usize, threads: usize) -> anyhow::Result<Self>;
    /// Decodes a payload with the index's own code.
    fn read(&self, reader: &mut Self::Reader, payload: &Payload, number: u64) -> anyhow::Result<Self::Event>;
    /// Hashes the tokens of an event, if it has any.
    fn hash(&self, event: &mut Self::Event);
    /// Sends an event to the index. Waits while its queue is full.
    fn feed(&self, event: Self::Event);
    /// Waits until all events are visible to lookups.
    fn drain(&self);
    /// Hashes a prompt's blocks.
    fn name(&self, tokens: &[u32]) -> Self::Prompt;
    /// Looks up how many blocks of a prompt each worker holds.
    fn ask(&self, prompt: &Self::Prompt, scratch: &mut Self::Scratch);
}

/// Pointsman's index.
#[derive(Debug)]
pub struct Ours {
    index: PrefixIndex,
    block_tokens: usize,
}

impl Side for Ours {
    const NAME: &'static str = "pointsman";
    type Event = (WorkerId, DpRank, Batch);
    type Reader = ();
    type Prompt = Vec<BlockHash>;
    type Scratch = Overlaps;

    fn new(block_tokens: usize, _: usize) -> anyhow::Result<Self> {
        let config =
            IndexConfig { byte_budget: 16 << 30, block_size: block_tokens, ..IndexConfig::default() };
        Ok(Self { index: PrefixIndex::new(config)?, block_tokens })
    }

    fn read(&self, (): &mut (), payload: &Payload, _: u64) -> anyhow::Result<Self::Event> {
        let (worker, rank) = ours(payload.who);
        Ok((worker, rank, our_batch(&payload.bytes)?))
    }

    fn hash(&self, (_, _, batch): &mut Self::Event) {
        self.index.hash_tokens(batch);
    }

    fn feed(&self, (worker, rank, mut batch): Self::Event) {
        while let Err(back) = self.index.events(worker, rank, batch) {
            batch = back;
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }

    fn drain(&self) {
        self.index.flush();
    }

    fn name(&self, tokens: &[u32]) -> Vec<BlockHash> {
        our_hashes(Tenant::default(), tokens, self.block_tokens)
    }

    fn ask(&self, prompt: &Vec<BlockHash>, scratch: &mut Overlaps) {
        self.index.matches(prompt, std::hint::black_box(scratch));
    }
}

/// The oracle's concurrent tree with its pool of writers. Lookups call the tree directly, without its async
/// interface.
pub struct Theirs {
    pool: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    block_tokens: u32,
}

impl Side for Theirs {
    const NAME: &'static str = "oracle";
    type Event = RouterEvent;
    type Reader = HashMap<Who, ZmqEventNormalizer>;
    type Prompt = Vec<LocalBlockHash>;
    type Scratch = ();

    fn new(block_tokens: usize, threads: usize) -> anyhow::Result<Self> {
        let block_tokens = u32::try_from(block_tokens)?;
        let pool = ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), threads, block_tokens);
        Ok(Self { pool, block_tokens })
    }

    fn read(&self, reader: &mut Self::Reader, payload: &Payload, number: u64) -> anyhow::Result<RouterEvent> {
        let normalizer =
            reader.entry(payload.who).or_insert_with(|| ZmqEventNormalizer::new(self.block_tokens));
        their_event(normalizer, &payload.bytes, number, payload.who)
    }

    fn hash(&self, _: &mut RouterEvent) {
        // Its decoder has hashed them.
    }

    fn feed(&self, event: RouterEvent) {
        // Its queues are unbounded.
        let _ = self.pool.enqueue_event(event);
    }

    fn drain(&self) {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        if let Ok(runtime) = runtime {
            runtime.block_on(self.pool.flush());
        }
    }

    fn name(&self, tokens: &[u32]) -> Vec<LocalBlockHash> {
        their_hashes(Tenant::default(), tokens, self.block_tokens)
    }

    fn ask(&self, prompt: &Vec<LocalBlockHash>, (): &mut ()) {
        std::hint::black_box(self.pool.backend().find_matches_impl(prompt, false));
    }
}
