//! The manager on a real folder: every way a file may appear, refusals, last good kept, rollback, removal.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests may fail as tests do"
)]

use std::{fs, io::Write as _, sync::Arc, time::Duration};

use pointsman_policy_runtime::{
    Access, Capacity, Command, CommandError, Limits, ManagerConfig, ManagerStatus, PolicyDir, PolicyEngine,
    PolicyManager, Probation, Rank, ReloadCount, SlotConfig, SlotSpec, SlotState, SlotStatus, TrustRules,
};
use pointsman_routing::{Call, DecisionContext, Failure, Lane, NativeMode, Program, Purpose, Slot, SlotKind};
use pointsman_test_guests::{HOSTILE, LOW_QUEUE, WEIGHTED_RANDOM};
use pointsman_workers::Leg;
use tempfile::TempDir;
use tokio::sync::mpsc;

struct TestManager {
    dir: TempDir,
    slot: Arc<Slot>,
    manager: PolicyManager,
}

fn manager_in(dir: TempDir, settings: &str) -> TestManager {
    let mut spec = SlotSpec::of(Rank::Native(NativeMode::LeastLoaded));
    spec.active.settings = settings.into();
    manager_of(dir, spec)
}

fn manager_of(dir: TempDir, spec: SlotSpec) -> TestManager {
    manager_that_rescans(Duration::from_millis(200), dir, spec)
}

fn manager_that_rescans(rescan: Duration, dir: TempDir, spec: SlotSpec) -> TestManager {
    let (sender, events) = mpsc::unbounded_channel();
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let mut policies = PolicyDir::open(&engine, Some(dir.path().to_owned()), TrustRules::default()).unwrap();
    let access = Access::default();
    let (program, initial) = policies.initial(SlotKind::Prefill, &spec.active, &access).unwrap().unwrap();
    let slot = Arc::new(Slot::new(SlotKind::Prefill, None, program, sender));
    let config = ManagerConfig {
        slots: vec![SlotConfig { slot: slot.clone(), spec, access, initial: Some(initial) }],
        probation: Probation::default(),
        debounce: Duration::from_millis(10),
        rescan,
        // On a busy machine the slow file takes more than a minute.
        compile_wait: Duration::from_secs(180),
    };
    let manager = PolicyManager::start(policies, config, events).unwrap();
    TestManager { dir, slot, manager }
}

fn managed(settings: &str) -> TestManager {
    manager_in(TempDir::new().unwrap(), settings)
}

impl TestManager {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Waits, at most two minutes, until the status is as wanted.
    fn until(&self, wanted: impl Fn(&SlotStatus, &ManagerStatus) -> bool) -> SlotStatus {
        let started = tokio::time::Instant::now();
        loop {
            let status = self.manager.status();
            if wanted(&status.slots[0], &status) {
                return status.slots[0].clone();
            }
            assert!(started.elapsed().as_secs() < 120, "{status:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn drop_in(&self, bytes: &[u8]) {
        let staged = self.path(".staged");
        fs::write(&staged, bytes).unwrap();
        fs::rename(staged, self.path("prefill.wasm")).unwrap();
    }
}

#[test]
fn what_lies_in_the_folder_serves_from_the_first_request() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("prefill.wasm"), HOSTILE).unwrap();
    let managed = manager_in(dir, "{}");
    assert_eq!(
        (managed.slot.pin().generation.0, managed.manager.status().slots[0].policy.as_str()),
        (2, "hostile")
    );
}

