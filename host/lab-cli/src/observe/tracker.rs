//! Finds the engine of a request by KV events: the engine that stores the blocks of its prompt after it
//! arrived.
//!
//! A request that no engine stored blocks for ran on one that had them all. The index knows which.

use std::{
    cmp::Reverse,
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use parking_lot::Mutex;
use pointsman_cli::print;
use pointsman_workers::events::{FeedConfig, FeedCounters, Sink, run};
use prefix_index::{BlockHash, DpRank, IndexConfig, Overlaps, PrefixIndex, WorkerId, events::Batch};
use tokio::time::{Duration, Instant, interval};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Memory of what the engines have in their caches, bytes.
const INDEX_BYTES: usize = 256 * 1024 * 1024;
/// Requests whose engine is not found yet. Further ones are not looked for.
const MAX_PENDING: usize = 4_096;
/// Hashes of their prompts in all: 32 MiB. A request beyond it is not looked for.
const MAX_PENDING_HASHES: usize = 4 * 1024 * 1024;
/// How long an engine may take to store the blocks of a prompt.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often the requests are looked up.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Time after which the observer names addresses of KV events that it is not connected to.
const FIRST_EVENTS_TIMEOUT: Duration = Duration::from_secs(3);

/// A request whose engine is not found yet.
struct Pending {
    number: u64,
    hashes: Arc<[BlockHash]>,
    /// Blocks of the prompt that each engine had without this request.
    before: Vec<u32>,
    /// The only engine that had the whole prompt when the request arrived.
    only_holder: Option<u32>,
    since: Instant,
}

#[derive(Default)]
struct State {
    /// Longest prompts first, equal lengths in the order of arrival.
    pending: Vec<Pending>,
    /// Number of hashes of these requests.
    hashes: usize,
    followed: Followed,
    overlaps: Overlaps,
}

/// What KV events told about the requests.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Followed {
    /// Engines that were found, by the number of the request.
    pub(super) engines: HashMap<u64, u32>,
    /// Requests with known token ids that were not looked for, because too many were.
    pub(super) left_out: u64,
    /// Messages that were malformed or too long.
    pub(super) bad_messages: u64,
    /// Whether the engines have addresses of KV events.
    pub(super) has_feeds: bool,
    /// Engines whose KV events could never be connected to.
    pub(super) unconnected: Vec<u32>,
    /// Engines that were connected to and sent no KV event.
    pub(super) silent: Vec<u32>,
}

/// What is known of the feed of an engine.
#[derive(Default)]
struct Feed {
    was_connected: AtomicBool,
    has_told: AtomicBool,
}

/// Follows the KV events of engines.
pub(super) struct Tracker {
    index: PrefixIndex,
    engines: u64,
    feeds: Vec<Feed>,
    state: Mutex<State>,
    /// Counters of all feeds.
    counters: Arc<FeedCounters>,
}

/// Hands the events of an engine to the index.
struct EngineSink {
    tracker: Arc<Tracker>,
    engine: WorkerId,
}

impl EngineSink {
    /// Notes something of this engine's feed.
    fn note(&self, of: impl Fn(&Feed) -> &AtomicBool) {
        let feed = usize::try_from(self.engine.0).ok().and_then(|engine| self.tracker.feeds.get(engine));
        feed.into_iter().for_each(|feed| of(feed).store(true, Relaxed));
    }
}

impl Sink for EngineSink {
    fn apply(&self, batch: Batch) {
        self.note(|feed| &feed.has_told);
        // The index has no queue that could be full.
        let _ = self.tracker.index.events(self.engine, DpRank::default(), batch);
    }

    fn forget(&self, _why: &'static str) {
        self.tracker.index.forget(self.engine, DpRank::default());
    }

    fn live(&self, live: bool) {
        if live {
            self.note(|feed| &feed.was_connected);
        }
        self.tracker.index.set_live(self.engine, DpRank::default(), live);
    }
}

impl Tracker {
    pub(super) fn new(engines: usize, block_tokens: u32) -> Self {
        let config = IndexConfig {
            byte_budget: INDEX_BYTES,
            block_size: block_tokens as usize,
            ..IndexConfig::default()
        };
        let index = PrefixIndex::synchronous(config);
        let feeds = (0..engines).map(|_| Feed::default()).collect();
        Self { index, engines: engines as u64, feeds, state: Mutex::default(), counters: Arc::default() }
    }

