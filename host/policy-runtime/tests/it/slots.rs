//! A slot's lanes on a real folder: composed slots, trials, promotion, rollback by command, signatures and
//! pins.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "helpers of tests may fail as tests do"
)]

use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Duration};

use pointsman_embedded_policies::{CONDITIONAL_DISAGG, KV_AWARE, LEAST_LOADED, PREDICTED_LATENCY};
use pointsman_policy_runtime::{
    Access, Capacity, Command, CommandError, InheritedBy, LaneSpec, Limits, ManagerConfig, ManagerStatus,
    Part, PolicyDir, PolicyEngine, PolicyManager, Probation, Rank, Report, ScorerPart, SlotConfig, SlotSpec,
    SlotState, SlotStatus, Source, TrustRules,
};
use pointsman_routing::{Digest, Failure, Lane, Normalize, Origin, Picker, Program, Slot, SlotKind};
use pointsman_test_guests::{HOSTILE, LOW_QUEUE, WEIGHTED_RANDOM};
use sha2::Digest as _;
use tempfile::TempDir;
use tokio::sync::mpsc;

const NAME: (SlotKind, Option<pointsman_workers::ModelName>) = (SlotKind::Prefill, None);

struct TestManager {
    dir: TempDir,
    slot: Arc<Slot>,
    manager: PolicyManager,
}

fn managed(spec: SlotSpec, trust: TrustRules, files: &[(&str, &[u8])]) -> TestManager {
    rescanned(spec, trust, files, Duration::from_millis(100))
}

fn rescanned(spec: SlotSpec, trust: TrustRules, files: &[(&str, &[u8])], rescan: Duration) -> TestManager {
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("parts")).unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let (sender, events) = mpsc::unbounded_channel();
    let engine = PolicyEngine::new(Limits::default(), Capacity::detect()).unwrap();
    let mut policies = PolicyDir::open(&engine, Some(dir.path().to_owned()), trust).unwrap();
    let access = Access::default();
    let made = policies.initial(SlotKind::Prefill, &spec.active, &access).ok().flatten();
    let native = Program::Native(pointsman_routing::NativeMode::Kv);
    let (program, initial) = made.map_or((native, None), |(program, initial)| (program, Some(initial)));
    let slot = Arc::new(Slot::new(SlotKind::Prefill, None, program, sender));
    let config = ManagerConfig {
        slots: vec![SlotConfig { slot: slot.clone(), spec, access, initial }],
        probation: Probation::default(),
        debounce: Duration::from_millis(10),
        rescan,
        compile_wait: Duration::from_secs(60),
    };
    let manager = PolicyManager::start(policies, config, events).unwrap();
    TestManager { dir, slot, manager }
}

fn builtin() -> SlotSpec {
    SlotSpec::of(Rank::Policy(Part::embedded("kv-aware", KV_AWARE, "{}".into())))
}

fn plain(files: &[(&str, &[u8])]) -> TestManager {
    managed(builtin(), TrustRules::default(), files)
}

fn file_part(name: &str, settings: &str) -> Part {
    let file = Some(PathBuf::from(format!("parts/{name}.wasm")));
    Part { name: name.into(), file, embedded: None, settings: settings.into() }
}

fn composed(weight: f32) -> SlotSpec {
    let kv = Part::embedded("kv-aware", KV_AWARE, "{}".into());
    let scorers = vec![
        ScorerPart { part: kv.clone(), weight, normalize: Normalize::MinMax },
        ScorerPart { part: kv, weight: 1.0, normalize: Normalize::None },
    ];
    let mut spec = SlotSpec::of(Rank::Scorers { scorers, picker: Picker::Softmax { temperature: 0.5 } });
    spec.active.filters = vec![file_part("low-queue", "{}")];
    spec
}

impl TestManager {
    fn put(&self, name: &str, bytes: &[u8]) {
        let staged = self.dir.path().join(".staged");
        fs::write(&staged, bytes).unwrap();
        fs::rename(staged, self.dir.path().join(name)).unwrap();
    }

    fn remove(&self, name: &str) {
        fs::remove_file(self.dir.path().join(name)).unwrap();
    }

    fn status(&self) -> SlotStatus {
        self.manager.status().slots[0].clone()
    }

    /// Waits, at most two minutes, until the status is as wanted.
    fn until(&self, what: &str, wanted: impl Fn(&SlotStatus) -> bool) -> SlotStatus {
        let started = tokio::time::Instant::now();
        loop {
            let status: Arc<ManagerStatus> = self.manager.status();
            if wanted(&status.slots[0]) {
                return status.slots[0].clone();
            }
            assert!(started.elapsed().as_secs() < 120, "never {what}: {:#?}", status.slots[0]);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn ask(&self, command: Command) -> Result<Report, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.manager.execute(command))
    }

    fn reload(&self) -> Report {
        self.ask(Command::Reload).unwrap()
    }

    fn promote(&self, from: Option<Lane>) -> Result<Report, CommandError> {
        self.ask(Command::Promote { slot: NAME, from })
    }

    fn roll_back(&self, lane: Lane) -> Result<Report, CommandError> {
        self.ask(Command::RollBack { slot: NAME, lane })
    }

    /// Nothing moves in several scans.
    fn holds(&self, wanted: impl Fn(&SlotStatus) -> bool) {
        for _ in 0..4 {
            self.reload();
        }
        assert!(wanted(&self.status()), "{:#?}", self.status());
    }
}

#[test]
fn a_built_in_policy_keeps_state_without_a_grant_and_the_same_rule_of_an_operator_needs_it() {
    let spec = |embedded| {
        let part = Part { embedded, ..file_part("mine", "{}") };
        SlotSpec::of(Rank::Policy(part))
    };
    let built_in = managed(spec(Some(PREDICTED_LATENCY)), TrustRules::default(), &[]);
    assert_eq!(built_in.status().policy, "predicted-latency", "{:#?}", built_in.status());
    // A file with one more custom section is not the built-in policy.
    let own = [PREDICTED_LATENCY, &[0, 2, 1, b'x']].concat();
    let own = managed(spec(None), TrustRules::default(), &[("parts/mine.wasm", &own)]);
    let refused = own.until("refused", |slot| !slot.refusals.is_empty());
    assert_eq!(refused.refusals[0].kind, "not_granted");
}

