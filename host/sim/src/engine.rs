//! The running engine: the core behind a lock, driven by a real clock, with its counters.
//!
//! It handles sequences, handoffs and bootstrap rooms, but not HTTP or the form of responses.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use parking_lot::Mutex;
use rand::RngExt;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, broadcast::Receiver, watch};
use tokio_util::sync::CancellationToken;

pub use self::counters::{Disconnect, Handoffs};
pub(crate) use self::{
    abort::{AbortGuard, Aborts},
    clock::Clock,
    counters::{Counters, HandoffResult, InFlight, Outcome, monotonic_nanos},
    rooms::{PrefillSeat, RoomFailure, Rooms},
    sequence::{Finish, Given, Link, Local, Plan, Sequence, Source, Step},
    verdict::Verdict,
};
use kv_events::Publisher;
use steps::Ticket;

use crate::{
    config::{Dialect, Role, SimConfig},
    core::{EngineCore, Job, JobId, Refusal, Token},
    faults::FaultBoard,
    leg::Leg,
};

mod abort;
mod clock;
mod counters;
pub(crate) mod kv_events;
mod rooms;
mod sequence;
pub(crate) mod side;
mod steps;
mod verdict;

/// State of one engine.
pub(crate) struct Engine {
    pub(crate) config: SimConfig,
    /// NIXL's engine id: a UUID that is new in every process.
    pub(crate) id: String,
    pub(crate) started_unix: u64,
    pub(crate) clock: Clock,
    pub(crate) faults: FaultBoard,
    pub(crate) counters: Counters,
    pub(crate) aborts: Aborts,
    pub(crate) rooms: Rooms,
    pub(crate) side: side::Client,
    /// Host and port of the side channel or bootstrap server, for other engines.
    pub(crate) advertised: (String, u16),
    /// Port of the KV events, if they are published.
    pub(crate) kv_port: Option<u16>,
    /// Current role. SGLang can change it.
    role: Mutex<Role>,
    scheduler: Mutex<Scheduler>,
    /// Notified when the core's next deadline may have changed.
    moved: Notify,
    /// Notified when there may be something to compute, or when there is nothing left to compute.
    work: Notify,
    dead: AtomicBool,
    /// Whether the engine is asleep. Requests wait meanwhile.
    asleep: watch::Sender<bool>,
    recorded: Mutex<VecDeque<Recorded>>,
    /// Ids of the responses that this engine stored.
    stored: Mutex<HashSet<String>>,
}

struct Scheduler {
    core: EngineCore,
    publisher: Option<Publisher>,
    sequences: HashMap<JobId, watch::Sender<Progress>>,
}

/// Work that the engine has done for a sequence.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Cached prompt tokens, once the sequence is admitted.
    admitted: Option<u32>,
    /// Tokens generated so far.
    produced: u32,
}

/// A recorded request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Recorded {
    /// Path of the request.
    pub path: String,
    /// Recognised leg; `None` if the request was refused earlier.
    pub leg: Option<Leg>,
    /// Headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body as text.
    pub body: String,
}

/// Response of `GET /sim/state`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimState {
    /// Whether a malformed handoff stopped the engine.
    pub dead: bool,
    /// Sequences in the batch, and ended ones that still hold their blocks.
    pub running: u32,
    /// Sequences in the queue, and admitted ones that wait for KV.
    pub waiting: u32,
    /// Blocks in use.
    pub used_blocks: u32,
    /// Blocks pinned for a handoff.
    pub pinned_blocks: u32,
    /// Handoffs that were not pulled before their lease expired.
    pub stranded: u64,
    /// Handoffs by result.
    pub handoffs: Handoffs,
    /// Bootstrap rooms used twice.
    pub duplicate_rooms: u64,
    /// Aborted requests.
    pub aborted: u64,
    /// Requests whose client disconnected before the end.
    pub client_disconnects: u64,
    /// Requests by `leg/outcome`.
    pub requests: HashMap<String, u64>,
    /// Number of times that a fault affected a request, by kind.
    pub faults_fired: BTreeMap<String, u64>,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache.
    pub prefix_hits: u64,
    /// Blocks evicted from the prefix cache.
    pub evicted_blocks: u64,
    /// Messages with KV events that were published.
    pub kv_messages: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
    /// Sequences that lost their blocks and were computed again.
    pub preemptions: u64,
}

