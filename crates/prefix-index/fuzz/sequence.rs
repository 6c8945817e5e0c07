//! An engine's events on an unreliable connection: lost, repeated, replayed in part, restarted. The index may
//! know less than the engine holds, never more. And arbitrary events: removing the worker removes everything.
#![no_main]

use std::{
    collections::HashSet,
    sync::{
        LazyLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use prefix_index::{
    BlockHash, DpRank, IndexConfig, Overlaps, PrefixIndex, Salt, WorkerId, block_hashes,
    events::{Batch, ExtraKey, KvEvent, Sequencer, Step, Stored, Tier},
};

const BLOCK: usize = 4;
const RANK: DpRank = DpRank(0);

static INDEX: LazyLock<PrefixIndex> = LazyLock::new(|| {
    let config = IndexConfig { byte_budget: 1 << 20, ttl: Duration::from_secs(1), block_size: BLOCK };
    PrefixIndex::new(config).expect("a thread")
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
    let (mut engine, mut met) = (Engine::default(), HashSet::new());
    let mut line = Sequencer::new(4, 1 << 20);
    INDEX.set_live(worker, RANK, true);
    // If the last messages were lost, the index cannot know of them.
    let mut behind = false;
    let mut seen = 0;
    for (act, fate) in acts {
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
        locals: None,
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
    for (size, parent, hashes, act, medium) in events {
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
                locals: None,
            }),
            Act::Remove(_) | Act::Restart => KvEvent::Removed { hashes, tier, group: None },
            Act::Clear => KvEvent::Cleared,
        };
        send(worker, event);
    }
}
