use super::*;
use crate::config::Config;

#[test]
fn a_composed_slot_reads_as_it_is_written() {
    let text = r#"
        [policies.slots.prefill]
        on_failure = "shed"
        filters = [{ policy = "low-queue", settings = { threshold = 4 } }]
        scorers = [
            { policy = "kv-utilization", weight = 2.0, normalize = "unit" },
            { policy = "kv-aware", normalize = "min-max" },
        ]
        picker = { softmax = { temperature = 0.5 } }
        canary = { share = 0.1, picker = "weighted-random", scorers = [{ policy = "kv-aware", weight = 3 }] }
        shadow = { builtin = "least-loaded", filters = [] }
        [models."org/name".slots.decode]
        native = "least-loaded"
    "#;
    let config: Config = toml::from_str(text).unwrap();
    let spec = config.policies.slots[&SlotKind::Prefill].spec(SlotKind::Prefill, 0);
    assert_eq!(spec.on_failure, Some(OnFailure::Shed));
    assert_eq!(spec.active.filters[0].settings, r#"{"threshold":4}"#);
    let Some(Rank::Scorers { scorers, picker }) = &spec.active.rank else { panic!("{spec:?}") };
    assert_eq!(*picker, Picker::Softmax { temperature: 0.5 });
    assert_eq!((scorers[0].weight, scorers[0].normalize), (2.0, Normalize::Unit));
    assert_eq!(scorers[0].part.file, Some("parts/kv-utilization.wasm".into()));
    assert!(scorers[0].part.embedded.is_none() && scorers[1].part.embedded.is_some());
    assert_eq!((scorers[1].weight, scorers[1].normalize), (1.0, Normalize::MinMax));
    // The canary inherits the slot's filters; the shadow has an empty list of its own.
    assert_eq!((spec.canary.share, spec.canary.filters.len()), (0.1, 1));
    let Some(Rank::Scorers { picker: Picker::WeightedRandom, .. }) = spec.canary.rank else {
        panic!("{spec:?}")
    };
    assert_eq!((spec.shadow.share, spec.shadow.filters.len()), (1.0, 0));
    assert!(config.models["org/name"].slots.contains_key(&SlotKind::Decode));
}

#[test]
fn g4_an_empty_configuration_runs_the_default_policies() {
    let name = |kind: SlotKind| {
        let spec = SlotEntry::default().spec(kind, 0);
        let Some(Rank::Policy(part)) = &spec.active.rank else { panic!("{kind}: {spec:?}") };
        assert!(part.embedded.is_some() && part.file.is_none() && part.settings == "{}", "{part:?}");
        part.name.clone()
    };
    // G4.1
    assert_eq!(
        [SlotKind::Prefill, SlotKind::Decode, SlotKind::Aggregated].map(name),
        ["kv-aware", "predicted-latency", "predicted-latency"].map(str::to_owned)
    );
    // G4.2
    assert_eq!(name(SlotKind::DecodeOverride), "predicted-disagg");
}

#[test]
fn all_problems_of_slots_are_reported_at_once() {
    let config: Config = toml::from_str(
        r#"
        [policies]
        require_signed = true
        [policies.pins]
        prefill = "sha256:12"
        [policies.slots.prefill]
        picker = "weighted-random"
        filters = [{ policy = "../x" }, { policy = "low-queue" }, { policy = "" }]
        [policies.slots.decode]
        policy = "kv-aware"
        scorers = [{ policy = "kv-aware", weight = -1.0 }]
        picker = { softmax = { temperature = 0.0 } }
        canary = { share = 1.5, builtin = "nope" }
        [policies.slots.decode-override]
        native = "kv"
        filters = [{ policy = "kv-aware" }]
        [models."a/../b".slots.prefill]
        native = "kv"
        "#,
    )
    .unwrap();
    let expected = [
        "policies.slots.decode.canary.share: `1.5` is not a share: expected 0 to 1",
        "policies.require_signed: `true` without `trusted_keys` would refuse every file: add a key",
        "policies.pins.prefill: `sha256:12` is not a digest: expected `sha256:` and 64 hex digits",
        "policies.slots.prefill.picker: a picker needs `scorers`: add them or remove the key",
        "policies.slots.prefill.filters[0].policy: `../x` cannot name a file: expected a name without `/` or a \
         leading `.`",
        "policies.slots.prefill.filters[1].policy: `low-queue` is not a built-in policy: expected kv-aware, \
         predicted-latency, queue-kv-prefix, cache-aware, longest-prefix, least-loaded, formula, \
         conditional-disagg or predicted-disagg, or set `policies.dir` to use a file",
        "policies.slots.prefill.filters[2].policy: no policy is named: expected kv-aware, predicted-latency, \
         queue-kv-prefix, cache-aware, longest-prefix, least-loaded, formula, conditional-disagg or \
         predicted-disagg, or set `policies.dir` to use a file",
        "policies.slots.decode: `policy` and `scorers` exclude each other: keep one of them",
        "policies.slots.decode.picker.softmax.temperature: `0` is not a temperature: expected more than 0",
        "policies.slots.decode.scorers[0].weight: `-1` is not a weight: expected a finite number of 0 or more",
        "policies.slots.decode.canary.builtin: `nope` is not a built-in policy: expected kv-aware, \
             predicted-latency, queue-kv-prefix, cache-aware, longest-prefix, least-loaded, formula, \
             conditional-disagg or predicted-disagg",
        "policies.slots.decode-override.native: this slot takes no selector: remove the key to use the native \
         override",
        "policies.slots.decode-override.filters: this slot takes one decode override: name it with `policy` or \
         `builtin`",
        "models.a/../b.slots: `a/../b` cannot name a directory of policies: expected NAME or OWNER/NAME",
    ];
    assert_eq!(config.resolve().unwrap_err().to_string(), expected.join("\n"));
}

#[test]
fn q7_shared_state_needs_the_grant_and_others() {
    let slot = "[policies.slots.decode]\nshared_state = true\n";
    let model = "[models.m.slots.prefill]\nshared_state = true\ngrants = [\"state\"]\n";
    let servers = "[replicas]\nservers = [\"nats://a:4222\"]\n";
    let problems = |text: &str| {
        let config: Config = toml::from_str(text).unwrap();
        config.resolve().err().map(|error| error.to_string()).unwrap_or_default()
    };
    let grant =
        "policies.slots.decode.shared_state: needs the grant `state`: add `state` to `grants` of this slot";
    let nobody = "shared_state: needs other gateways: add `replicas.servers`, or remove the key";
    // Q7.9
    assert_eq!(problems(&format!("{slot}{servers}")), grant);
    assert_eq!(problems(model), format!("models.m.slots.prefill.{nobody}"));
    assert_eq!(problems(slot), format!("{grant}\npolicies.slots.decode.{nobody}"));
    assert_eq!(problems(&format!("{model}{servers}")), "");
}

#[test]
fn f9_a_short_list_has_at_least_eight_rows_and_the_decode_override_none() {
    let problems = |text: &str| {
        let config: Config = toml::from_str(text).unwrap();
        config.resolve().err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(problems("[policies.slots.decode]\nmax_rows = 8\n"), "");
    assert_eq!(
        problems("[policies.slots.decode]\nmax_rows = 7\n"),
        "policies.slots.decode.max_rows: `7` is too few: expected at least 8"
    );
    assert_eq!(
        problems("[policies.slots.decode-override]\nmax_rows = 64\n"),
        "policies.slots.decode-override.max_rows: this slot sees all candidates: remove the key"
    );
}

#[test]
fn unknown_keys_of_slots_parts_pickers_and_trials_do_not_parse() {
    for text in [
        "[policies.slots.prefill]\nscorer = []",
        "[policies.slots.prefill]\nfilters = [{ policy = \"a\", weight = 1.0 }]",
        "[policies.slots.prefill]\npicker = { softmax = { temperature = 1.0, t = 1 } }",
        "[policies.slots.prefill]\ncanary = { percent = 5 }",
        "[models.m.slots.prefil]",
    ] {
        assert!(toml::from_str::<Config>(text).is_err(), "{text}");
    }
}

#[test]
fn n7_a_trial_takes_the_settings_of_the_slot_for_the_same_policy_only() {
    let canary = |text: &str| {
        let config: Config = toml::from_str(&format!("[policies.slots.decode]\n{text}\n")).unwrap();
        let lane = config.policies.slots[&SlotKind::Decode].spec(SlotKind::Decode, 0).canary;
        let named = match lane.rank {
            Some(Rank::Policy(part)) => Some(part.settings),
            _ => None,
        };
        (named.unwrap_or_default(), lane.settings, lane.inherited_by)
    };
    let (some, none) = (r#"{"a":1}"#.to_owned(), "{}".to_owned());
    let by = |name: &str| Some(InheritedBy::Named(name.to_owned()));
    let slot = "builtin = 'least-loaded'\nsettings = { a = 1 }\n";
    // N7.22
    for (trial, expected) in [
        ("canary = { builtin = 'least-loaded' }", (some.clone(), some.clone(), by("least-loaded"))),
        ("canary = { policy = 'least-loaded' }", (some.clone(), some.clone(), by("least-loaded"))),
        ("canary = { builtin = 'kv-aware' }", (none.clone(), some.clone(), by("least-loaded"))),
        ("canary = { builtin = 'kv-aware', settings = { a = 1 } }", (some.clone(), some.clone(), None)),
        ("", (String::new(), some.clone(), by("least-loaded"))),
    ] {
        assert_eq!(canary(&format!("{slot}{trial}")), expected, "{trial}");
    }
    let unnamed = canary("settings = { a = 1 }\ncanary = { builtin = 'kv-aware' }");
    // N7.22
    assert_eq!(unnamed, (none, some, Some(InheritedBy::Any)));
}
