//! State of a worker that does not depend on its description. A worker with another description of the same
//! engine shares it: requests that began before the change report to the same state.

use std::sync::{
    Arc, Weak,
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64},
};

use arc_swap::{ArcSwap, ArcSwapOption};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, Semaphore},
    time::Instant,
};

use super::{
    AnsweredPaths, BackPressure, Breaks, BrokenHandoffs, LastFailure, LearnedLimit, Loading, LostRanks,
    Moves, WarmUp, WarmUps, refusing::Refusing,
};
use crate::{
    activity::Activity,
    booking::{Journal, RankJournal, RankLoad, WorkerKey},
    breaker::{Breaker, BreakerRules},
    columns::Columns,
    facts::{Contradiction, EngineFacts},
    id::DpRank,
    spec::WorkerSpec,
};

/// Load of each rank.
pub(super) type Ranks = Arc<[Arc<RankLoad>]>;

/// What a worker is at the moment, apart from its load.
#[derive(Debug)]
pub(super) struct State {
    pub(super) health: AtomicU8,
    pub(super) loading: Loading,
    pub(super) draining: AtomicBool,
    /// Whether discovery has it removed when its requests end.
    pub(super) leaving: AtomicBool,
    /// Its streams that move elsewhere while it drains.
    pub(super) moves: Arc<Moves>,
    /// Whether the engine contradicts the description.
    pub(super) misconfigured: AtomicBool,
    /// Whether the engine sleeps.
    pub(super) asleep: AtomicBool,
    /// Whether the engine slept, or can be asked whether it does.
    pub(super) may_sleep: AtomicBool,
    pub(super) engine_paused: AtomicBool,
    /// Whether the engine reports the load of each rank. Otherwise that of every rank is the engine's.
    pub(super) loads_by_rank: AtomicBool,
    /// Whether the engine reports every load figure.
    pub(super) reports_load: AtomicBool,
    /// Problem that the last probe found.
    pub(super) problem: ArcSwapOption<String>,
    pub(super) facts: ArcSwap<EngineFacts>,
    /// Whether the facts say that the engine has no prefix cache.
    pub(super) lacks_prefix_cache: AtomicBool,
    /// Longest context of each of the engine's models, tokens, in the order of their names.
    pub(super) context_lengths: ArcSwap<Vec<(String, u32)>>,
    pub(super) contradiction: ArcSwapOption<Contradiction>,
    /// Engine ids by rank. Only vLLM with Mooncake has them.
    pub(super) engine_ids: ArcSwapOption<Vec<String>>,
    pub(super) breaker: Breaker,
    pub(super) last_failure: LastFailure,
    /// Number of outcomes of legs that were reported.
    pub(super) outcomes: AtomicU64,
    /// Number of processes of the engine that ended.
    pub(super) ended_processes: AtomicU32,
    /// Number of legs that failed before the engine's process began.
    pub(super) failed_before: AtomicU32,
    pub(super) back_pressure: BackPressure,
    pub(super) answered_paths: ArcSwap<AnsweredPaths>,
    pub(super) refusing: Refusing,
    pub(super) learned_limit: LearnedLimit,
    pub(super) lost_ranks: LostRanks,
    pub(super) warm_up: WarmUp,
    /// The worker's progress while requests wait for it.
    pub(super) activity: Activity,
    /// When it last broke on requests.
    pub(super) breaks: Breaks,
    pub(super) broken_handoffs: BrokenHandoffs,
    /// Whether the worker is left out because it is stuck.
    pub(super) ejected: AtomicBool,
    /// Makes the prober read the engine's figures at once.
    pub(super) read_now: Notify,
    /// Whether a request timed out and none was answered since. Then one request at a time is tried.
    pub(super) suspect: AtomicBool,
    /// Whether a request was answered since a health check failed.
    pub(super) answered: AtomicBool,
    /// Wakes the requests that wait for an answer of a worker that is down, or that falls asleep.
    pub(super) stops_serving: Notify,
    /// Whether the engine may have restarted since its facts were read.
    pub(super) stale_facts: AtomicBool,
    /// How often the engine's models were read.
    pub(super) model_readings: AtomicU32,
    /// Makes the prober check the worker at once.
    pub(super) check_now: Notify,
    /// When a request last failed to connect.
    pub(super) unreachable: Mutex<Option<Instant>>,
    /// When an answer that ended early last asked for a check.
    pub(super) cut_checked: Mutex<Option<Instant>>,
    /// Held while the ranks are told whether the worker is eligible unconditionally.
    pub(super) told: Mutex<Told>,
    /// Number of places that are reserved.
    pub(super) reserved: Arc<AtomicU32>,
    pub(super) open_handoffs: AtomicU32,
    /// Turns of calls that abort requests.
    pub(super) abort_turns: Semaphore,
    /// The share of them that calls for items of lists have.
    pub(super) list_abort_turns: Semaphore,
}