#[test]
fn a_file_renamed_rewritten_or_linked_into_place_is_a_new_generation() {
    let managed = managed("{}");
    managed.drop_in(HOSTILE);
    managed.until(|slot, _| slot.policy == "hostile" && slot.generation.0 == 2);
    fs::write(managed.path("prefill.wasm"), WEIGHTED_RANDOM).unwrap();
    managed.until(|_, _| {
        managed.slot.pin().generation.0 >= 3 && managed.manager.status().slots[0].policy == "weighted-random"
    });
    // As Kubernetes mounts a config map: the file links to ..data/file, ..data links to a dated folder.
    for (folder, bytes) in [("..one", HOSTILE), ("..two", pointsman_embedded_policies::LEAST_LOADED)] {
        fs::create_dir(managed.path(folder)).unwrap();
        fs::write(managed.path(folder).join("prefill.wasm"), bytes).unwrap();
    }
    std::os::unix::fs::symlink("..one", managed.path("..data")).unwrap();
    let _ = fs::remove_file(managed.path("prefill.wasm"));
    std::os::unix::fs::symlink("..data/prefill.wasm", managed.path("prefill.wasm")).unwrap();
    managed.until(|slot, _| slot.policy == "hostile");
    std::os::unix::fs::symlink("..two", managed.path("..data_tmp")).unwrap();
    fs::rename(managed.path("..data_tmp"), managed.path("..data")).unwrap();
    managed.until(|slot, _| slot.policy == "least-loaded");
}

#[test]
fn a_broken_file_is_refused_and_the_last_good_one_kept() {
    let managed = managed("{}");
    managed.drop_in(WEIGHTED_RANDOM);
    let good = managed.until(|slot, _| slot.policy == "weighted-random");
    managed.drop_in(b"garbage");
    let after = managed.until(|slot, _| !slot.refusals.is_empty());
    assert_eq!((after.generation, after.refusals[0].kind), (good.generation, "not_wasm"));
    assert_eq!(
        after.refusals[0].message,
        "not WebAssembly: the file is 7 bytes of an unknown type; \
         expected a component or a core module with WIT metadata: `pointsman policy build` makes one"
    );
    // The same bytes are not tried again.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(managed.manager.status().slots[0].refusals.len(), 1);
    managed.drop_in(HOSTILE);
    // O1.16: it was replaced.
    managed.until(|slot, _| slot.policy == "hostile" && !slot.refusals[0].in_force);
    managed.drop_in(b"garbage");
    managed
        .until(|slot, _| slot.refusals.back().is_some_and(|last| last.in_force) && slot.policy == "hostile");
    fs::remove_file(managed.path("prefill.wasm")).unwrap();
    // O1.16: it was removed.
    managed.until(|slot, _| slot.refusals.iter().all(|one| !one.in_force) && slot.refusals.len() == 2);
}

#[test]
fn n7_a_file_that_is_copied_slowly_is_not_refused_meanwhile() {
    let managed = managed("{}");
    let files = [("hostile", HOSTILE), ("weighted-random", WEIGHTED_RANDOM)];
    for (name, bytes) in files.into_iter().cycle() {
        let (before, mut longest) = (managed.manager.status().reloads.clone(), Duration::ZERO);
        let mut file = fs::File::create(managed.path("prefill.wasm")).unwrap();
        for piece in bytes.chunks(bytes.len() / 7) {
            let begun = tokio::time::Instant::now();
            file.write_all(piece).unwrap();
            // Several scans.
            std::thread::sleep(Duration::from_millis(200));
            longest = longest.max(begun.elapsed());
        }
        managed.until(|slot, _| slot.policy == name);
        if longest < Duration::from_millis(800) {
            let refused = |reloads: &[ReloadCount]| {
                reloads.iter().filter(|one| one.result == "refused").map(|one| one.count).sum::<u64>()
            };
            let status = managed.manager.status();
            // N7.31
            assert_eq!(refused(&status.reloads), refused(&before), "{status:#?}");
            break;
        }
    }
    let half = &WEIGHTED_RANDOM[..WEIGHTED_RANDOM.len() / 2];
    fs::write(managed.path("prefill.wasm"), half).unwrap();
    // N7.31
    managed.until(|slot, _| slot.refusals.iter().any(|one| one.in_force));
}

#[test]
fn o1_the_refusal_of_a_file_that_replaced_nothing_ends_with_the_file() {
    let managed = managed("{}");
    managed.drop_in(b"garbage");
    managed.until(|slot, _| slot.refusals.iter().any(|one| one.in_force));
    fs::remove_file(managed.path("prefill.wasm")).unwrap();
    // O1.16: nothing else changes.
    managed.until(|slot, _| slot.refusals.iter().all(|one| !one.in_force));
    assert_eq!(managed.slot.pin().generation.0, 1);
}