#[test]
fn a_composed_slot_serves_from_its_parts_and_a_new_part_is_a_new_generation_of_the_whole() {
    let managed = managed(composed(2.0), TrustRules::default(), &[("parts/low-queue.wasm", LOW_QUEUE)]);
    let status = managed.status();
    assert_eq!((status.generation.0, status.policy.as_str()), (1, "low-queue+kv-aware"));
    let parts: Vec<_> = status.parts.iter().map(|part| (part.policy.as_str(), part.weight)).collect();
    assert_eq!(parts, [("low-queue", None), ("kv-aware", Some(2.0)), ("kv-aware", Some(1.0))]);
    let Program::Scorers { picker: Picker::Softmax { temperature: 0.5 }, .. } = managed.slot.pin().program
    else {
        panic!("{status:?}")
    };
    // A component that is not a filter is refused among filters, and the whole slot stays as it was.
    managed.put("parts/low-queue.wasm", LEAST_LOADED);
    let refused = managed.until("refused", |slot| !slot.refusals.is_empty());
    assert_eq!((refused.refusals[0].kind, refused.generation.0), ("misplaced", 1));
    assert_eq!(
        refused.refusals[0].message,
        "`low-queue` is a selector and cannot be one of the filters; move it, or name another policy there"
    );
    assert_eq!(refused.refusals[0].file, "parts/low-queue.wasm");
    // A part with one more byte is other content, and the slot's own file takes the place of the scorers
    // only.
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.put("parts/low-queue.wasm", LOW_QUEUE);
    let own = managed.until("own file", |slot| slot.policy == "low-queue+weighted-random");
    assert_eq!(own.source, Source::File);
    managed.remove("parts/low-queue.wasm");
    let missing =
        managed.until("missing", |slot| slot.refusals.back().is_some_and(|r| r.kind == "missing_part"));
    assert_eq!(
        (missing.generation, missing.policy),
        (own.generation, own.policy),
        "the last good one serves"
    );
}

#[test]
fn n7_a_configured_policy_of_another_world_is_refused_with_the_keys_that_name_it() {
    let part = Part::embedded("conditional-disagg", CONDITIONAL_DISAGG, "{}".into());
    let managed = managed(SlotSpec::of(Rank::Policy(part)), TrustRules::default(), &[]);
    let refused = managed.until("refused", |slot| !slot.refusals.is_empty());
    assert_eq!(refused.refusals[0].kind, "wrong_slot");
    // N7.21
    assert_eq!(
        refused.refusals[0].message,
        "a decode-override cannot fill the slot prefill; name a policy of another world in `policy` or `builtin` of \
         the slot's table ([policies.slots.prefill] or [models.NAME.slots.prefill])"
    );
}

#[test]
fn other_settings_or_weights_are_a_new_generation_of_the_same_code() {
    let mut spec = builtin();
    spec.active.settings = r#"{"mode":"good"}"#.into();
    let managed = managed(spec.clone(), TrustRules::default(), &[("prefill.wasm", HOSTILE)]);
    let before = managed.status();
    let configure = |spec: &SlotSpec| {
        let specs = vec![(NAME, spec.clone())];
        managed.ask(Command::Configure { specs, trust: TrustRules::default() }).unwrap()
    };
    assert!(configure(&spec).changed.is_empty());
    spec.active.settings = r#"{"mode":"good","after":3}"#.into();
    let report = configure(&spec);
    let after = managed.status();
    assert_eq!((report.changed.len(), report.changed[0].result), (1, "installed"));
    assert_eq!((after.generation.0, after.digest), (before.generation.0 + 1, before.digest));
    // Settings that the policy does not take leave the slot as it is.
    spec.active.settings = r#"{"no-such":1}"#.into();
    let report = configure(&spec);
    assert_eq!((report.changed[0].result, report.refused[0].kind), ("refused", "configure"));
    assert_eq!(managed.status().generation, after.generation);
}

#[test]
fn f9_a_reload_applies_the_number_of_rows_at_once_and_keeps_the_generation() {
    let mut spec = builtin();
    spec.max_rows = Some(8);
    let managed = managed(spec.clone(), TrustRules::default(), &[]);
    let before = managed.status().generation;
    assert_eq!(managed.slot.snapshot().max_rows, Some(8));
    for max_rows in [Some(64), None] {
        spec.max_rows = max_rows;
        let specs = vec![(NAME, spec.clone())];
        managed.ask(Command::Configure { specs, trust: TrustRules::default() }).unwrap();
        assert_eq!(managed.slot.snapshot().max_rows, max_rows);
    }
    assert_eq!(managed.status().generation, before);
}

#[test]
fn trials_come_and_go_with_their_files_and_have_generations_of_their_own() {
    let managed = plain(&[]);
    managed.put("prefill.canary.wasm", LEAST_LOADED);
    managed.put("prefill.shadow.wasm", WEIGHTED_RANDOM);
    let both = managed.until("both", |slot| slot.canary.is_some() && slot.shadow.is_some());
    let (canary, shadow) = (both.canary.unwrap(), both.shadow.unwrap());
    assert_eq!((canary.policy.as_str(), canary.share), ("least-loaded", 0.05));
    assert_eq!((shadow.policy.as_str(), shadow.share), ("weighted-random", 1.0));
    assert_eq!((both.generation.0, both.policy.as_str()), (1, "kv-aware"), "who serves is not touched");
    assert_ne!(canary.generation, shadow.generation);
    assert_eq!(managed.manager.status().strays, [""; 0]);
    managed.put("prefill.canary.wasm", CONDITIONAL_DISAGG);
    let refused = managed.until("refused", |slot| slot.refusals.len() == 1);
    assert_eq!(
        (refused.refusals[0].kind, refused.canary.unwrap().generation),
        ("wrong_slot", canary.generation)
    );
    managed.remove("prefill.shadow.wasm");
    managed.until("no shadow", |slot| slot.shadow.is_none() && slot.canary.is_some());
}

#[test]
fn n7_a_filter_is_tried_with_the_ranking_of_the_active_lane() {
    let managed = plain(&[]);
    managed.put("prefill.canary.wasm", LOW_QUEUE);
    managed.put("prefill.shadow.wasm", LOW_QUEUE);
    // N7.8
    let both = managed.until("both", |slot| slot.canary.is_some() && slot.shadow.is_some());
    let policies = [both.canary.unwrap().policy, both.shadow.unwrap().policy];
    assert_eq!(policies, ["low-queue+kv-aware"; 2]);
    assert!(both.refusals.is_empty(), "{:?}", both.refusals);
    // Without the file there is no trial, although the active lane has a ranking.
    managed.remove("prefill.canary.wasm");
    managed.until("no canary", |slot| slot.canary.is_none() && slot.shadow.is_some());
}

