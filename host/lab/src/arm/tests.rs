use super::*;

#[test]
fn a_formula_is_an_arm_by_its_settings_or_as_a_file() {
    let settings =
        "f=formula@{\"cost\": \"engine_queue + 2 * active_requests\", \"keep\": \"kv_usage < 0.9\"}";
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.formula.toml");
    std::fs::write(&file, "cost = \"engine_queue\"\nkeep = \"kv_usage < 0.9\"").unwrap();
    for arm in [settings, &format!("f={}+conditional-disagg", file.display())] {
        let arm = Arm::parse(arm).unwrap();
        assert_eq!(arm.label, "f");
        let (slots, _) = arm.slots().unwrap();
        let model = pointsman_workers::ModelName::new("m");
        let program = slots.get(&model, SlotKind::Decode).pin().program.clone();
        let Program::Selector { filters, selector } = program else { panic!("a selector") };
        assert_eq!((filters.len(), &*selector.info().name), (1, "formula"));
    }
    std::fs::write(&file, "cost = \"engine_que\"").unwrap();
    let error = Arm::parse(file.to_str().unwrap()).unwrap_err().to_string();
    assert!(
        error.contains("refused (formula): line 1, column 9: cost: unknown name `engine_que`"),
        "{error}"
    );
}

#[test]
fn an_arm_is_a_native_mode_or_policies_that_fit_together() {
    assert_eq!(Arm::parse("rr=round-robin").unwrap().label, "rr");
    assert_eq!(Arm::parse("kv").unwrap().label, "kv");
    let error = Arm::parse("fastest").unwrap_err().to_string();
    assert!(error.starts_with("\"fastest\" is neither a native mode"), "{error}");
    assert!(matches!(Arm::parse("./src/lib.rs").unwrap_err(), ArmError::Refused { .. }));
    let endless = Arm::parse("/dev/zero").unwrap_err();
    // T4.14
    assert!(matches!(endless, ArmError::Refused { refusal: Refusal::TooLarge { .. }, .. }), "{endless}");
    let refused = |arms: &[&str]| {
        let arms = Arm::parse_all(arms.iter().copied());
        arms.unwrap_err().to_string()
    };
    for (arms, problem) in [
        (&["./Cargo.toml"][..], "the file of a formula is named NAME.formula.toml"),
        (&["kv-aware+round-robin"], "an arm has one router, and round-robin is a whole one"),
        (&["kv-aware+edf+fifo"], "has +edf before another part; an arm has one order, at its end"),
        (&["cache-aware+longest-prefix"], "has two selectors; use one of them"),
        (&["conditional-disagg+predicted-disagg"], "has two decode overrides; use one of them"),
        (&["=kv"], "its label \"\" is empty: give another with --arm LABEL=PARTS"),
        (&["a=kv", "a=random"], "--arm a=random: its label \"a\" is that of another arm"),
        (&["kv", "new=least-loaded@{\"weight\": 2}"], "new: refused (configure): "),
    ] {
        // O8.3
        assert!(refused(arms).contains(problem), "{arms:?}: {}", refused(arms));
    }
    let names = |arm: &str| {
        let (slots, _) = Arm::parse(arm).unwrap().slots().unwrap();
        let model = pointsman_workers::ModelName::new("m");
        SlotKind::ALL.map(|kind| {
            let content = slots.get(&model, kind).pin();
            content.program.ranker().map(|info| info.name.to_string()).unwrap_or_default()
        })
    };
    let legs = ["kv-aware"; 3];
    assert_eq!(
        names("both=kv-aware+conditional-disagg").as_slice(),
        [&legs[..], &["conditional-disagg"]].concat()
    );
    // G4.3
    assert_eq!(names("default"), ["kv-aware", "predicted-latency", "predicted-latency", "predicted-disagg"]);
}

#[test]
fn o8_6_files_of_an_arm_are_those_that_it_reads() {
    let files = |arm: &str| Arm::files(arm);
    // O8.6
    assert!(
        files("kv").is_empty()
            && files("default+edf").is_empty()
            && files("a=kv-aware@{}+longest-prefix").is_empty()
    );
    assert_eq!(files("a=./x.wasm@{\"b\":1}+kv-aware"), [PathBuf::from("./x.wasm")]);
}