    /// Follows the events of each engine, and looks for engines, until `stop`.
    pub(super) fn start(
        self: &Arc<Self>,
        endpoints: &[String],
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) {
        for (engine, endpoint) in (0..).zip(endpoints) {
            let sink = Arc::new(EngineSink { tracker: Arc::clone(self), engine: WorkerId(engine) });
            let counters = Arc::clone(&self.counters);
            let config = FeedConfig { counters, ..FeedConfig::new(endpoint.clone()) };
            tasks.spawn(run(config, sink, stop.clone()));
        }
        let (tracker, stop) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move {
            let mut ticks = interval(LOOK_INTERVAL);
            while stop.run_until_cancelled(ticks.tick()).await.is_some() {
                tracker.look(Instant::now());
            }
        });
    }

    /// Adds a request with the hashes of its prompt's blocks.
    pub(super) fn add(&self, number: u64, hashes: &Arc<[BlockHash]>) {
        let mut state = self.state.lock();
        if hashes.is_empty() {
            return;
        }
        if state.pending.len() >= MAX_PENDING || state.hashes + hashes.len() > MAX_PENDING_HASHES {
            state.followed.left_out += 1;
            return;
        }
        state.hashes += hashes.len();
        let before = self.depths(&mut state.overlaps, hashes);
        let only_holder = only_holder(&before, block_count(hashes));
        let hashes = Arc::clone(hashes);
        state.pending.push(Pending { number, hashes, before, only_holder, since: Instant::now() });
    }

    /// Returns how many blocks of a prompt each engine has.
    fn depths(&self, overlaps: &mut Overlaps, hashes: &[BlockHash]) -> Vec<u32> {
        self.index.matches(hashes, overlaps);
        let of = |engine| {
            let matched = overlaps.get(WorkerId(engine), DpRank::default());
            matched.device + matched.host + matched.disk
        };
        (0..self.engines).map(of).collect()
    }

    /// Looks which engine has the whole prompt of a request now, and had not before.
    fn look(&self, now: Instant) {
        let mut state = self.state.lock();
        let State { pending, hashes: pending_hashes, followed, overlaps } = &mut *state;
        // What explains a longer prompt also explains its beginnings, which other requests may be.
        pending.sort_by_key(|request| Reverse(request.hashes.len()));
        let mut waiting = Vec::with_capacity(pending.len());
        // Prompts that were found in this round, and where.
        let mut explained: Vec<(Arc<[BlockHash]>, usize)> = Vec::new();
        for mut request in pending.drain(..) {
            let depths = self.depths(overlaps, &request.hashes);
            let whole = block_count(&request.hashes);
            for (engine, (before, depth)) in request.before.iter_mut().zip(&depths).enumerate() {
                // What another request stored is not this one's; evicted blocks may be stored again.
                let is_explained = explained.iter().any(|(hashes, at)| {
                    *at == engine && hashes.get(request.hashes.len() - 1) == request.hashes.last()
                });
                *before = if is_explained { *depth } else { (*before).min(*depth) };
            }
            let grown = depths.iter().zip(&request.before);
            match grown.enumerate().find(|(_, (depth, before))| **depth >= whole && **before < whole) {
                Some((engine, _)) => {
                    followed.engines.insert(request.number, u32::try_from(engine).unwrap_or(u32::MAX));
                    explained.push((request.hashes, engine));
                }
                None if now.duration_since(request.since) >= PATIENCE => {
                    followed.engines.extend(request.only_holder.map(|engine| (request.number, engine)));
                }
                None => waiting.push(request),
            }
        }
        *pending_hashes = waiting.iter().map(|request| request.hashes.len()).sum();
        *pending = waiting;
    }

    /// Returns what was found.
    pub(super) fn finish(&self) -> Followed {
        // The last look gives up every request.
        self.look(Instant::now() + PATIENCE);
        let FeedCounters { decode_errors, violations, .. } = &*self.counters;
        let bad_messages = decode_errors.load(Relaxed) + violations.load(Relaxed);
        let silent =
            self.engines_with(|feed| feed.was_connected.load(Relaxed) && !feed.has_told.load(Relaxed));
        let found = std::mem::take(&mut self.state.lock().followed);
        Followed { bad_messages, has_feeds: true, unconnected: self.unconnected(), silent, ..found }
    }

    /// Returns the engines whose KV events could not be connected to so far.
    pub(super) fn unconnected(&self) -> Vec<u32> {
        self.engines_with(|feed| !feed.was_connected.load(Relaxed))
    }

    fn engines_with(&self, is_so: impl Fn(&Feed) -> bool) -> Vec<u32> {
        (0_u32..).zip(&self.feeds).filter(|(_, feed)| is_so(feed)).map(|(engine, _)| engine).collect()
    }
}

/// Names after a while each address of KV events that could not be connected to.
pub(super) async fn tell_of_no_events(tracker: Arc<Tracker>, addresses: Vec<String>) {
    tokio::time::sleep(FIRST_EVENTS_TIMEOUT).await;
    for address in tracker.unconnected().iter().filter_map(|engine| addresses.get(*engine as usize)) {
        let _ = print(&format!(
            "warning: {address}: no KV events can be read: is this the address to which the engine publishes them \
             (vLLM and SGLang: --kv-events-config)?\n"
        ));
    }
}

