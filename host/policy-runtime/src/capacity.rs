//! How many instances the engine has room for. The pooling allocator reserves address space once, at start,
//! so the totals follow from the slots and the CPUs. Knows no wasmtime.

use crate::spec::{LaneSpec, Rank, SlotSpec};

/// Instances that an engine has room for even when its slots need fewer.
const MIN_INSTANCES: usize = 1_000;
/// Memories that may reserve 4 GiB each: 64 of the 128 TiB of an x86-64 process. 30,000 do not fit.
const MAX_WIDE_MEMORIES: usize = 16_000;
/// Instances that exist beside those of the pools: two for each probe, and those of pools that are being
/// dropped.
const SPARE_INSTANCES: usize = 64;

/// What an engine must have room for. Fixed once the engine is built.
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
    /// another is being replaced. With so many policies that their memories would not fit in the address
    /// space: fewer, but one for each CPU.
    pub(crate) fn instances_per_policy(&self) -> usize {
        let cpus = self.cpus.max(1);
        let fitting = (MAX_WIDE_MEMORIES - SPARE_INSTANCES) / self.policies.max(1);
        // A policy that learns has one instance more.
        fitting.saturating_sub(1).clamp(cpus, 2 * cpus)
    }

    /// Number of instances of all policies together.
    pub(crate) fn instances(&self) -> usize {
        let pools = self.policies.saturating_mul(self.instances_per_policy() + 1);
        pools.saturating_add(SPARE_INSTANCES).max(MIN_INSTANCES)
    }

    /// Whether every memory may reserve 4 GiB. Guests then run without bounds checks, which would cost them
    /// 18 % of their time.
    pub(crate) fn has_wide_memories(&self) -> bool {
        self.instances() <= MAX_WIDE_MEMORIES
    }
}

/// Largest number of policies in one generation of a lane: the configured ones, and a filter in the lane's
/// own file.
fn policies(lane: &LaneSpec) -> usize {
    let ranking = match &lane.rank {
        Some(Rank::Scorers { scorers, .. }) => scorers.len(),
        Some(Rank::Policy(_)) => 1,
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
    fn every_machine_has_an_instance_for_each_cpu_and_room_for_all_of_them() {
        for slots in [1, 4, 44, 404] {
            for cpus in [0, 1, 2, 64, 125, 256, 1_024] {
                let capacity = capacity(cpus, slots);
                let each = capacity.instances_per_policy();
                assert!(each >= cpus.max(1) && each <= 2 * cpus.max(1), "{capacity:?}: {each}");
                let needed = capacity.policies * (each + 1) + 2;
                assert!(capacity.instances() >= needed, "{capacity:?}: {needed}");
            }
        }
    }

    #[test]
    fn memories_stay_wide_up_to_256_cpus_with_the_four_slots_for_all_models() {
        assert_eq!(capacity(2, 4).instances(), MIN_INSTANCES);
        assert!(capacity(256, 4).has_wide_memories());
        assert!(!capacity(256, 44).has_wide_memories());
        assert!(capacity(16, 44).has_wide_memories());
    }
}
