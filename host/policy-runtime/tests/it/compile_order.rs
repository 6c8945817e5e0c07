//! The order in which files of many slots are compiled.

use std::{fs, sync::Arc, time::Duration};

use pointsman_policy_runtime::{
    Access, Capacity, Limits, ManagerConfig, PolicyDir, PolicyEngine, PolicyManager, Probation, Rank,
    SlotConfig, SlotSpec, TrustRules,
};
use pointsman_routing::{NativeMode, Program, Slot, SlotKind};
use pointsman_test_guests::WEIGHTED_RANDOM;
use pointsman_workers::ModelName;
use tempfile::TempDir;
use tokio::sync::mpsc;

const MODELS: usize = 20;

#[test]
fn n7_a_file_of_a_slot_without_a_model_does_not_wait_for_those_of_models() {
    let dir = TempDir::new().unwrap();
    let (sender, events) = mpsc::unbounded_channel();
    let slot = |model: Option<String>| {
        let folder = model.as_ref().map_or(dir.path().to_owned(), |model| dir.path().join(model));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("prefill.wasm"), WEIGHTED_RANDOM).unwrap();
        let (model, native) = (model.map(|model| ModelName::new(&model)), NativeMode::Kv);
        SlotConfig {
            slot: Arc::new(Slot::new(SlotKind::Prefill, model, Program::Native(native), sender.clone())),
            spec: SlotSpec::of(Rank::Native(native)),
            access: Access::default(),
            initial: None,
        }
    };
    let models = (0..MODELS).map(|model| Some(format!("m{model}")));
    let slots = models.chain([None]).map(slot).collect();
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let policies = PolicyDir::open(&engine, Some(dir.path().to_owned()), TrustRules::default()).unwrap();
    let config = ManagerConfig {
        slots,
        probation: Probation::default(),
        debounce: Duration::from_millis(10),
        rescan: Duration::from_millis(100),
        compile_wait: Duration::ZERO,
    };
    let manager = PolicyManager::start(policies, config, events).unwrap();
    let started = tokio::time::Instant::now();
    let status = loop {
        let status = manager.status();
        if status.slots.last().is_some_and(|own| own.policy == "weighted-random") {
            break status;
        }
        assert!(started.elapsed().as_secs() < 120, "never compiled: {status:#?}");
        std::thread::sleep(Duration::from_millis(5));
    };
    // N7.29
    assert!(status.compiling.len() > MODELS / 2, "{:#?}", status.compiling);
}
