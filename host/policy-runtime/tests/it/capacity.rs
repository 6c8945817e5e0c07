//! Large machines: the instance pool has room for every lane of every slot, and for the reload of each, on
//! 256 CPUs.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail as tests do")]

use std::{fs, path::Path, sync::Arc, time::Duration};

use pointsman_embedded_policies::{CONDITIONAL_DISAGG, KV_AWARE, LEAST_LOADED};
use pointsman_policy_runtime::{
    Access, Capacity, Command, Limits, ManagerConfig, Part, PolicyDir, PolicyEngine, PolicyManager,
    Probation, Rank, SlotConfig, SlotSpec, TrustRules,
};
use pointsman_routing::{Slot, SlotKind};
use tempfile::TempDir;
use tokio::sync::mpsc;

const CPUS: usize = 256;
const LANES: [&str; 3] = ["", ".canary", ".shadow"];

/// Other content of the same behaviour: a custom section that holds `version`.
fn version_of(wasm: &[u8], version: u8) -> Vec<u8> {
    [wasm, &[0, 3, 1, b'v', version]].concat()
}

/// Writes a policy into every lane of every slot; all of them differ.
fn fill(dir: &Path, round: u8) {
    for (slot, kind) in (0_u8..).zip(SlotKind::ALL) {
        let wasm = if kind == SlotKind::DecodeOverride { CONDITIONAL_DISAGG } else { LEAST_LOADED };
        for (lane, suffix) in (0_u8..).zip(LANES) {
            let bytes = version_of(wasm, round * 12 + slot * 3 + lane);
            let file = dir.join(format!("{kind}{suffix}.wasm"));
            fs::write(file.with_extension("new"), bytes).unwrap();
            fs::rename(file.with_extension("new"), file).unwrap();
        }
    }
}

fn spec(kind: SlotKind) -> SlotSpec {
    let (name, wasm) = match kind {
        SlotKind::DecodeOverride => ("conditional-disagg", CONDITIONAL_DISAGG),
        _ => ("kv-aware", KV_AWARE),
    };
    SlotSpec::of(Rank::Policy(Part::embedded(name, wasm, "{}".into())))
}

#[test]
fn with_256_cpus_every_lane_starts_and_reloads() {
    let dir = TempDir::new().unwrap();
    fill(dir.path(), 0);
    let specs = SlotKind::ALL.map(spec);
    let capacity = Capacity::for_specs(CPUS, &specs);
    let engine = PolicyEngine::new(Limits::default(), capacity).unwrap();
    let mut policies = PolicyDir::open(&engine, Some(dir.path().to_owned()), TrustRules::default()).unwrap();
    let (sender, events) = mpsc::unbounded_channel();
    let slots = SlotKind::ALL.into_iter().zip(specs).map(|(kind, spec)| {
        let access = Access::default();
        let (program, initial) = policies.initial(kind, &spec.active, &access).unwrap().unwrap();
        let slot = Arc::new(Slot::new(kind, None, program, sender.clone()));
        SlotConfig { slot, spec, access, initial: Some(initial) }
    });
    let config = ManagerConfig {
        slots: slots.collect(),
        probation: Probation::default(),
        // Only commands read the directory.
        debounce: Duration::from_secs(3_600),
        rescan: Duration::from_secs(3_600),
        compile_wait: Duration::from_secs(600),
    };
    let manager = PolicyManager::start(policies, config, events).unwrap();
    let status = manager.status();
    for slot in &status.slots {
        assert!(slot.refusals.is_empty(), "{:?}", slot.refusals);
        assert!(slot.canary.is_some() && slot.shadow.is_some(), "{}", slot.slot);
        assert!(slot.can_roll_back, "{}", slot.slot);
    }
    // Four slots, each with a previous generation and three lanes; an instance for each data thread, of which
    // there is one for every two CPUs by default.
    assert!(manager.usage().instances >= (4 * 4 * CPUS / 2) as u64, "{:?}", manager.usage());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for round in 1..=2 {
        fill(dir.path(), round);
        let report = runtime.block_on(manager.execute(Command::Reload)).unwrap();
        assert!(report.refused.is_empty(), "{:?}", report.refused);
        let installed = report.changed.iter().filter(|change| change.result == "installed").count();
        assert_eq!(installed, 12, "{:?}", report.changed);
    }
    assert!(manager.status().slots.iter().all(|slot| slot.refusals.is_empty()));
}
