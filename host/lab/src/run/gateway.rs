//! The gateways of a run. Each gateway routes its share of the requests with its own knowledge. All gateways
//! share the engines.

use std::{collections::BTreeMap, sync::Arc};

use pointsman_orchestration::{AdmissionQueue, AgentPrograms, QueueRules, Sessions};
use pointsman_routing::{
    BatchedLearning, BusyRules, NativeMode, OnFailure, Program, Router, RouterConfig, Slot, SlotEvent,
    SlotKind,
};
use pointsman_workers::{Snapshot, Worker, probe::HealthChecks};
use prefix_index::{IndexConfig, PrefixIndex};
use tokio::sync::mpsc::UnboundedReceiver;

use super::{
    INDEX_BYTES, RunError,
    exchange::{self, Exchange},
    wake::WakeList,
};
use crate::{
    arm::Arm,
    engines::{self, RANK},
    fleet::Fleet,
};

/// State of one gateway.
pub(super) struct Gateway {
    pub(super) router: Router,
    pub(super) snapshot: Arc<Snapshot>,
    /// Engines as this gateway knows them, by position.
    pub(super) workers: Vec<Watched>,
    pub(super) queue: Arc<AdmissionQueue>,
    pub(super) sessions: Sessions,
    pub(super) programs: AgentPrograms,
    pub(super) learning: BatchedLearning,
    /// State of the gateway in the exchange of bookings; `None` if there is no exchange.
    pub(super) exchange: Option<Exchange>,
    /// Failed calls of policies.
    failures: UnboundedReceiver<SlotEvent>,
    /// Requests that the queue may have woken.
    pub(super) woken: WakeList,
}

/// An engine, with the health checks that one gateway makes.
pub(super) struct Watched {
    pub(super) worker: Arc<Worker>,
    pub(super) checks: HealthChecks,
}

/// All gateways. There is at least one.
pub(super) struct Gateways {
    first: Gateway,
    others: Vec<Gateway>,
    seed: u64,
}

impl Gateway {
    fn new(arm: &Arm, fleet: &Fleet, place: usize) -> Result<Self, RunError> {
        let (registry, outbox) = exchange::registry(fleet);
        let workers = engines::register(fleet, &registry)?;
        let index = Arc::new(PrefixIndex::synchronous(IndexConfig {
            byte_budget: INDEX_BYTES,
            block_size: fleet.block_tokens as usize,
            ..IndexConfig::default()
        }));
        for worker in workers.iter().filter(|_| fleet.kv_events) {
            index.set_live(worker.id(), RANK, true);
        }
        let (slots, failures) = arm.slots()?;
        let learning = BatchedLearning::new(slots.clone());
        let router = Router::new(slots, index, RouterConfig::default(), OnFailure::Fallback)
            .with_busy(BusyRules::new(fleet.routing.busy.clone(), []));
        let watched = |worker| Watched { worker, checks: HealthChecks::default() };
        let snapshot = registry.snapshot();
        Ok(Self {
            router,
            exchange: outbox.map(|outbox| Exchange::new(place, outbox, fleet, &snapshot)),
            snapshot,
            workers: workers.into_iter().map(watched).collect(),
            queue: AdmissionQueue::new(QueueRules {
                timeout: fleet.queue.timeout,
                order: arm.order,
                ..QueueRules::waiting(fleet.queue.limit)
            }),
            sessions: Sessions::default(),
            programs: AgentPrograms::default(),
            learning,
            failures,
            woken: WakeList::default(),
        })
    }

    /// Returns the next failure of a policy that exceeded its limit of CPU time.
    pub(super) fn next_failure(&mut self) -> Option<SlotEvent> {
        self.failures.try_recv().ok()
    }

    /// Returns the slots whose last decisions all chose one engine, with the number of these decisions.
    pub(super) fn one_sided(&self) -> impl Iterator<Item = (SlotKind, u64)> + '_ {
        let only =
            |slot: &Arc<Slot>| Some((slot.kind(), slot.snapshot().active.choices.only_choice()?.decisions));
        self.router.slots().iter().filter_map(only)
    }

    /// Routes without policies from now on.
    pub(super) fn withdraw(&self) {
        for slot in self.router.slots().iter() {
            slot.install(Program::Native(NativeMode::Kv));
        }
    }
}

impl Gateways {
    pub(super) fn new(arm: &Arm, fleet: &Fleet, seed: u64) -> Result<Self, RunError> {
        let first = Gateway::new(arm, fleet, 0)?;
        let others = (1..fleet.gateways.count as usize).map(|place| Gateway::new(arm, fleet, place));
        let others = others.collect::<Result<_, _>>()?;
        Ok(Self { first, others, seed })
    }

    /// Returns the slots whose last decisions all chose one engine, with the largest number of such decisions
    /// at any gateway.
    pub(super) fn one_sided(&self) -> BTreeMap<SlotKind, u64> {
        let mut slots = BTreeMap::new();
        for (kind, decisions) in std::iter::once(&self.first).chain(&self.others).flat_map(Gateway::one_sided)
        {
            let most: &mut u64 = slots.entry(kind).or_default();
            *most = decisions.max(*most);
        }
        slots
    }

    /// Returns the position of the gateway that receives a request. A load balancer chooses it at random.
    pub(super) fn place_of(&self, number: usize) -> usize {
        let mut mixed = self.seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^= mixed >> 32;
        usize::try_from(mixed % (self.others.len() as u64 + 1)).unwrap_or_default()
    }

    /// Returns the gateway that receives a request.
    pub(super) fn of(&self, number: usize) -> &Gateway {
        self.at(self.place_of(number))
    }

    /// Like [`Gateways::of`], mutably.
    pub(super) fn of_mut(&mut self, number: usize) -> &mut Gateway {
        self.at_mut(self.place_of(number))
    }

    /// Returns the gateway at a position.
    pub(super) fn at(&self, place: usize) -> &Gateway {
        place.checked_sub(1).and_then(|place| self.others.get(place)).unwrap_or(&self.first)
    }

    /// Like [`Gateways::at`], mutably.
    pub(super) fn at_mut(&mut self, place: usize) -> &mut Gateway {
        place.checked_sub(1).and_then(|place| self.others.get_mut(place)).unwrap_or(&mut self.first)
    }

    /// Returns one gateway and the others.
    pub(super) fn split(&self) -> (&Gateway, &[Gateway]) {
        (&self.first, &self.others)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Gateway> {
        std::iter::once(&self.first).chain(&self.others)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Gateway> {
        std::iter::once(&mut self.first).chain(&mut self.others)
    }

    /// Returns an engine as each of the gateways knows it.
    pub(super) fn watched(&mut self, place: usize) -> impl Iterator<Item = &mut Watched> {
        self.iter_mut().filter_map(move |gateway| gateway.workers.get_mut(place))
    }
}