#[test]
fn a_renamed_trial_changes_its_lane_at_once_with_the_same_instances() {
    // Between two scans that no change causes, a missing file may come back.
    let managed = rescanned(builtin(), TrustRules::default(), &[], Duration::from_secs(600));
    managed.put("prefill.shadow.wasm", WEIGHTED_RANDOM);
    managed.until("a shadow", |slot| slot.shadow.is_some());
    let instances = managed.manager.usage().instances;
    let path = |lane: &str| managed.dir.path().join(format!("prefill.{lane}.wasm"));
    let changed_ms = |slot: &SlotStatus| slot.canary.as_ref().map_or(0, |canary| canary.since_ms);
    fs::rename(path("shadow"), path("canary")).unwrap();
    let renamed = managed.until("a canary", |slot| slot.canary.is_some() && slot.shadow.is_none());
    let parts = &renamed.canary.as_ref().unwrap().parts;
    assert_eq!(parts[0].origin, Origin::File("prefill.canary.wasm".into()));
    // Compiling it again would have made further instances, and taken a while.
    assert_eq!(managed.manager.usage().instances, instances);
    let history = managed.manager.status().history.clone();
    let gone = history.iter().rev().find(|one| one.change.reason == "file_gone").unwrap();
    assert!(gone.at_ms.abs_diff(changed_ms(&renamed)) < 900, "{history:?}");
    // And so does a file of the active lane: `mv` is how a trial is made permanent.
    fs::rename(path("canary"), managed.dir.path().join("prefill.wasm")).unwrap();
    managed.until("active", |slot| slot.policy == "weighted-random" && slot.canary.is_none());
    assert_eq!(managed.manager.usage().instances, instances);
}

#[test]
fn a_removed_trial_ends_long_before_the_next_rescan() {
    let managed = rescanned(builtin(), TrustRules::default(), &[], Duration::from_secs(600));
    managed.put("prefill.shadow.wasm", WEIGHTED_RANDOM);
    managed.until("a shadow", |slot| slot.shadow.is_some());
    managed.remove("prefill.shadow.wasm");
    // `until` waits 20 s.
    managed.until("no shadow", |slot| slot.shadow.is_none());
}

#[test]
fn a_canary_that_fails_in_its_first_calls_is_withdrawn_and_stays_out_of_every_lane() {
    let managed = plain(&[]);
    managed.put("prefill.canary.wasm", HOSTILE);
    managed.until("a canary", |slot| slot.canary.is_some());
    let snapshot = managed.slot.snapshot();
    let canary = &snapshot.canary.as_ref().unwrap().handle;
    let timeout = Failure::Timeout { limit: Duration::from_millis(2), key: "policies.deadline" };
    canary.note::<()>(&Err(timeout), Duration::ZERO, None);
    let after = managed.until("withdrawn", |slot| slot.canary.is_none() && slot.rollbacks == 1);
    assert_eq!((after.generation.0, after.quarantined.len(), after.refusals[0].kind), (1, 1, "rolled_back"));
    managed.holds(|slot| slot.canary.is_none() && slot.generation.0 == 1);
    managed.put("prefill.wasm", HOSTILE);
    let told = managed.until("told", |slot| slot.refusals.len() == 2);
    assert_eq!((told.refusals[1].kind, told.generation.0), ("quarantined", 1));
    let withdrawn = &managed.manager.status().reloads;
    assert!(
        withdrawn.iter().any(|count| (count.result, count.reason) == ("withdrawn", "timeout")),
        "{withdrawn:?}"
    );
}

#[test]
fn a_promotion_holds_until_the_active_file_changes() {
    let managed = plain(&[("prefill.wasm", WEIGHTED_RANDOM)]);
    assert_eq!(
        managed.promote(None).unwrap_err().to_string(),
        "slot `prefill` does not have a canary or shadow to promote; it runs active `weighted-random`; put the policy \
         at `prefill.canary.wasm` or `prefill.shadow.wasm` first"
    );
    managed.put("prefill.canary.wasm", LEAST_LOADED);
    let trial = managed.until("a canary", |slot| slot.canary.is_some());
    let report = managed.promote(None).unwrap();
    assert_eq!((report.changed[0].result, report.changed[0].reason), ("promoted", "canary"));
    let promoted = |slot: &SlotStatus| {
        slot.policy == "least-loaded" && slot.source == Source::Promoted && slot.canary.is_none()
    };
    // Both files lie there as they did: neither undoes it, nor is the canary one again.
    managed.holds(promoted);
    let now = managed.status();
    assert!(now.generation > trial.canary.unwrap().generation && now.can_roll_back);
    let again = managed.promote(Some(Lane::Canary)).unwrap_err().to_string();
    assert!(
        again.ends_with("`prefill.canary.wasm` was promoted before: change it to start a new trial"),
        "{again}"
    );
    // The operator makes it the file: nothing changes but where it comes from.
    managed.put("prefill.wasm", LEAST_LOADED);
    let settled = managed.until("a file", |slot| slot.source == Source::File);
    assert_eq!((settled.generation, settled.policy.as_str()), (now.generation, "least-loaded"));
    // And another file ends it.
    managed.put("prefill.wasm", HOSTILE);
    managed.until("another", |slot| slot.policy == "hostile");
}

#[test]
fn another_active_file_ends_a_promotion_and_another_canary_file_is_a_canary() {
    let managed = plain(&[("prefill.shadow.wasm", LEAST_LOADED)]);
    managed.until("a shadow", |slot| slot.shadow.is_some());
    managed.put("prefill.canary.wasm", WEIGHTED_RANDOM);
    managed.until("a canary", |slot| slot.canary.is_some());
    assert_eq!(
        managed.promote(None).unwrap_err().to_string(),
        "slot `prefill` runs active `kv-aware`, canary `weighted-random`, shadow `least-loaded`; name the one to \
         promote, `canary` or `shadow`"
    );
    managed.promote(Some(Lane::Shadow)).unwrap();
    managed.holds(|slot| {
        slot.source == Source::Promoted && slot.policy == "least-loaded" && slot.shadow.is_none()
    });
    managed.put("prefill.shadow.wasm", HOSTILE);
    managed.until("a shadow again", |slot| {
        slot.shadow.as_ref().is_some_and(|shadow| shadow.policy == "hostile")
    });
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.until("the file", |slot| slot.policy == "weighted-random" && slot.source == Source::File);
}