impl Scheduler {
    /// Publishes the changes of the prefix cache.
    fn publish(&mut self) {
        if let Some(publisher) = &mut self.publisher {
            publisher.publish(&self.core.take_events());
        }
    }

    fn deliver(&self, token: &Token) {
        if let Some(progress) = self.sequences.get(&JobId(token.tag)) {
            progress.send_modify(|progress| progress.produced = token.number);
        }
    }
}

impl Engine {
    pub(crate) fn new(config: SimConfig, advertised: (String, u16), kv_port: Option<u16>) -> Self {
        let mut core = EngineCore::new(config.core(), config.seed);
        // Neither vLLM nor SGLang has events without a prefix cache.
        let publishes = config.kv_events && config.prefix_caching;
        let publisher = publishes
            .then(|| Publisher::new(config.dialect, config.block_size, config.kv_events_topic.clone()));
        if publisher.is_some() {
            core.collect_events();
        }
        Self {
            id: uuid(),
            started_unix: unix_now(),
            clock: Clock::new(config.speedup),
            faults: FaultBoard::new(config.faults.clone(), config.seed),
            counters: Counters::default(),
            aborts: Aborts::default(),
            rooms: Rooms::default(),
            side: side::Client::default(),
            advertised,
            kv_port,
            role: Mutex::new(config.role),
            scheduler: Mutex::new(Scheduler { core, publisher, sequences: HashMap::new() }),
            moved: Notify::new(),
            work: Notify::new(),
            dead: AtomicBool::new(false),
            asleep: watch::Sender::new(false),
            recorded: Mutex::new(VecDeque::new()),
            stored: Mutex::default(),
            config,
        }
    }

    /// Returns the current role.
    pub(crate) fn role(&self) -> Role {
        *self.role.lock()
    }

    pub(crate) fn set_role(&self, role: Role) {
        *self.role.lock() = role;
    }

    /// Submits a sequence.
    pub(crate) fn submit(self: &Arc<Self>, job: &Job) -> Result<Ticket, Refusal> {
        let mut scheduler = self.scheduler.lock();
        scheduler.core.advance(self.clock.now());
        let id = scheduler.core.submit(job)?;
        let (sender, progress) = watch::channel(Progress::default());
        scheduler.sequences.insert(id, sender);
        drop(scheduler);
        self.work.notify_one();
        Ok(Ticket { engine: Arc::clone(self), id, progress })
    }

    /// Runs `f` on the core, advanced to the current time.
    pub(crate) fn with_core<T>(&self, f: impl FnOnce(&mut EngineCore) -> T) -> T {
        let mut scheduler = self.scheduler.lock();
        scheduler.core.advance(self.clock.now());
        let deadline = scheduler.core.next_deadline();
        let result = f(&mut scheduler.core);
        if scheduler.core.next_deadline() != deadline {
            self.moved.notify_one();
        }
        drop(scheduler);
        // The core may have released blocks.
        self.work.notify_one();
        result
    }

    /// Returns whether the engine has no sequence, and no handoff that is still to begin.
    pub(crate) fn is_idle(&self) -> bool {
        let load = self.with_core(|core| core.occupancy());
        load.running + load.waiting + load.held == 0
    }

    /// Returns the KV events from now on, if the engine publishes them.
    pub(crate) fn kv_events(&self) -> Option<Receiver<Bytes>> {
        self.scheduler.lock().publisher.as_ref().map(Publisher::subscribe)
    }

