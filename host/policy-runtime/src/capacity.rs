//! How many instances the engine has room for. The pooling allocator reserves address space once, at start,
//! so the totals follow from the slots and the CPUs. Knows no wasmtime.

use crate::spec::{LaneSpec, Rank, SlotSpec};

/// Instances that an engine has room for even when its slots need fewer.
const MIN_INSTANCES: usize = 1_000;
/// Instances at which policies keep fewer of their own. Linux permits 65,530 mappings to a process by default
/// (`vm.max_map_count`). Measured: 4.3 for each instance, and 2 for each stack that the pool reserves.
const MAX_INSTANCES: usize = 10_000;
/// Instances that each policy keeps however many policies there are, on machines with as many CPUs.
const MIN_PER_POLICY: usize = 16;
/// Memories that may reserve 4 GiB each: 82 of the 128 TiB of an x86-64 process. 30,000 do not fit.
const MAX_WIDE_MEMORIES: usize = 20_500;
/// Memories that one policy may have: its own, and that of a component composed into it.
pub(crate) const MEMORIES_PER_POLICY: u32 = 2;
/// Tables that one policy may have.
pub(crate) const TABLES_PER_POLICY: u32 = 8;
/// Core instances that one policy may have. Componentizers add modules of their own to a policy's: adapters,
/// shims, and each library of CPython.
pub(crate) const CORE_INSTANCES_PER_POLICY: u32 = 500;
/// Elements of all tables of one policy. CPython has 10,000.
pub(crate) const TABLE_ELEMENTS_PER_POLICY: usize = 20_000;
/// Instances that exist beside those of the pools: two for each probe, and those of pools that are being
/// dropped.
const SPARE_INSTANCES: usize = 64;

/// Sizes that an engine must have room for. Fixed once the engine is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Calls that can run at the same time: the CPUs of the machine.
    pub cpus: usize,
    /// Policies that can be loaded at the same time.
    pub policies: usize,
}

impl Capacity {
    /// Room for a few policies on the CPUs of this machine, for tools and tests.
    #[must_use]
    pub fn detect() -> Self {
        Self { cpus: std::thread::available_parallelism().map_or(1, usize::from), policies: 32 }
    }

    /// Room for slots that run `specs`, even while every lane is filled and the content of every lane is
    /// being replaced.
    #[must_use]
    pub fn for_specs<'a>(cpus: usize, specs: impl IntoIterator<Item = &'a SlotSpec>) -> Self {
        // The active lane keeps its previous generation for a rollback, and loads the next one beside both.
        let of_slot = |spec: &SlotSpec| {
            3 * policies(&spec.active) + 2 * policies(&spec.canary) + 2 * policies(&spec.shadow)
        };
        Self { cpus, policies: specs.into_iter().map(of_slot).sum() }
    }

    /// Number of instances of one policy that answer requests. Two for each CPU, so that one is ready while
    /// another is being replaced. There are fewer if the policies would otherwise exceed the mappings of a
    /// process, since not all CPUs call the same policy at the same time.
    pub(crate) fn instances_per_policy(&self) -> usize {
        let cpus = self.cpus.max(1);
        let fitting = (MAX_INSTANCES - SPARE_INSTANCES) / self.policies.max(1);
        // A policy that learns has one instance more.
        fitting.saturating_sub(1).clamp(cpus.min(MIN_PER_POLICY), 2 * cpus)
    }

    /// Number of instances of all policies together.
    pub(crate) fn instances(&self) -> usize {
        let pools = self.policies.saturating_mul(self.instances_per_policy() + 1);
        pools.saturating_add(SPARE_INSTANCES).max(MIN_INSTANCES)
    }

    /// Returns whether every memory may reserve 4 GiB. Guests then run without bounds checks, which would
    /// cost them 18 % of their time.
    pub(crate) fn has_wide_memories(&self) -> bool {
        self.instances() * MEMORIES_PER_POLICY as usize <= MAX_WIDE_MEMORIES
    }
}

/// Largest number of policies in one generation of a lane: the configured ones, and a filter in the lane's
/// own file.
fn policies(lane: &LaneSpec) -> usize {
    let ranking = match &lane.rank {
        Some(Rank::Scorers { scorers, .. }) => scorers.len(),
        Some(Rank::Policy(_) | Rank::File { .. }) => 1,
        Some(Rank::Native(_)) | None => 0,
    };
    lane.filters.len() + ranking + 1
}

#[cfg(test)]
mod tests {
    use pointsman_routing::NativeMode;

    use super::*;
    use crate::spec::Part;

    fn capacity(cpus: usize, slots: usize) -> Capacity {
        let part = Part::embedded("kv-aware", b"", "{}".into());
        Capacity::for_specs(cpus, &vec![SlotSpec::of(Rank::Policy(part)); slots])
    }

    #[test]
    fn a_slot_of_one_policy_has_room_for_ten() {
        assert_eq!(capacity(2, 4).policies, 40);
        let native = SlotSpec::of(Rank::Native(NativeMode::Kv));
        assert_eq!(Capacity::for_specs(2, [&native]).policies, 7);
    }

    #[test]
    fn every_machine_has_room_for_the_instances_of_all_its_policies() {
        for slots in [1, 4, 44, 404] {
            for cpus in [0, 1, 2, 64, 125, 256, 1_024] {
                let capacity = capacity(cpus, slots);
                let each = capacity.instances_per_policy();
                let (least, most) = (cpus.clamp(1, 16), 2 * cpus.max(1));
                assert!((least..=most).contains(&each), "{capacity:?}: {each}");
                let needed = capacity.policies * (each + 1) + 2;
                assert!(capacity.instances() >= needed, "{capacity:?}: {needed}");
            }
        }
    }

    #[test]
    fn the_four_slots_of_a_machine_have_an_instance_for_each_thread_and_fit_in_its_mappings() {
        // By default there is one thread for every two CPUs.
        for (cpus, each) in [(2, 4), (64, 128), (125, 247), (256, 247)] {
            let capacity = capacity(cpus, 4);
            assert_eq!(capacity.instances_per_policy(), each, "{cpus} CPUs");
            assert!(capacity.instances() <= MAX_INSTANCES && capacity.has_wide_memories(), "{cpus} CPUs");
        }
        assert!(capacity(256, 44).has_wide_memories());
        assert!(!capacity(256, 404).has_wide_memories());
    }
}