#[test]
fn a_rollback_by_command_outlives_scans_of_the_unchanged_file_and_goes_one_step() {
    let managed = plain(&[]);
    assert_eq!(
        managed.roll_back(Lane::Active).unwrap_err(),
        CommandError::NothingToRollBack("prefill".into())
    );
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("active", |slot| slot.policy == "least-loaded");
    let report = managed.roll_back(Lane::Active).unwrap();
    assert_eq!((report.changed[0].result, report.changed[0].generation.unwrap().0), ("rolled_back", 3));
    managed.holds(|slot| slot.policy == "kv-aware" && slot.generation.0 == 3 && slot.quarantined.len() == 1);
    assert_eq!(
        managed.roll_back(Lane::Active).unwrap_err(),
        CommandError::NothingToRollBack("prefill".into())
    );
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.until("another file", |slot| slot.policy == "weighted-random");
    // The one that was rolled back is told of when it comes again, and stays out.
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("told", |slot| slot.refusals.back().is_some_and(|refusal| refusal.kind == "quarantined"));
    managed.holds(|slot| slot.policy == "weighted-random");
}

fn undo(managed: &TestManager) -> Result<Report, CommandError> {
    managed.ask(Command::UndoRollBack { slot: NAME })
}

#[test]
fn a_rollback_is_undone_once_and_the_answer_says_what_serves() {
    let managed = plain(&[]);
    assert_eq!(undo(&managed).unwrap_err(), CommandError::NothingToUndo("prefill".into()));
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("active", |slot| slot.policy == "least-loaded");
    managed.roll_back(Lane::Active).unwrap();
    let rolled_back = managed.status().undo.unwrap();
    // O1.10
    assert_eq!((&*rolled_back.policy, rolled_back.digest), ("least-loaded", sha256(LEAST_LOADED)));
    managed.holds(|slot| slot.policy == "kv-aware" && slot.undo.is_some());
    let report = undo(&managed).unwrap();
    // O1.12
    assert_eq!(report.undone.unwrap().policy, "least-loaded");
    let changed: Vec<_> = report.changed.iter().map(|change| (change.lane, change.result)).collect();
    assert_eq!(changed, [(Lane::Active, "installed")]);
    assert_eq!(report.slots[0].active.as_ref().unwrap().policy, "least-loaded");
    let back = managed.status();
    assert!(back.quarantined.is_empty() && back.undo.is_none(), "{back:#?}");
    let history = managed.manager.status().history.back().cloned().unwrap();
    // O1.10
    assert_eq!((history.change.result, history.policy.as_deref()), ("installed", Some("least-loaded")));
    managed.holds(|slot| slot.policy == "least-loaded");
    // O1.12
    assert_eq!(undo(&managed).unwrap_err(), CommandError::NothingToUndo("prefill".into()));
}

#[test]
fn an_undo_that_fails_can_be_tried_again_when_a_file_asks_for_what_was_rolled_back() {
    let managed = plain(&[]);
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("active", |slot| slot.policy == "least-loaded");
    managed.roll_back(Lane::Active).unwrap();
    // The file asks for something else now.
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.until("another file", |slot| slot.policy == "weighted-random" && slot.undo.is_none());
    // O1.12
    let refused = undo(&managed).unwrap_err().to_string();
    let expected = format!(
        "slot `prefill` rolled back `least-loaded` ({}), and no file or setting asks for it now: put it at \
         `prefill.wasm` again, then undo the rollback",
        sha256(LEAST_LOADED)
    );
    assert_eq!(refused, expected);
    managed.holds(|slot| slot.policy == "weighted-random" && slot.quarantined.len() == 1);
    managed.put("prefill.canary.wasm", LEAST_LOADED);
    managed.until("kept out", |slot| slot.refusals.back().is_some_and(|last| last.kind == "quarantined"));
    let undone = undo(&managed).unwrap();
    // O1.12
    assert_eq!(undone.slots[0].canary.as_ref().unwrap().policy, "least-loaded");
    // An ended trial begins again.
    managed.roll_back(Lane::Canary).unwrap();
    managed.holds(|slot| slot.canary.is_none());
    managed.remove("prefill.canary.wasm");
    managed.until("no file", |slot| slot.undo.is_none());
    assert!(matches!(undo(&managed), Err(CommandError::NoFileToUndo { .. })));
    managed.put("prefill.canary.wasm", LEAST_LOADED);
    managed.until("a file", |slot| slot.undo.is_some());
    undo(&managed).unwrap();
    managed.until("a canary again", |slot| slot.canary.is_some());
}

#[test]
fn an_undo_says_why_the_content_is_refused_now_and_works_when_that_is_mended() {
    let managed = plain(&[]);
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("active", |slot| slot.policy == "least-loaded");
    managed.roll_back(Lane::Active).unwrap();
    let pins = BTreeMap::from([("prefill".to_owned(), sha256(WEIGHTED_RANDOM))]);
    let trusting = |trust| managed.ask(Command::Configure { specs: Vec::new(), trust }).unwrap();
    trusting(TrustRules::new(None, pins).unwrap());
    assert_eq!(managed.status().undo, None);
    let refused = undo(&managed).unwrap_err().to_string();
    let expected = "the rollback of `least-loaded` in slot `prefill` stays: `prefill.wasm` was refused \
                    (pin_mismatch): sha256 ";
    // O1.12
    assert!(
        refused.starts_with(expected) && refused.ends_with("undo it again when that is mended"),
        "{refused}"
    );
    trusting(TrustRules::default());
    undo(&managed).unwrap();
    assert_eq!(managed.status().policy, "least-loaded");
}

#[test]
fn a_promoted_canary_that_is_rolled_back_gives_the_file_back_and_is_no_canary_again() {
    let managed = plain(&[("prefill.wasm", WEIGHTED_RANDOM), ("prefill.canary.wasm", LEAST_LOADED)]);
    managed.until("a canary", |slot| slot.canary.is_some());
    managed.promote(Some(Lane::Canary)).unwrap();
    managed.roll_back(Lane::Active).unwrap();
    managed.holds(|slot| {
        slot.policy == "weighted-random" && slot.source == Source::File && slot.canary.is_none()
    });
    // A trial may be ended by command too.
    managed.put("prefill.canary.wasm", HOSTILE);
    managed.until("a canary", |slot| slot.canary.is_some());
    assert_eq!(managed.roll_back(Lane::Canary).unwrap().changed[0].result, "withdrawn");
    managed.holds(|slot| slot.canary.is_none());
}