    /// Ends leases and transfers when they are due, even if there are no requests.
    pub(crate) async fn sweep(&self, stop: CancellationToken) {
        loop {
            let deadline = self.with_core(|core| core.next_deadline());
            let due = async {
                match deadline {
                    Some(deadline) => self.clock.sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.moved.notified() => {}
                () = due => {}
            }
        }
    }

    pub(crate) fn is_asleep(&self) -> bool {
        *self.asleep.borrow()
    }

    /// Puts the engine to sleep, or wakes it.
    pub(crate) fn set_asleep(&self, asleep: bool) {
        self.asleep.send_replace(asleep);
    }

    /// Waits until the engine is awake.
    pub(crate) async fn awake(&self) {
        // Fails only when the sender is dropped, which `self` holds.
        let _ = self.asleep.subscribe().wait_for(|asleep| !asleep).await;
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// Stops the engine, as a request with incomplete handoff parameters stops a real one.
    pub(crate) fn die(&self) {
        if !self.config.tolerant {
            tracing::error!("engine stopped by a request");
            self.dead.store(true, Ordering::Release);
        }
    }

    /// Stores a response for the lifetime of the process. SGLang refuses a store in a worker of a pair
    /// (`validation_hook.py`).
    pub(crate) fn store(&self, id: &str) {
        if self.config.dialect != Dialect::Sglang || self.role() == Role::Aggregated {
            self.stored.lock().insert(id.to_owned());
        }
    }

    pub(crate) fn has_stored(&self, id: &str) -> bool {
        self.stored.lock().contains(id)
    }

    /// Deletes a response. Returns whether there was one.
    pub(crate) fn delete_stored(&self, id: &str) -> bool {
        self.stored.lock().remove(id)
    }

    pub(crate) fn record(&self, recorded: impl FnOnce() -> Recorded) {
        if self.config.record == 0 {
            return;
        }
        let mut all = self.recorded.lock();
        if all.len() >= self.config.record {
            all.pop_front();
        }
        all.push_back(recorded());
    }

    pub(crate) fn recorded(&self) -> Vec<Recorded> {
        self.recorded.lock().iter().cloned().collect()
    }

    pub(crate) fn state(&self) -> SimState {
        let (occupancy, counts) = self.with_core(|core| (core.occupancy(), core.counts()));
        SimState {
            dead: self.is_dead(),
            running: occupancy.running + occupancy.held,
            waiting: occupancy.waiting,
            used_blocks: occupancy.used_blocks,
            pinned_blocks: occupancy.pinned_blocks,
            stranded: counts.stranded + self.rooms.stranded(),
            handoffs: self.counters.handoffs(),
            duplicate_rooms: self.rooms.duplicates(),
            aborted: self.counters.aborted(),
            client_disconnects: self.counters.disconnects(),
            requests: self.counters.requests(),
            prefix_queries: counts.prefix_queries,
            prefix_hits: counts.prefix_hits,
            evicted_blocks: counts.evicted,
            preemptions: counts.preemptions,
            kv_messages: self.scheduler.lock().publisher.as_ref().map_or(0, Publisher::sent),
            generated_tokens: self.counters.generated(),
            faults_fired: self.faults.fired(),
        }
    }
}

/// Returns the wall-clock time in seconds since the Unix epoch, for `created` in responses.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns a random UUID, version 4.
fn uuid() -> String {
    let hex = random_hex(32);
    let part = |from: usize, to: usize| hex.get(from..to).unwrap_or_default().to_owned();
    format!("{}-{}-4{}-a{}-{}", part(0, 8), part(8, 12), part(13, 16), part(17, 20), part(20, 32))
}

/// Returns `len` random hex digits without a seed, because ids must differ between engines.
pub(crate) fn random_hex(len: usize) -> String {
    let mut rng = rand::rng();
    (0..len).filter_map(|_| char::from_digit(rng.random_range(0..16), 16)).collect()
}