#[test]
fn a_filter_without_anything_to_rank_by_is_refused() {
    let managed = managed("{}");
    managed.drop_in(LOW_QUEUE);
    let status = managed.until(|slot, _| !slot.refusals.is_empty());
    assert_eq!((status.refusals[0].kind, status.generation.0), ("wrong_slot", 1));
}

#[test]
fn a_file_of_no_slot_is_told() {
    let managed = managed("{}");
    fs::write(managed.path("prefil.wasm"), HOSTILE).unwrap();
    managed.until(|_, status| status.strays == ["prefil.wasm"]);
}

#[test]
fn a_removed_file_gives_the_slot_back_to_its_default() {
    let managed = managed("{}");
    managed.drop_in(HOSTILE);
    managed.until(|slot, _| slot.state == SlotState::Active);
    fs::remove_file(managed.path("prefill.wasm")).unwrap();
    let status = managed.until(|slot, _| slot.state == SlotState::Default && slot.generation.0 == 3);
    assert_eq!(status.policy, "native:least-loaded");
    // O1.18
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let slot = (SlotKind::Prefill, None);
    let refused = runtime.block_on(managed.manager.execute(Command::RollBack { slot, lane: Lane::Active }));
    assert_eq!(refused.unwrap_err(), CommandError::NothingToRollBack("prefill".into()));
    let status = &managed.manager.status().slots[0];
    assert_eq!((status.policy.as_str(), status.generation.0), ("native:least-loaded", 3));
    assert!(status.quarantined.is_empty(), "{status:#?}");
}

#[test]
fn n7_a_link_to_no_file_removes_nothing() {
    let managed = managed("{}");
    fs::create_dir(managed.path(".release")).unwrap();
    fs::write(managed.path(".release/prefill.wasm"), HOSTILE).unwrap();
    std::os::unix::fs::symlink(".release/prefill.wasm", managed.path("prefill.wasm")).unwrap();
    let good = managed.until(|slot, _| slot.policy == "hostile");
    fs::rename(managed.path(".release"), managed.path(".away")).unwrap();
    let refused = managed.until(|slot, _| slot.refusals.iter().any(|one| one.in_force));
    // N7.16
    assert_eq!((refused.policy.as_str(), refused.generation), ("hostile", good.generation));
    let problem = "the file cannot be read: it is a link to a file that does not exist;";
    assert!(refused.refusals[0].message.starts_with(problem), "{refused:?}");
    fs::rename(managed.path(".away"), managed.path(".release")).unwrap();
    let back = managed.until(|slot, _| slot.refusals.iter().all(|one| !one.in_force));
    assert_eq!((back.policy.as_str(), back.generation), ("hostile", good.generation));
}

#[test]
fn n7_a_directory_that_is_away_removes_nothing_and_is_watched_again() {
    // Only the watch can notice a change in time.
    let spec = SlotSpec::of(Rank::Native(NativeMode::LeastLoaded));
    let managed = manager_that_rescans(Duration::from_hours(1), TempDir::new().unwrap(), spec);
    managed.drop_in(HOSTILE);
    managed.until(|slot, _| slot.policy == "hostile");
    let (dir, away) = (managed.dir.path(), managed.dir.path().with_extension("away"));
    fs::rename(dir, &away).unwrap();
    // N7.6
    let problem = "the policy directory cannot be read: No such file or directory";
    let is_told = |status: &ManagerStatus| {
        status.strays == [dir.display().to_string()] && status.stray_problems[0].starts_with(problem)
    };
    managed.until(|_, status| is_told(status));
    std::thread::sleep(Duration::from_secs(3));
    let status = managed.until(|_, status| is_told(status));
    assert_eq!((status.policy.as_str(), status.generation.0), ("hostile", 2));
    fs::create_dir(dir).unwrap();
    managed.drop_in(WEIGHTED_RANDOM);
    managed.until(|slot, status| slot.policy == "weighted-random" && status.strays.is_empty());
    // N7.6: the new directory is watched.
    managed.drop_in(HOSTILE);
    managed.until(|slot, _| slot.policy == "hostile");
    fs::remove_dir_all(away).unwrap();
}