#[test]
fn o1_a_rollback_of_a_promotion_blames_the_file_of_the_trial() {
    let managed = plain(&[("prefill.wasm", WEIGHTED_RANDOM), ("prefill.canary.wasm", LEAST_LOADED)]);
    managed.until("a canary", |slot| slot.canary.is_some());
    managed.promote(Some(Lane::Canary)).unwrap();
    let report = managed.roll_back(Lane::Active).unwrap();
    let blamed: Vec<_> = report.refused.iter().map(|one| (one.lane, one.file.as_str())).collect();
    // O1.24
    assert_eq!(blamed, [(Lane::Canary, "prefill.canary.wasm")]);
    managed.holds(|slot| slot.state == SlotState::Active && slot.source == Source::File);
    managed.remove("prefill.canary.wasm");
    managed.until("no file", |slot| slot.undo.is_none() && !slot.refusals.iter().any(|one| one.in_force));
    let why = undo(&managed).unwrap_err().to_string();
    // O1.24
    assert!(why.ends_with(": put it at `prefill.canary.wasm` again, then undo the rollback"), "{why}");
    // The generation that a failure rolls back came from a file as well.
    managed.put("prefill.shadow.wasm", HOSTILE);
    managed.until("a shadow", |slot| slot.shadow.is_some());
    managed.promote(Some(Lane::Shadow)).unwrap();
    let timeout = Failure::Timeout { limit: Duration::from_millis(2), key: "policies.deadline" };
    managed.slot.snapshot().active.note::<()>(&Err(timeout), Duration::ZERO, None);
    let status = managed.until("rolled back", |slot| slot.rollbacks == 1);
    let last = status.refusals.back().unwrap();
    assert_eq!(
        (last.lane, last.file.as_str(), last.kind),
        (Lane::Shadow, "prefill.shadow.wasm", "rolled_back")
    );
}

#[test]
fn o1_a_rollback_is_over_when_files_and_settings_ask_for_what_it_restored() {
    let managed = plain(&[("prefill.wasm", LEAST_LOADED)]);
    let install = |bytes: &[u8], policy: &str| {
        managed.put("prefill.wasm", bytes);
        managed.until(policy, |slot| slot.policy == policy);
    };
    install(WEIGHTED_RANDOM, "weighted-random");
    managed.roll_back(Lane::Active).unwrap();
    managed.holds(|slot| slot.state == SlotState::RolledBack && slot.policy == "least-loaded");
    managed.put("prefill.wasm", LEAST_LOADED);
    // O1.23
    managed.until("the file's again", |slot| slot.state == SlotState::Active);
    managed.holds(|slot| slot.policy == "least-loaded" && slot.quarantined.len() == 1);
    managed.remove("prefill.wasm");
    managed.until("the default", |slot| slot.policy == "kv-aware");
    install(HOSTILE, "hostile");
    managed.roll_back(Lane::Active).unwrap();
    managed.holds(|slot| slot.state == SlotState::RolledBack && slot.policy == "kv-aware");
    managed.remove("prefill.wasm");
    // O1.23
    managed.until("the default again", |slot| slot.state == SlotState::Default);
    // What was rolled back is kept out all the same.
    managed.put("prefill.wasm", HOSTILE);
    managed.until("kept out", |slot| slot.refusals.back().is_some_and(|last| last.kind == "quarantined"));
}

#[test]
fn o1_an_undo_of_settings_asks_for_the_settings_and_not_for_the_file() {
    let configured = |settings: &str| {
        let mut spec = naming_least_loaded(settings);
        spec.active.inherited_by = None;
        spec
    };
    let [first, second, third] =
        [1, 2, 3].map(|weight| configured(&format!("{{\"active-requests\":{weight}}}")));
    let advice = ": give the slot the settings of that time again, then undo the rollback";
    for files in [&[][..], &[("prefill.wasm", LEAST_LOADED)]] {
        let managed = managed(first.clone(), TrustRules::default(), files);
        let trust = TrustRules::default;
        let configure = |spec: &SlotSpec| {
            managed.ask(Command::Configure { specs: vec![(NAME, spec.clone())], trust: trust() }).unwrap();
        };
        configure(&second);
        managed.roll_back(Lane::Active).unwrap();
        configure(&third);
        let why = undo(&managed).unwrap_err().to_string();
        // O1.12
        assert!(why.ends_with(advice), "{why}");
        configure(&second);
        undo(&managed).unwrap();
    }
}