/// Returns the number of a prompt's blocks.
fn block_count(hashes: &[BlockHash]) -> u32 {
    u32::try_from(hashes.len()).unwrap_or(u32::MAX)
}

/// Returns the only engine that has a whole prompt; `None` when several have it, or none.
fn only_holder(depths: &[u32], whole: u32) -> Option<u32> {
    let mut holders = (0_u32..).zip(depths).filter(|(_, depth)| **depth >= whole);
    let (engine, _) = holders.next()?;
    holders.next().is_none().then_some(engine)
}

#[cfg(test)]
mod tests {
    use prefix_index::{
        Salt, block_hashes,
        events::{KvEvent, Stored},
    };

    use super::*;

    #[tokio::test]
    async fn the_beginning_of_a_prompt_that_another_engine_stored_is_not_taken_for_it() {
        let tracker = Arc::new(Tracker::new(2, 4));
        let long: Vec<u32> = (0..16).collect();
        tracker.add(1, &hashes(&long[..8]));
        tracker.add(2, &hashes(&long));
        store(&tracker, 0, &long);
        tracker.look(Instant::now());
        store(&tracker, 1, &long[..8]);
        tracker.look(Instant::now());
        assert_eq!(tracker.finish().engines, HashMap::from([(1, 1), (2, 0)]));
    }

    #[tokio::test]
    async fn a_prompt_that_was_stored_before_its_copy_came_is_on_its_only_holder() {
        let tracker = Arc::new(Tracker::new(2, 4));
        let long: Vec<u32> = (0..16).collect();
        store(&tracker, 1, &long[..8]);
        tracker.add(1, &hashes(&long[..8]));
        tracker.add(2, &hashes(&long));
        store(&tracker, 0, &long);
        tracker.look(Instant::now());
        assert_eq!(tracker.finish().engines, HashMap::from([(1, 1), (2, 0)]));
    }

    fn prompt(seed: u32) -> Vec<u32> {
        (seed..seed + 8).collect()
    }

    fn hashes(tokens: &[u32]) -> Arc<[BlockHash]> {
        block_hashes(tokens, 4, &Salt::default()).into()
    }

    /// Tells the tracker that an engine stored the blocks of a prompt.
    fn store(tracker: &Arc<Tracker>, engine: u64, tokens: &[u32]) {
        let names = hashes(tokens).iter().map(|hash| hash.0 ^ engine).collect();
        let stored = Stored { hashes: names, token_ids: tokens.to_vec(), block_size: 4, ..Stored::default() };
        let sink = EngineSink { tracker: Arc::clone(tracker), engine: WorkerId(engine) };
        sink.live(true);
        sink.apply(Batch { ts: 0.0, dp_rank: None, events: vec![KvEvent::Stored(stored)] });
    }

    #[tokio::test]
    async fn the_engine_that_stores_a_prompt_after_it_came_served_it() {
        let tracker = Arc::new(Tracker::new(3, 4));
        store(&tracker, 0, &prompt(0));
        tracker.add(1, &hashes(&prompt(0)));
        tracker.add(2, &hashes(&prompt(100)));
        tracker.add(3, &hashes(&prompt(200)));
        store(&tracker, 2, &prompt(100));
        tracker.look(Instant::now());
        assert_eq!(tracker.state.lock().followed.engines, HashMap::from([(2, 2)]));
        // The first had its blocks on one engine only, and nothing was stored. The third is on none.
        assert_eq!(tracker.finish().engines, HashMap::from([(1, 0), (2, 2)]));
    }

    #[tokio::test]
    async fn two_equal_prompts_on_two_engines_are_told_apart_by_their_order() {
        let tracker = Arc::new(Tracker::new(2, 4));
        tracker.add(1, &hashes(&prompt(0)));
        tracker.add(2, &hashes(&prompt(0)));
        store(&tracker, 1, &prompt(0));
        tracker.look(Instant::now());
        store(&tracker, 0, &prompt(0));
        tracker.look(Instant::now());
        assert_eq!(tracker.finish().engines, HashMap::from([(1, 1), (2, 0)]));
    }

    #[tokio::test]
    async fn requests_beyond_the_limit_of_hashes_are_counted_and_places_come_back() {
        let tracker = Arc::new(Tracker::new(1, 4));
        let long: Arc<[BlockHash]> = vec![BlockHash(7); MAX_PENDING_HASHES / 2].into();
        for number in 0..5 {
            tracker.add(number, &long);
        }
        assert_eq!(tracker.state.lock().hashes, MAX_PENDING_HASHES);
        tracker.look(Instant::now() + PATIENCE);
        tracker.add(5, &hashes(&prompt(0)));
        store(&tracker, 0, &prompt(0));
        assert_eq!(
            tracker.finish(),
            Followed {
                engines: HashMap::from([(5, 0)]),
                left_out: 3,
                bad_messages: 0,
                has_feeds: true,
                ..Followed::default()
            }
        );
    }
}
