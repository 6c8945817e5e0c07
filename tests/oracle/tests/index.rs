//! Compares our index with the oracle's two trees, fed with the same bytes (H2, H3).

use std::collections::HashMap;

use dynamo_kv_router::{
    ConcurrentRadixTreeCompressed, LocalBlockHash, OverlapScores, RadixTree, ThreadPoolIndexer,
    indexer::KvIndexerInterface as _, zmq_wire::ZmqEventNormalizer,
};
use pointsman_oracle::{
    engine::{Change, Engine, Tenant},
    sides::{Who, our_batch, our_hashes, ours, their_event, their_hashes, theirs},
    wire,
};
use prefix_index::{IndexConfig, Overlaps, PrefixIndex, WorkerId};
use proptest::prelude::*;

const BLOCK: usize = 4;
const WORKERS: u64 = 4;
const RANKS: u32 = 2;
const TENANTS: [Tenant; 4] = [
    Tenant { lora: None, salt: None },
    Tenant { lora: Some("adapter"), salt: None },
    Tenant { lora: None, salt: Some("tenant-7") },
    Tenant { lora: Some("adapter"), salt: Some("tenant-7") },
];

/// A step of an engine, or of the indexes.
#[derive(Clone, Debug)]
enum Step {
    Serve(usize, Vec<u64>),
    Evict(usize),
    Prune(usize),
    Clear,
    ForgetRank,
    RemoveWorker,
}

/// Returns prompts over three different blocks, so that most share a prefix and many are prefixes of others.
fn prompt() -> impl Strategy<Value = (usize, Vec<u64>)> {
    (0..TENANTS.len(), proptest::collection::vec(0_u64..3, 1..9))
}

fn step() -> impl Strategy<Value = (Who, Step)> {
    let step = prop_oneof![
        12 => prompt().prop_map(|(tenant, ids)| Step::Serve(tenant, ids)),
        3 => (1_usize..6).prop_map(Step::Evict),
        3 => any::<usize>().prop_map(Step::Prune),
        1 => Just(Step::Clear),
        1 => Just(Step::ForgetRank),
        1 => Just(Step::RemoveWorker),
    ];
    ((0..WORKERS, 0..RANKS), step)
}

/// The compared indexes, and the modelled engines.
struct Bench {
    engines: HashMap<Who, Engine>,
    normalizers: HashMap<Who, ZmqEventNormalizer>,
    number: u64,
    ours: PrefixIndex,
    tree: RadixTree,
    concurrent: ThreadPoolIndexer<ConcurrentRadixTreeCompressed>,
    runtime: tokio::runtime::Runtime,
}

impl Bench {
    fn new() -> Self {
        let config = IndexConfig { block_size: BLOCK, ..IndexConfig::default() };
        Self {
            engines: HashMap::new(),
            normalizers: HashMap::new(),
            number: 0,
            ours: PrefixIndex::new(config).unwrap(),
            tree: RadixTree::new(),
            concurrent: ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), 2, BLOCK as u32),
            runtime: tokio::runtime::Builder::new_current_thread().build().unwrap(),
        }
    }

    fn step(&mut self, who: Who, step: &Step) {
        let engine = self.engines.entry(who).or_insert_with(|| Engine::new(24));
        let changes = match step {
            Step::Serve(tenant, ids) => engine.serve(TENANTS[*tenant], ids),
            Step::Evict(count) => engine.evict(*count).into_iter().collect(),
            Step::Prune(pick) => engine.prune(*pick).into_iter().collect(),
            Step::Clear => vec![engine.clear()],
            Step::ForgetRank => {
                engine.clear();
                self.ours.forget(ours(who).0, ours(who).1);
                self.tree.remove_worker_dp_rank(who.0, who.1);
                self.runtime.block_on(self.concurrent.remove_worker_dp_rank(who.0, who.1));
                return;
            }
            Step::RemoveWorker => {
                (0..RANKS).for_each(|rank| drop(self.engines.remove(&(who.0, rank))));
                self.ours.remove_worker(WorkerId(who.0));
                self.tree.remove_worker(who.0);
                self.runtime.block_on(self.concurrent.remove_worker(who.0));
                return;
            }
        };
        changes.iter().for_each(|change| self.apply(who, change));
    }

    fn apply(&mut self, who: Who, change: &Change) {
        let payload = wire::encode(change, BLOCK).unwrap();
        let (worker, rank) = ours(who);
        self.ours.events(worker, rank, our_batch(&payload).unwrap()).unwrap();
        self.number += 1;
        let normalizer = self.normalizers.entry(who).or_insert_with(|| ZmqEventNormalizer::new(BLOCK as u32));
        let event = their_event(normalizer, &payload, self.number, who).unwrap();
        self.tree.apply_event(event.clone()).unwrap();
        self.runtime.block_on(self.concurrent.apply_event_and_wait(event)).unwrap();
    }

    /// Compares the lookups of a prompt with each other and with the engines' caches.
    fn compare(&self, tenant: usize, ids: &[u64]) -> Result<(), TestCaseError> {
        self.ours.flush();
        self.runtime.block_on(self.concurrent.flush());
        let tokens = wire::prompt(ids, BLOCK);
        let mut overlaps = Overlaps::default();
        self.ours.matches(&our_hashes(TENANTS[tenant], &tokens, BLOCK), &mut overlaps);
        let asked: Vec<LocalBlockHash> = their_hashes(TENANTS[tenant], &tokens, BLOCK as u32);
        let tree = self.tree.find_matches(asked.clone(), false);
        let concurrent = self.concurrent.backend().find_matches_impl(&asked, false);
        for who in (0..WORKERS).flat_map(|worker| (0..RANKS).map(move |rank| (worker, rank))) {
            let of = |scores: &OverlapScores| scores.scores.get(&theirs(who)).copied().unwrap_or(0);
            let held = self.engines.get(&who).map_or(0, |engine| engine.cached(TENANTS[tenant], ids));
            let our = overlaps.get(ours(who).0, ours(who).1).device;
            prop_assert_eq!(our, of(&tree), "{:?}, {:?}: the tree", who, ids);
            prop_assert_eq!(our, of(&concurrent), "{:?}, {:?}: the concurrent tree", who, ids);
            prop_assert_eq!(our as usize, held, "{:?}, {:?}: the engine", who, ids);
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn h3_matches_equal_the_oracles_for_every_worker_and_rank(
        steps in proptest::collection::vec(step(), 1..60),
        asked in proptest::collection::vec(prompt(), 8),
    ) {
        let mut bench = Bench::new();
        for (number, (who, step)) in steps.iter().enumerate() {
            bench.step(*who, step);
            if let Some((tenant, ids)) = asked.get(number % 13) {
                bench.compare(*tenant, ids)?;
            }
        }
        for (tenant, ids) in &asked {
            bench.compare(*tenant, ids)?;
        }
        for (_, step) in &steps {
            if let Step::Serve(tenant, ids) = step {
                bench.compare(*tenant, ids)?;
            }
        }
        prop_assert_eq!(bench.ours.stats().orphans, 0);
    }
}