/// The built-in policy of the slot with `settings`, behind these filters.
fn filtered(policy: (&str, &'static [u8], &str), filters: &[&str]) -> SlotSpec {
    let (name, bytes, settings) = policy;
    let mut spec = SlotSpec::of(Rank::Policy(Part::embedded(name, bytes, settings.into())));
    spec.active.filters = filters.iter().map(|name| file_part(name, "{}")).collect();
    spec
}

#[test]
fn t5_a_rollback_keeps_the_configured_filters_that_did_not_fail() {
    let other = [LOW_QUEUE, &[0, 2, 1, b'x']].concat();
    let files = [("parts/low-queue.wasm", LOW_QUEUE), ("parts/other.wasm", &*other)];
    let kv_aware = ("kv-aware", KV_AWARE, "{}");
    let managed = managed(filtered(kv_aware, &[]), TrustRules::default(), &files);
    let configure = |spec: SlotSpec| {
        managed.ask(Command::Configure { specs: vec![(NAME, spec)], trust: TrustRules::default() }).unwrap()
    };
    let fail = || {
        let failure = Failure::Timeout { limit: Duration::from_millis(2), key: "policies.deadline" };
        managed.slot.snapshot().active.note::<()>(&Err(failure), Duration::ZERO, None);
    };
    // One edit names another policy and a filter, and the policy fails.
    configure(filtered(("least-loaded", LEAST_LOADED, "{}"), &["low-queue"]));
    managed.until("the edit serves", |slot| slot.policy == "low-queue+least-loaded");
    fail();
    managed.until("rolled back", |slot| slot.state == SlotState::RolledBack);
    // T5.1
    managed.holds(|slot| slot.policy == "low-queue+kv-aware" && slot.rollbacks == 1);
    let generation = managed.status().generation;
    // The configuration that asks for just that changes nothing but the state.
    configure(filtered(kv_aware, &["low-queue"]));
    let status = managed.status();
    assert_eq!((status.generation, status.state), (generation, SlotState::Default));
    // Without the filter, it ends.
    configure(filtered(kv_aware, &[]));
    assert_eq!(managed.status().policy, "kv-aware");
    // A policy that ran before and fails behind a new filter is left to its breaker.
    configure(filtered(kv_aware, &["low-queue"]));
    fail();
    // T5.2
    managed.holds(|slot| slot.policy == "low-queue+kv-aware" && slot.rollbacks == 1);
    // A command puts all of the last generation back where only the filters changed, and says so.
    configure(filtered(kv_aware, &["low-queue", "other"]));
    managed.roll_back(Lane::Active).unwrap();
    let status = managed.status();
    assert_eq!(status.parts.len(), 2);
    let message = &status.refusals.back().unwrap().message;
    let expected = "; the filters of the configuration are not in force: `low-queue`, `low-queue`; those of before \
                    are: `low-queue`";
    // T5.3
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn t5_a_configured_filter_that_fails_is_rolled_back_and_told() {
    let managed = managed(builtin(), TrustRules::default(), &[("parts/low-queue.wasm", LOW_QUEUE)]);
    let specs = vec![(NAME, filtered(("kv-aware", KV_AWARE, "{}"), &["low-queue"]))];
    managed.ask(Command::Configure { specs, trust: TrustRules::default() }).unwrap();
    managed.until("it serves", |slot| slot.policy == "low-queue+kv-aware");
    let timeout = Failure::Timeout { limit: Duration::from_millis(2), key: "policies.deadline" };
    managed.slot.snapshot().active.note_call(Some((&timeout, 0)), Duration::ZERO, None);
    managed.until("rolled back", |slot| slot.state == SlotState::RolledBack);
    managed.holds(|slot| slot.policy == "kv-aware" && slot.rollbacks == 1);
    let message = managed.status().refusals.back().unwrap().message.clone();
    let expected =
        "; the filters of the configuration are not in force: `low-queue`; those of before are: none";
    // T5.1, T5.3
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn t6_the_last_failure_names_the_policy_that_failed() {
    let managed = managed(
        filtered(("kv-aware", KV_AWARE, "{}"), &["low-queue"]),
        TrustRules::default(),
        &[("parts/low-queue.wasm", LOW_QUEUE)],
    );
    let fail = |step: u32| {
        let failure = Failure::Invalid("as the test wants it".to_owned());
        managed.slot.snapshot().active.note_call(Some((&failure, step)), Duration::ZERO, None);
        managed.status().last_failure.unwrap().policy.to_string()
    };
    // T6.2
    assert_eq!([fail(0), fail(1)], ["low-queue", "kv-aware"]);
}

#[test]
fn n7_a_filter_is_tried_and_promoted_before_the_ranking_of_the_active_file() {
    let managed = plain(&[("prefill.wasm", LEAST_LOADED), ("prefill.canary.wasm", LOW_QUEUE)]);
    let tries = |policy: &'static str| {
        move |slot: &SlotStatus| slot.canary.as_ref().is_some_and(|canary| canary.policy == policy)
    };
    // N7.8
    managed.until("behind the file", tries("low-queue+least-loaded"));
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.until("behind the next file", tries("low-queue+weighted-random"));
    managed.promote(None).unwrap();
    // N7.8
    managed.holds(|slot| {
        slot.policy == "low-queue+weighted-random" && slot.source == Source::Promoted && slot.canary.is_none()
    });
    managed.roll_back(Lane::Active).unwrap();
    managed.holds(|slot| slot.policy == "weighted-random" && slot.canary.is_none());
    undo(&managed).unwrap();
    let tried = managed.until("tried again", tries("low-queue+weighted-random")).canary.unwrap();
    // A file that is missing for a moment is still the one that ranks.
    managed.remove("prefill.wasm");
    managed.reload();
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    managed.holds(|slot| slot.canary.as_ref().is_some_and(|canary| canary.generation == tried.generation));
    managed.remove("prefill.wasm");
    managed.until("behind the configured one", tries("low-queue+kv-aware"));
    // A filter as the active file does not rank.
    managed.put("prefill.wasm", &[LOW_QUEUE, &[0, 2, 1, b'x']].concat());
    managed.until("a filter serves", |slot| slot.policy == "low-queue+kv-aware");
    managed.holds(tries("low-queue+kv-aware"));
}

#[test]
fn a_reload_by_command_answers_with_what_it_did_and_what_stands_refused() {
    let managed = plain(&[]);
    fs::write(managed.dir.path().join("prefill.wasm"), LEAST_LOADED).unwrap();
    fs::write(managed.dir.path().join("prefill.canary.wasm"), b"garbage").unwrap();
    // The watch may have been faster: what stands refused is told either way.
    let report = managed.reload();
    assert_eq!(managed.status().policy, "least-loaded");
    assert_eq!((report.refused.len(), report.refused[0].kind), (1, "not_wasm"));
    assert_eq!(report.refused[0].file, "prefill.canary.wasm");
    let unknown = Command::Promote { slot: (SlotKind::Decode, None), from: None };
    assert_eq!(managed.ask(unknown).unwrap_err(), CommandError::UnknownSlot("decode".into()));
}

fn sha256(bytes: &[u8]) -> Digest {
    Digest(sha2::Sha256::digest(bytes).into())
}

fn sign(key: &minisign::SecretKey, bytes: &[u8]) -> Vec<u8> {
    minisign::sign(None, key, bytes, None, None).unwrap().into_string().into_bytes()
}

#[test]
fn only_what_a_trusted_key_signed_is_looked_at() {
    let trusted = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let stranger = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let keys = [trusted.pk.to_base64()];
    let trust = TrustRules::new(Some(&keys), BTreeMap::new()).unwrap();
    let managed = managed(builtin(), trust, &[]);
    let refused = |kind: &str| {
        let status = managed.until(kind, |slot| slot.refusals.back().is_some_and(|last| last.kind == kind));
        assert_eq!(status.generation.0, 1, "{kind}");
    };
    managed.put("prefill.wasm", b"garbage");
    refused("unsigned");
    managed.put("prefill.wasm.minisig", b"no signature at all");
    refused("bad_signature");
    managed.put("prefill.wasm.minisig", &sign(&stranger.sk, LEAST_LOADED));
    managed.put("prefill.wasm", LEAST_LOADED);
    refused("untrusted_key");
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, WEIGHTED_RANDOM));
    refused("tampered");
    // The policy lay there first; its signature is enough for it to be tried again.
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, LEAST_LOADED));
    let status = managed.until("let in", |slot| slot.policy == "least-loaded");
    assert_eq!(status.source, Source::File);
    // A valid signature does not help a file that is not WebAssembly: it is refused as such.
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, b"garbage"));
    managed.put("prefill.wasm", b"garbage");
    managed.until("not wasm", |slot| slot.refusals.back().is_some_and(|last| last.kind == "not_wasm"));
}