/// Maximum number of calls to one engine at a time that abort requests. Thousands of clients may leave at
/// once, and the engine may answer none of these calls.
const MAX_CONCURRENT_ABORTS: usize = 64;
/// Share of lists: one of them may have thousands of items.
const MAX_CONCURRENT_LIST_ABORTS: usize = 8;

/// The part of the current description that decides whether the ranks are eligible unconditionally.
#[derive(Debug)]
pub(super) struct Told {
    pub(super) ranks: Ranks,
    /// Ranks that an earlier description had. Requests may hold a snapshot with them.
    pub(super) left: Vec<Weak<RankLoad>>,
    /// Whether the number of concurrent requests is limited.
    pub(super) is_limited: bool,
}

impl Told {
    pub(super) fn of(spec: &WorkerSpec, ranks: &Ranks) -> Self {
        Self { ranks: ranks.clone(), left: Vec::new(), is_limited: spec.max_concurrency.is_some() }
    }

    /// Follows another description.
    pub(super) fn follow(&mut self, spec: &WorkerSpec, ranks: &Ranks) {
        let before = std::mem::replace(self, Self::of(spec, ranks));
        let left = before.ranks.iter().skip(ranks.len()).map(Arc::downgrade);
        self.left = before.left.into_iter().chain(left).filter(|rank| rank.strong_count() > 0).collect();
    }

    /// Tells every rank whether it is eligible unconditionally. Those that the engine has lost are not.
    pub(super) fn tell(&self, eligible: bool, lost: &LostRanks) {
        let left: Vec<Arc<RankLoad>> = self.left.iter().filter_map(Weak::upgrade).collect();
        for (rank, load) in (0..).zip(self.ranks.iter()) {
            load.set_surely_eligible(eligible && !lost.has(DpRank(rank)));
        }
        left.iter().for_each(|rank| rank.set_surely_eligible(eligible));
    }
}

impl State {
    pub(super) fn new(warm_ups: WarmUps, told: Told) -> Self {
        Self {
            facts: ArcSwap::default(),
            lacks_prefix_cache: AtomicBool::new(false),
            context_lengths: ArcSwap::default(),
            contradiction: ArcSwapOption::empty(),
            health: AtomicU8::new(0),
            loading: Loading::new(),
            draining: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            moves: Arc::default(),
            misconfigured: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            may_sleep: AtomicBool::new(false),
            engine_paused: AtomicBool::new(false),
            loads_by_rank: AtomicBool::new(false),
            reports_load: AtomicBool::new(false),
            problem: ArcSwapOption::empty(),
            engine_ids: ArcSwapOption::empty(),
            breaker: Breaker::new(BreakerRules::WORKER),
            last_failure: LastFailure::new(),
            outcomes: AtomicU64::new(0),
            ended_processes: AtomicU32::new(0),
            failed_before: AtomicU32::new(0),
            back_pressure: BackPressure::new(),
            answered_paths: ArcSwap::default(),
            refusing: Refusing::new(),
            learned_limit: LearnedLimit::new(),
            lost_ranks: LostRanks::default(),
            warm_up: WarmUp::new(warm_ups),
            activity: Activity::new(),
            breaks: Breaks::default(),
            broken_handoffs: BrokenHandoffs::new(),
            ejected: AtomicBool::new(false),
            read_now: Notify::new(),
            suspect: AtomicBool::new(false),
            answered: AtomicBool::new(true),
            stops_serving: Notify::new(),
            stale_facts: AtomicBool::new(false),
            model_readings: AtomicU32::new(0),
            check_now: Notify::new(),
            unreachable: Mutex::default(),
            cut_checked: Mutex::default(),
            told: Mutex::new(told),
            reserved: Arc::default(),
            open_handoffs: AtomicU32::new(0),
            abort_turns: Semaphore::new(MAX_CONCURRENT_ABORTS),
            list_abort_turns: Semaphore::new(MAX_CONCURRENT_LIST_ABORTS),
        }
    }
}

/// Returns the loads of a worker's ranks: those of `kept`, then new ones.
pub(super) fn ranks(
    spec: &WorkerSpec,
    kept: &[Arc<RankLoad>],
    columns: &Columns,
    journal: Option<&Arc<Journal>>,
) -> Ranks {
    let (worker, size) = (WorkerKey::of(spec), spec.dp_size.max(1) as usize);
    let journal = |rank| Some(RankJournal { journal: journal?.clone(), worker, rank: DpRank(rank) });
    let new = columns.allocate(size.saturating_sub(kept.len()));
    let new = (0..).skip(kept.len()).zip(new);
    let new = new.map(|(rank, position)| Arc::new(RankLoad::noted(position, journal(rank))));
    kept.iter().take(size).cloned().chain(new).collect()
}
