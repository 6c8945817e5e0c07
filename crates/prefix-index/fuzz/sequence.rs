//! An engine's events on an unreliable connection: lost, repeated, replayed in part, restarted. The index may
//! know less than the engine holds, never more. And arbitrary events: removing the worker removes everything.
//! In between, prompts of bytes are sent to the engine, which refuses some of them.
#![no_main]

use std::{
    collections::HashSet,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use prefix_index::{
    BlockHash, DpRank, IndexConfig, Overlaps, Prefix, PrefixIndex, ProvisionalRecord, Salt, WorkerId,
    block_hashes,
    events::{Batch, ExtraKey, KvEvent, Sequencer, Step, Stored, Tier},
};
use tokio::time::Instant;

const BLOCK: usize = 4;
const RANK: DpRank = DpRank(0);

static INDEX: LazyLock<Arc<PrefixIndex>> = LazyLock::new(|| {
    let config = IndexConfig { byte_budget: 1 << 20, ttl: Duration::from_secs(1), block_size: BLOCK };
    Arc::new(PrefixIndex::new(config).expect("a thread"))
});
static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Arbitrary, Debug)]
enum Input {
    /// A prefix tree that grows and shrinks, and the fate of each message.
    Honest(Vec<(Act, Fate)>),
    /// Arbitrary events: blocks that are their own parents, circles, duplicate hashes.
    Hostile(Vec<(u8, Option<u8>, Vec<u8>, Act, u8)>),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Act {
    /// Stores a block below the n-th held block, or at the root.
    Store(u8, u8),
    /// Removes the n-th held block, if it has no children.
    Remove(u8),
    Clear,
    /// Restarts the engine with an empty cache and sequence number 0.
    Restart,
    /// Sends a prompt of bytes, by its last bytes and its length; or the engine refuses the one before.
    Prompt(u8, u8, bool),
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Fate {
    Arrives,
    Repeats,
    IsLost,
    /// Arrives after a replay of the missed messages, except every n-th one.
    IsReplayed(u8),
}

/// A held prefix, by the last token of each of its blocks.
type Path = Vec<u8>;

#[derive(Default)]
struct Engine {
    held: Vec<Path>,
    log: Vec<Vec<u8>>,
}

/// Prompts of bytes that the engine was sent.
#[derive(Default)]
struct Prompts {
    all: Vec<Prefix>,
    not_refused: Vec<(Prefix, ProvisionalRecord)>,
}

fuzz_target!(|input: Input| {
    let worker = WorkerId(NEXT.fetch_add(1, Ordering::Relaxed));
    match input {
        Input::Honest(acts) => honest(worker, &acts),
        Input::Hostile(events) => hostile(worker, &events),
    }
    INDEX.set_live(worker, RANK, false);
    INDEX.remove_worker(worker);
    INDEX.flush();
    let stats = INDEX.stats();
    assert_eq!((stats.blocks, stats.records, stats.bytes), (0, 0, 0));
});

fn honest(worker: WorkerId, acts: &[(Act, Fate)]) {
    let (mut engine, mut met, mut prompts) = (Engine::default(), HashSet::new(), Prompts::default());
    let mut line = Sequencer::new(4, 1 << 20);
    INDEX.set_live(worker, RANK, true);
    // If the last messages were lost, the index cannot know of them.
    let mut behind = false;
    let mut seen = 0;
    for (act, fate) in acts {
        if prompts.act(worker, *act) {
            continue;
        }
        // Only falling numbers reveal a restart, so it has to follow a message that arrived.
        if matches!(act, Act::Restart) && seen == 0 {
            continue;
        }
        let Some(event) = engine.act(*act) else { continue };
        met.extend(engine.held.iter().cloned());
        engine.log.push(event);
        let seq = engine.log.len() as u64 - 1;
        behind = matches!(fate, Fate::IsLost) && seq > 0;
        if !behind {
            deliver(worker, &mut line, &engine, seq, *fate);
            seen = seq;
        }
    }
    INDEX.flush();
    prompts.check(worker);
    if behind {
        return;
    }
    let mut overlaps = Overlaps::default();
    for path in &met {
        let tokens: Vec<u32> = path.iter().flat_map(|last| tokens_of(*last)).collect();
        let blocks: Vec<BlockHash> = block_hashes(&tokens, BLOCK, &Salt::default());
        INDEX.matches(&blocks, &mut overlaps);
        let found = overlaps.get(worker, RANK).device as usize;
        let truth =
            (1..=path.len()).take_while(|depth| engine.held.contains(&path[..*depth].to_vec())).count();
        assert!(found <= truth, "{path:?}: {found} of {truth}");
    }
}

fn deliver(worker: WorkerId, line: &mut Sequencer<Vec<u8>>, engine: &Engine, seq: u64, fate: Fate) {
    let step = line.on(seq, engine.log[seq as usize].clone());
    if matches!(fate, Fate::Repeats) {
        assert_eq!(line.on(seq, Vec::new()), Step::Duplicate);
    }
    let Step::Gap { from, to } = step else { return take(worker, step) };
    if let Fate::IsReplayed(skip) = fate {
        for missed in (from..=to).filter(|missed| skip == 0 || missed % u64::from(skip) != 0) {
            let step = line.replayed(missed, engine.log[missed as usize].clone());
            take(worker, step);
        }
    }
    for step in line.finish() {
        take(worker, step);
    }
}

/// Applies a step as a feed does.
fn take(worker: WorkerId, step: Step<Vec<u8>>) {
    let payload = match step {
        Step::Apply(payload) => payload,
        Step::Restarted(payload) | Step::Lost(payload) => {
            INDEX.forget(worker, RANK);
            payload
        }
        Step::Duplicate | Step::Kept | Step::Gap { .. } => return,
    };
    send(worker, read(&payload));
}

fn send(worker: WorkerId, event: KvEvent) {
    let mut batch = Batch { ts: 0.0, dp_rank: None, events: vec![event] };
    while let Err(returned) = INDEX.events(worker, RANK, batch) {
        batch = returned;
        std::thread::yield_now();
    }
}

impl Prompts {
    /// Performs an act. Returns false if it is not about a prompt.
    fn act(&mut self, worker: WorkerId, act: Act) -> bool {
        let Act::Prompt(last, length, is_sent) = act else { return false };
        if !is_sent {
            self.not_refused.pop();
            return true;
        }
        let length = usize::from(length);
        let bytes: Vec<u8> = (0..length).map(|at| if at < 40 { b'a' } else { b'a' + last % 4 }).collect();
        let prompt = Prefix::of_bytes(&bytes, BLOCK, &Salt::default());
        self.all.push(prompt.clone());
        let record = INDEX.record_provisionally(worker, RANK, &prompt, Instant::now());
        self.not_refused.push((prompt, record));
        true
    }

    fn check(&self, worker: WorkerId) {
        let mut overlaps = Overlaps::default();
        for prompt in &self.all {
            INDEX.matches(prompt.hashes(), &mut overlaps);
            let common = |(one, _): &(Prefix, _)| {
                one.hashes().iter().zip(prompt.hashes().iter()).take_while(|(one, other)| one == other).count()
            };
            let most = self.not_refused.iter().map(common).max().unwrap_or(0);
            let found = overlaps.get(worker, RANK).device as usize;
            assert!(found <= most, "{found} of {most}");
        }
    }
}

impl Engine {
    /// Performs an act. Returns its message if it changed anything.
    fn act(&mut self, act: Act) -> Option<Vec<u8>> {
        match act {
            Act::Store(below, last) => {
                let mut path = match usize::from(below) % (self.held.len() + 1) {
                    0 => Path::new(),
                    place => self.held[place - 1].clone(),
                };
                path.push(last % 4);
                if self.held.contains(&path) || path.len() > 12 {
                    return None;
                }
                self.held.push(path.clone());
                Some([b"s".as_slice(), &path].concat())
            }
            Act::Remove(place) => {
                let path = self.held.get(usize::from(place) % self.held.len().max(1))?.clone();
                if self.held.iter().any(|other| other.len() > path.len() && other.starts_with(&path)) {
                    return None;
                }
                self.held.retain(|other| *other != path);
                Some([b"r".as_slice(), &path].concat())
            }
            Act::Clear => {
                self.held.clear();
                Some(b"c".to_vec())
            }
            Act::Restart => {
                *self = Self::default();
                Some(b"c".to_vec())
            }
            Act::Prompt(..) => None,
        }
    }
}

fn read(message: &[u8]) -> KvEvent {
    let (kind, path) = message.split_first().expect("a kind");
    match kind {
        b's' => store(path),
        b'r' => KvEvent::Removed { hashes: vec![name(path)], tier: Tier::Device, group: None },
        _ => KvEvent::Cleared,
    }
}

fn store(path: &[u8]) -> KvEvent {
    let (last, above) = path.split_last().expect("a block");
    KvEvent::Stored(Stored {
        hashes: vec![name(path)],
        parent: (!above.is_empty()).then(|| name(above)),
        token_ids: tokens_of(*last).to_vec(),
        block_size: BLOCK as u32,
        lora: None,
        tier: Tier::Device,
        extra_keys: Vec::new(),
        group: None,
        kind: None,
        reused: false,
        locals: None,
        lacks_tokens: false,
    })
}

/// Returns the engine's hash of a block, unique for each path.
fn name(path: &[u8]) -> u64 {
    path.iter().fold(1, |name, last| name * 5 + u64::from(*last) + 1)
}

fn tokens_of(last: u8) -> [u32; BLOCK] {
    [u32::from(last); BLOCK]
}

fn hostile(worker: WorkerId, events: &[(u8, Option<u8>, Vec<u8>, Act, u8)]) {
    let mut prompts = Prompts::default();
    for (size, parent, hashes, act, medium) in events {
        if prompts.act(worker, *act) {
            continue;
        }
        let tier = [Tier::Device, Tier::Host, Tier::Disk][usize::from(*medium) % 3];
        let hashes: Vec<u64> = hashes.iter().map(|hash| u64::from(hash % 16)).collect();
        let event = match act {
            Act::Store(tokens, short) => KvEvent::Stored(Stored {
                token_ids: vec![
                    1;
                    (hashes.len() * usize::from(*size % 9)).saturating_sub(usize::from(short % 8))
                        * usize::from(tokens & 1)
                ],
                hashes,
                parent: parent.map(|parent| u64::from(parent % 16)),
                block_size: u32::from(*size % 9),
                lora: None,
                tier,
                extra_keys: vec![vec![ExtraKey::Text("a".to_owned())]; usize::from(tokens % 3)],
                group: (size % 5 == 4).then_some(u32::from(*size)),
                kind: None,
                reused: false,
        locals: None,
        lacks_tokens: false,
            }),
            Act::Remove(_) | Act::Restart | Act::Prompt(..) => KvEvent::Removed { hashes, tier, group: None },
            Act::Clear => KvEvent::Cleared,
        };
        send(worker, event);
    }
}