#[test]
fn n7_an_update_of_policy_and_signature_is_no_refusal_between_its_two_renames() {
    let trusted = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let keys = [trusted.pk.to_base64()];
    let managed = managed(builtin(), TrustRules::new(Some(&keys), BTreeMap::new()).unwrap(), &[]);
    let sign_and_put = |bytes: &[u8], pause: Duration| {
        managed.put("prefill.wasm.minisig", &sign(&trusted.sk, bytes));
        std::thread::sleep(pause);
        managed.put("prefill.wasm", bytes);
    };
    sign_and_put(LEAST_LOADED, Duration::ZERO);
    managed.until("the first one", |slot| slot.policy == "least-loaded");
    let updates = [("weighted-random", WEIGHTED_RANDOM), ("least-loaded", LEAST_LOADED)];
    for (name, bytes) in updates.into_iter().cycle() {
        let (before, started) = (managed.status().refusals.len(), tokio::time::Instant::now());
        // Several scans.
        sign_and_put(bytes, Duration::from_millis(400));
        let was_in_time = started.elapsed() < Duration::from_millis(800);
        let status = managed.until("the update", |slot| slot.policy == name);
        if was_in_time {
            // N7.26
            assert_eq!(status.refusals.len(), before, "{:#?}", status.refusals);
            break;
        }
    }
    // A refusal that lasts is reported, and a command reports it at once.
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, b"other bytes"));
    managed.until("refused", |slot| slot.refusals.back().is_some_and(|last| last.kind == "tampered"));
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, b"still others"));
    managed.put("prefill.canary.wasm.minisig", &sign(&trusted.sk, b"other bytes"));
    managed.put("prefill.canary.wasm", LEAST_LOADED);
    let refused = managed.reload().refused;
    assert_eq!(refused.iter().map(|one| one.kind).collect::<Vec<_>>(), ["tampered"; 2]);
}

#[test]
fn n7_an_update_of_a_directory_that_a_reload_did_not_find_is_no_refusal() {
    let trusted = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let keys = [trusted.pk.to_base64()];
    let trust = || TrustRules::new(Some(&keys), BTreeMap::new()).unwrap();
    let managed = managed(builtin(), trust(), &[]);
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, LEAST_LOADED));
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("the first one", |slot| slot.policy == "least-loaded");
    let here = managed.dir.path().to_owned();
    let away = here.with_extension("away");
    let configure = || {
        let specs = vec![(NAME, builtin())];
        managed.ask(Command::Configure { specs, trust: trust() }).unwrap();
    };
    let reload = || drop(managed.reload());
    let commands: [&dyn Fn(); 2] = [&reload, &configure];
    let mut command = 0;
    let updates = [("weighted-random", WEIGHTED_RANDOM), ("least-loaded", LEAST_LOADED)];
    for (name, bytes) in updates.into_iter().cycle() {
        let before = managed.status().refusals.len();
        fs::rename(&here, &away).unwrap();
        commands[command]();
        fs::write(away.join("prefill.wasm.minisig"), sign(&trusted.sk, bytes)).unwrap();
        let started = tokio::time::Instant::now();
        fs::rename(&away, &here).unwrap();
        // Several scans.
        std::thread::sleep(Duration::from_millis(400));
        managed.put("prefill.wasm", bytes);
        let was_in_time = started.elapsed() < Duration::from_millis(800);
        let status = managed.until("the update", |slot| slot.policy == name);
        if was_in_time {
            // N7.26
            assert_eq!(status.refusals.len(), before, "{:#?}", status.refusals);
            command += 1;
            if command == commands.len() {
                break;
            }
        }
    }
}

#[test]
fn n7_only_a_version_that_was_installed_rules_older_ones_out() {
    let trusted = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let keys = [trusted.pk.to_base64()];
    let pins = BTreeMap::from([("prefill.canary".to_owned(), sha256(LEAST_LOADED))]);
    let trust = TrustRules::new(Some(&keys), pins).unwrap().binding(BTreeMap::new());
    let managed = managed(builtin(), trust, &[]);
    let put = |file: &str, bytes: &[u8], version: u64| {
        let comment = format!("slot={file} version={version}");
        let signature = minisign::sign(None, &trusted.sk, bytes, Some(&comment), None).unwrap();
        managed.put(&format!("{file}.wasm.minisig"), signature.into_string().as_bytes());
        managed.put(&format!("{file}.wasm"), bytes);
    };
    let refused = |kind: &str| {
        managed.until(kind, |slot| slot.refusals.back().is_some_and(|last| last.kind == kind));
    };
    put("prefill", b"garbage", 90_000);
    refused("not_wasm");
    put("prefill.canary", WEIGHTED_RANDOM, 90_000);
    refused("pin_mismatch");
    put("prefill.canary", LEAST_LOADED, 8);
    // N7.27
    managed.until("the canary", |slot| slot.canary.is_some());
    put("prefill", LEAST_LOADED, 8);
    managed.until("version 8", |slot| slot.policy == "least-loaded");
    // The same content with a newer signature counts as well.
    put("prefill", LEAST_LOADED, 9);
    managed.reload();
    put("prefill", WEIGHTED_RANDOM, 8);
    refused("signature_not_bound");
    let message = managed.status().refusals.back().unwrap().message.clone();
    assert!(message.contains("it is for version 8, and version 9 was installed"), "{message}");
}

#[test]
fn a_signature_that_binds_fits_one_slot_and_no_older_version() {
    let trusted = minisign::KeyPair::generate_unencrypted_keypair().unwrap();
    let bound = |bytes: &[u8], comment: &str| {
        minisign::sign(None, &trusted.sk, bytes, Some(comment), None).unwrap().into_string().into_bytes()
    };
    let rules = || TrustRules::new(Some(&[trusted.pk.to_base64()]), BTreeMap::new()).unwrap();
    let binding = || rules().binding(BTreeMap::from([("prefill".to_owned(), 5)]));
    let managed = managed(builtin(), binding(), &[]);
    let refused = |why: &str| {
        let last = |slot: &SlotStatus| slot.refusals.back().is_some_and(|last| last.message.contains(why));
        let status = managed.until(why, last);
        assert_eq!(status.refusals.back().unwrap().kind, "signature_not_bound");
        status.generation
    };
    let first = managed.status().generation;
    managed.put("prefill.wasm.minisig", &sign(&trusted.sk, LEAST_LOADED));
    managed.put("prefill.wasm", LEAST_LOADED);
    assert_eq!(refused("names no slot"), first);
    managed.put("prefill.wasm.minisig", &bound(LEAST_LOADED, "slot=decode version=9"));
    assert_eq!(refused("it is for `decode`"), first);
    managed.put("prefill.wasm.minisig", &bound(LEAST_LOADED, "slot=prefill"));
    assert_eq!(refused("names no version"), first);
    managed.put("prefill.wasm.minisig", &bound(LEAST_LOADED, "slot=prefill version=4"));
    assert_eq!(refused("it is for version 4, and `min_versions` demands 5"), first);
    let old = bound(LEAST_LOADED, "slot=prefill version=7 file=prefill.wasm");
    managed.put("prefill.wasm.minisig", &old);
    managed.until("let in", |slot| slot.policy == "least-loaded");
    managed.put("prefill.wasm.minisig", &bound(WEIGHTED_RANDOM, "slot=prefill version=8"));
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    let status = managed.until("a newer one", |slot| slot.policy == "weighted-random");
    // The old file with its own, valid signature.
    managed.put("prefill.wasm.minisig", &old);
    managed.put("prefill.wasm", LEAST_LOADED);
    assert_eq!(refused("it is for version 7, and version 8 was installed"), status.generation);
    // A reload of the configuration does not forget.
    managed.ask(Command::Configure { specs: vec![(NAME, builtin())], trust: binding() }).unwrap();
    managed.put("prefill.wasm.minisig", &bound(LEAST_LOADED, "slot=prefill version=6"));
    assert_eq!(refused("it is for version 6, and version 8 was installed"), status.generation);
    managed.put("prefill.wasm.minisig", &bound(LEAST_LOADED, "slot=prefill version=8"));
    managed.until("let in again", |slot| slot.policy == "least-loaded");
}