#[test]
fn a_generation_that_loops_in_its_first_calls_is_rolled_back_and_quarantined() {
    let managed = managed(r#"{"mode":"spin","after":50}"#);
    managed.drop_in(HOSTILE);
    managed.until(|slot, _| slot.state == SlotState::Active);
    let active = managed.slot.pin();
    let Program::Selector { selector, .. } = &active.program else { panic!("a selector") };
    let mut calls = 0;
    loop {
        calls += 1;
        let call = Call { leg: Leg::Prefill, attempt: 0, rows: 1, seed: calls, now_us: 0 };
        let outcome = selector.select(&mut DecisionContext::new(Purpose::Route), &call, &[0]);
        active.note(&outcome, Duration::ZERO, None);
        if matches!(outcome, Err(Failure::Timeout { .. })) {
            break;
        }
        assert!(outcome.is_ok() && calls < 1_000, "{outcome:?} in call {calls}");
    }
    assert!(active.breaker.is_open());
    let status = managed.until(|slot, _| slot.state == SlotState::RolledBack);
    assert_eq!(
        (status.policy.as_str(), status.generation.0, status.rollbacks),
        ("native:least-loaded", 3, 1)
    );
    assert_eq!(status.refusals[0].kind, "rolled_back");
    assert_eq!(status.quarantined.len(), 1);
    // It still lies there, and stays out.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(managed.slot.pin().generation.0, 3);
}

#[test]
fn a_folder_that_does_not_exist_is_an_error_that_names_it() {
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let error = PolicyDir::open(&engine, Some("/no/such/folder".into()), TrustRules::default()).unwrap_err();
    assert_eq!(error.to_string(), "`/no/such/folder` does not exist; create it");
}

/// A policy that takes long to compile: beside its own module it carries one of many functions, which are
/// never called.
fn slow_to_compile() -> Vec<u8> {
    let body = "(i32.mul (i32.add (local.get 0) (i32.const 7)) (i32.xor (local.get 0) (i32.const 99)))";
    let functions: String =
        (0..12_000).map(|_| format!("(func (param i32) (result i32) (i32.add {body} {body}))")).collect();
    let module = wat::parse_str(format!("(module {functions})")).unwrap();
    let mut size = module.len();
    let mut bytes = HOSTILE.to_vec();
    // A section of kind 1, a core module: its size as LEB128, then the module.
    bytes.push(1);
    while size >= 0x80 {
        bytes.push((size & 0x7f) as u8 | 0x80);
        size >>= 7;
    }
    bytes.push(size as u8);
    bytes.extend(module);
    // More than a small file has: a section of kind 0 with an empty name.
    let padding = 1_200_000_u32;
    bytes.extend([
        0,
        0x80 | (padding & 0x7f) as u8,
        0x80 | ((padding >> 7) & 0x7f) as u8,
        (padding >> 14) as u8,
    ]);
    bytes.resize(bytes.len() + padding as usize, 0);
    bytes
}

#[test]
fn a_slow_compile_delays_neither_another_file_nor_a_rollback() {
    let managed = managed("{}");
    managed.drop_in(WEIGHTED_RANDOM);
    managed.until(|slot, _| slot.policy == "weighted-random");
    managed.drop_in(&slow_to_compile());
    let begun = tokio::time::Instant::now();
    std::thread::sleep(Duration::from_millis(300));
    // A trial in the same folder, meanwhile.
    fs::write(managed.path(".canary"), pointsman_embedded_policies::LEAST_LOADED).unwrap();
    fs::rename(managed.path(".canary"), managed.path("prefill.canary.wasm")).unwrap();
    managed.until(|slot, _| slot.canary.as_ref().is_some_and(|canary| canary.policy == "least-loaded"));
    let small = begun.elapsed();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let asked = tokio::time::Instant::now();
    let slot = (SlotKind::Prefill, None);
    let done =
        runtime.block_on(managed.manager.execute(Command::RollBack { slot, lane: Lane::Active })).unwrap();
    let answered = asked.elapsed();
    assert_eq!((done.changed[0].result, done.changed[0].reason), ("rolled_back", "command"));
    assert_eq!(
        managed.manager.status().slots[0].policy,
        "native:least-loaded",
        "the slow one is not there yet"
    );
    // O1.19: what was saved before the rollback does not replace what the operator went back to.
    let report = runtime.block_on(managed.manager.execute(Command::Reload)).unwrap();
    assert!(report.changed.is_empty() && report.compiling.is_empty(), "{report:?}");
    let held = &report.refused[0];
    assert_eq!((&*held.file, held.kind, report.refused.len()), ("prefill.wasm", "rolled_back", 1));
    assert!(
        held.message.starts_with("an operator rolled the slot back before this was compiled"),
        "{held:?}"
    );
    let status = managed.manager.status().slots[0].clone();
    assert_eq!((&*status.policy, &*status.undo.unwrap().policy), ("native:least-loaded", "prefill.wasm"));
    // An undo lets it run. It is answered when the compile is done, with its result.
    let begun = tokio::time::Instant::now();
    let slot = (SlotKind::Prefill, None);
    let report = runtime.block_on(managed.manager.execute(Command::UndoRollBack { slot })).unwrap();
    let slow = begun.elapsed();
    assert!(report.changed.iter().any(|change| change.result == "installed"), "{report:?}");
    assert_eq!(managed.manager.status().slots[0].policy, "hostile");
    // A busy machine delays every swap: the bound only shows that none waited for the compilation.
    assert!(answered < slow / 8, "answered after {answered:?}, large after {slow:?}");
    println!("small after {small:?}, rollback answered after {answered:?}, large after {slow:?}");
}

#[test]
fn a_rollback_keeps_out_what_compiles_and_what_is_saved_later_goes_live() {
    let managed = managed("{}");
    managed.drop_in(&slow_to_compile());
    managed.until(|_, status| !status.compiling.is_empty());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let roll_back = || {
        let slot = (SlotKind::Prefill, None);
        runtime.block_on(managed.manager.execute(Command::RollBack { slot, lane: Lane::Active }))
    };
    // O1.19: nothing ran before, and nothing is to come.
    let done = roll_back().unwrap();
    assert_eq!((done.changed[0].result, done.changed[0].reason), ("kept", "command"));
    assert!(managed.manager.status().compiling.is_empty());
    assert_eq!(roll_back().unwrap_err(), CommandError::NothingToRollBack("prefill".into()));
    // O1.19
    managed.drop_in(WEIGHTED_RANDOM);
    managed.until(|slot, _| slot.policy == "weighted-random");
    // A file that no scan has seen yet was saved before the rollback, too.
    managed.drop_in(HOSTILE);
    assert_eq!(roll_back().unwrap().slots[0].active.as_ref().unwrap().policy, "native:least-loaded");
    std::thread::sleep(Duration::from_millis(600));
    let status = managed.manager.status().slots[0].clone();
    assert_eq!((&*status.policy, status.quarantined.len()), ("native:least-loaded", 3), "{status:?}");
}

#[test]
fn what_was_compiled_for_content_that_is_gone_is_not_installed() {
    let managed = managed("{}");
    managed.drop_in(&slow_to_compile());
    std::thread::sleep(Duration::from_millis(300));
    managed.drop_in(WEIGHTED_RANDOM);
    let status = managed.until(|slot, _| slot.policy == "weighted-random");
    assert_eq!(status.generation.0, 2);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(managed.manager.execute(Command::Reload)).unwrap();
    let status = managed.manager.status();
    assert_eq!((status.slots[0].policy.as_str(), status.slots[0].generation.0), ("weighted-random", 2));
}

#[test]
fn a_pipe_or_a_file_too_large_is_refused_unread() {
    let managed = managed("{}");
    assert!(
        std::process::Command::new("mkfifo").arg(managed.path("prefill.wasm")).status().unwrap().success()
    );
    let refused = managed.until(|slot, _| slot.refusals.len() == 1);
    assert_eq!(
        refused.refusals[0].message,
        "the file cannot be read: it is not a regular file; check its type and permissions"
    );
    // Sparse: 64 GiB by its name.
    let large = fs::File::create(managed.path(".large")).unwrap();
    large.set_len(64 << 30).unwrap();
    fs::rename(managed.path(".large"), managed.path("prefill.wasm")).unwrap();
    let refused = managed.until(|slot, _| slot.refusals.len() == 2);
    assert_eq!(refused.refusals[1].kind, "too_large");
}