#[test]
fn a_pinned_file_must_have_its_digest_even_when_it_comes_by_promotion() {
    let pins = BTreeMap::from([("prefill".to_owned(), sha256(LEAST_LOADED))]);
    let managed = managed(builtin(), TrustRules::new(None, pins).unwrap(), &[]);
    managed.put("prefill.wasm", WEIGHTED_RANDOM);
    let status = managed.until("refused", |slot| slot.refusals.len() == 1);
    assert_eq!((status.refusals[0].kind, status.generation.0), ("pin_mismatch", 1));
    managed.put("prefill.canary.wasm", WEIGHTED_RANDOM);
    managed.until("a canary", |slot| slot.canary.is_some());
    let error = managed.promote(None).unwrap_err();
    assert!(matches!(&error, CommandError::Refused(refusal) if refusal.kind() == "pin_mismatch"), "{error}");
    managed.put("prefill.wasm", LEAST_LOADED);
    managed.until("let in", |slot| slot.policy == "least-loaded");
}

#[test]
fn a_key_that_is_none_is_named() {
    let error = TrustRules::new(Some(&["RWQ".to_owned()]), BTreeMap::new()).unwrap_err();
    assert!(error.starts_with("`RWQ` is not a minisign public key"), "{error}");
}

#[test]
fn a_trial_of_the_configuration_needs_no_file_and_its_share_can_be_changed_alone() {
    let mut spec = builtin();
    let least = Part::embedded("least-loaded", LEAST_LOADED, "{}".into());
    spec.canary = LaneSpec { share: 0.2, ..LaneSpec::of(Rank::Policy(least)) };
    let managed = managed(spec.clone(), TrustRules::default(), &[]);
    let before = managed.status().canary.unwrap();
    assert_eq!((before.policy.as_str(), before.share), ("least-loaded", 0.2));
    spec.canary.share = 0.5;
    managed.ask(Command::Configure { specs: vec![(NAME, spec)], trust: TrustRules::default() }).unwrap();
    managed.until("another share", |slot| slot.canary.as_ref().is_some_and(|canary| canary.share == 0.5));
    assert_eq!(managed.slot.snapshot().canary.as_ref().unwrap().handle.generation, before.generation);
}

/// A slot that names `least-loaded` with these settings, which its trials inherit.
fn naming_least_loaded(settings: &str) -> SlotSpec {
    let part = Part::embedded("least-loaded", LEAST_LOADED, settings.into());
    let mut spec = SlotSpec::of(Rank::Policy(part));
    for lane in [&mut spec.active, &mut spec.canary, &mut spec.shadow] {
        lane.settings = settings.into();
    }
    for lane in [&mut spec.canary, &mut spec.shadow] {
        lane.inherited_by = Some(InheritedBy::Named("least-loaded".into()));
    }
    spec
}

#[test]
fn n7_a_trial_s_file_inherits_the_settings_of_the_policy_of_its_name_only() {
    let known = r#"{"active-requests":2}"#;
    let managed = managed(naming_least_loaded(known), TrustRules::default(), &[]);
    // It knows no such setting.
    managed.put("prefill.shadow.wasm", WEIGHTED_RANDOM);
    let own = [LEAST_LOADED, &[0, 2, 1, b'x']].concat();
    managed.put("prefill.canary.wasm", &own);
    let both = |slot: &SlotStatus| slot.canary.is_some() && slot.shadow.is_some();
    let status = managed.until("both run", both);
    // N7.22
    assert_eq!(status.refusals.len(), 0, "{status:#?}");
    managed.holds(|slot| slot.refusals.is_empty() && both(slot));
    // The settings are those of the active lane: only the source of the content changes.
    let promoted = managed.promote(Some(Lane::Canary)).unwrap().changed[0].generation;
    fs::rename(managed.dir.path().join("prefill.canary.wasm"), managed.dir.path().join("prefill.wasm"))
        .unwrap();
    let status = managed.until("the file serves", |slot| slot.source == Source::File);
    assert_eq!(Some(status.generation), promoted, "{status:#?}");
    // Now the settings are for the policy in the slot's file, and any other may be its next version.
    let refused = managed.until("refused", |slot| !slot.refusals.is_empty());
    let message = &refused.refusals[0].message;
    let why = "; the shadow got the settings of [policies.slots.prefill]: set `shadow.settings` there to give it \
               others, `{}` for none";
    // N7.22
    assert!(message.contains("unknown field `active-requests`") && message.ends_with(why), "{message}");
}

#[test]
fn o1_the_refusal_of_a_file_that_was_replaced_ends_while_the_new_one_compiles() {
    let managed = plain(&[]);
    managed.put("prefill.wasm", b"garbage");
    managed.until("refused", |slot| slot.refusals.iter().any(|refusal| refusal.in_force));
    managed.put("prefill.wasm", HOSTILE);
    let started = tokio::time::Instant::now();
    let compiling = loop {
        let status = managed.manager.status();
        if !status.compiling.is_empty() {
            break status;
        }
        assert!(
            started.elapsed().as_secs() < 120 && status.slots[0].policy != "hostile",
            "no compile was seen"
        );
    };
    // O1.16
    assert!(compiling.slots[0].refusals.iter().all(|refusal| !refusal.in_force), "{compiling:#?}");
}
