use super::*;

mod affinity;

const HEAD: &str = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n";

fn target() -> Target {
    Target {
        selector: None,
        namespace: "default".to_owned(),
        port: "8000".to_owned(),
        engine: "vllm".to_owned(),
        ext_proc: false,
    }
}

/// The configuration and the report of a document without its first two lines.
fn imported(text: &str) -> (toml::Table, String) {
    let imported = import(&format!("{HEAD}{text}"), &target()).unwrap();
    (imported.draft.text("x").parse().unwrap(), imported.report.text())
}

fn refused(text: &str) -> String {
    format!("{:#}", import(text, &target()).unwrap_err())
}

fn settings(table: &toml::Table, slot: &str) -> toml::Table {
    table["policies"]["slots"][slot]["scorers"][0]["settings"].as_table().unwrap().clone()
}

const PROFILE: &str = "schedulingProfiles:\n- name: default\n  plugins:\n";

#[test]
fn s2_weights_of_a_profile_are_those_of_the_slot() {
    let (table, report) = imported(&format!(
        "plugins:\n- type: queue-scorer\n- type: prefix-cache-scorer\n- name: load\n  type: \
         load-aware-scorer\n  parameters: {{ threshold: 10 }}\n{PROFILE}  - pluginRef: queue-scorer\n  - \
         pluginRef: prefix-cache-scorer\n    weight: 2.5\n  - pluginRef: load\n    weight: 0.5\n"
    ));
    for slot in ["aggregated", "decode"] {
        let settings = settings(&table, slot);
        // S2.2
        assert_eq!(settings["queue"].as_float(), Some(1.0), "a missing weight is 1");
        assert_eq!(settings["prefix"].as_float(), Some(2.5));
        assert_eq!(
            (settings["load"].as_float(), settings["load-threshold"].as_integer()),
            (Some(0.5), Some(10))
        );
        // S2.2: what is not in the profile does not count.
        assert_eq!(settings["kv"].as_float(), Some(0.0));
        // 131,072 tokens in blocks of 16.
        assert_eq!(settings["max-prefix-blocks"].as_integer(), Some(8_192));
        assert_eq!(table["policies"]["slots"][slot]["picker"].as_str(), Some("min"));
    }
    // S2.4: the line of the entry in the profile.
    assert!(report.contains("line 12: scorer `queue-scorer`, weight 1"), "{report}");
}

#[test]
fn s2_pickers_choose_as_in_llm_d() {
    let plugins = "plugins:\n- type: queue-scorer\n- { name: p, type: PICKER }\n";
    for (picker, key, value) in [
        ("max-score-picker", "picker", "min"),
        ("weighted-random-picker", "picker", "weighted-random"),
        ("random-picker", "native", "random"),
    ] {
        let plugins = plugins.replace("PICKER", picker);
        let (table, report) =
            imported(&format!("{plugins}{PROFILE}  - pluginRef: queue-scorer\n  - pluginRef: p\n"));
        // S2.2
        assert_eq!(table["policies"]["slots"]["aggregated"][key].as_str(), Some(value), "{picker}");
        assert!(report.contains("picker `p`"), "{report}");
    }
    // A profile without a picker takes the one that is defined.
    let plugins = plugins.replace("PICKER", "random-picker");
    let (table, _) = imported(&format!("{plugins}{PROFILE}  - pluginRef: queue-scorer\n"));
    // S2.2
    assert_eq!(table["policies"]["slots"]["decode"]["native"].as_str(), Some("random"));
    // Without a scorer, all candidates are equal.
    let (table, _) =
        imported(&format!("plugins:\n- type: decode-filter\n{PROFILE}  - pluginRef: decode-filter\n"));
    // S2.2
    assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("random"));
    // A profile of which all scorers are lost is not random.
    let (table, _) = imported(&format!(
        "plugins:\n- type: no-hit-lru-scorer\n{PROFILE}  - pluginRef: no-hit-lru-scorer\n"
    ));
    assert_eq!(table["policies"]["slots"]["aggregated"]["native"].as_str(), Some("least-loaded"));
}

fn pd(decider: &str, parameters: &str) -> (toml::Table, String) {
    imported(&format!(
        "plugins:\n- type: queue-scorer\n{decider}- type: disagg-profile-handler\n  parameters: \
         {parameters}\nschedulingProfiles:\n- name: prefill\n  plugins:\n  - pluginRef: queue-scorer\n- \
         name: decode\n  plugins:\n  - pluginRef: queue-scorer\n    weight: 3\n"
    ))
}

/// Whether the override prefills every prompt remotely.
fn is_always_remote(table: &toml::Table) -> bool {
    let chosen = table["policies"]["slots"].get("decode-override");
    chosen.is_some_and(|chosen| {
        let enabled = chosen["settings"]["enabled"].as_bool();
        (chosen["builtin"].as_str(), enabled) == (Some("conditional-disagg"), Some(false))
    })
}

#[test]
fn s2_profiles_of_prefill_and_decode_become_their_slots_and_the_decider_the_override() {
    let decider = "- name: d\n  type: prefix-based-pd-decider\n  parameters: { nonCachedTokens: 16 }\n";
    let (table, report) = pd(decider, "{ deciders: { prefill: d } }");
    // S2.3
    assert_eq!(settings(&table, "prefill")["queue"].as_float(), Some(1.0));
    assert_eq!(settings(&table, "decode")["queue"].as_float(), Some(3.0));
    assert_eq!(table["routing"]["order"].as_str(), Some("decode-first"));
    let chosen = &table["policies"]["slots"]["decode-override"];
    // S2.3
    assert_eq!(chosen["settings"]["max-new-tokens"].as_integer(), Some(16));
    assert_eq!(chosen["settings"]["max-new-share"].as_float(), Some(1.0));
    assert!(report.contains("0 without counterpart"), "{report}");
    // The earlier spelling.
    let (old, _) = pd(decider, "{ prefillDeciderPluginName: d, decodeProfile: decode }");
    // S2.3
    assert_eq!(old["policies"]["slots"]["decode-override"], *chosen);
    for (decider, parameters) in [
        ("- type: always-disagg-pd-decider\n", "{ deciders: { prefill: always-disagg-pd-decider } }"),
        ("- type: oracle-decider\n", "{ deciders: { prefill: oracle-decider } }"),
        ("", "{ stageOrder: prefill-first }"),
    ] {
        // S2.3: not by the gateway's default.
        assert!(is_always_remote(&pd(decider, parameters).0), "{parameters}");
    }
    for never in [
        pd("", "{}").0,
        pd("- type: prefix-based-pd-decider\n", "{ deciders: { prefill: prefix-based-pd-decider } }").0,
    ] {
        let settings = &never["policies"]["slots"]["decode-override"]["settings"];
        // S2.3: without a decider, and with one of 0 tokens, llm-d never splits a request.
        assert_eq!(settings["max-new-tokens"].as_integer(), Some(4_294_967_295));
    }
    let first = pd("", "{ stageOrder: prefill-first }").0;
    assert_eq!(first["routing"]["order"].as_str(), Some("prefill-first"));
    let by_bytes = |threshold: u32| {
        imported(&format!(
            "plugins:\n- type: queue-scorer\n- type: pd-profile-handler\n  parameters: {{ threshold: {threshold} \
             }}\nschedulingProfiles:\n- name: prefill\n  plugins:\n  - pluginRef: queue-scorer\n- name: \
             decode\n  plugins:\n  - pluginRef: queue-scorer\n"
        ))
        .0
    };
    // S2.3
    assert!(is_always_remote(&by_bytes(0)));
    let settings = &by_bytes(400)["policies"]["slots"]["decode-override"]["settings"];
    assert_eq!(
        (settings["enabled"].as_bool(), settings["max-new-tokens"].as_integer()),
        (Some(true), Some(100))
    );
}

#[test]
fn s2_what_is_not_known_is_named_with_its_line() {
    let (_, report) = imported(&format!(
        "plugins:\n- type: queue-scorer\n  parameters: {{ sauce: 1 }}\n- {{ name: mine, type: my-scorer }}\n\
         {PROFILE}  - pluginRef: queue-scorer\n  - pluginRef: mine\nnewSection: {{}}\nfeatureGates: [x]\n\
         requestHandler:\n  parsers: [{{ pluginRef: vllmgrpc-parser }}]\n"
    ));
    for expected in [
        "line 5: parameter `sauce` of the plugin `queue-scorer` -> ",
        "line 11: plugin `mine` in a profile -> its type is not known",
        "line 12: key `newSection` -> ",
        "line 13: feature gate `x` -> ",
        "line 15: parser `vllmgrpc-parser` -> ",
    ] {
        // S2.4
        assert!(report.contains(expected), "{expected}\nis not in\n{report}");
    }
    assert!(report.ends_with("5 without counterpart\n"), "{report}");
}

#[test]
fn s2_the_queue_counts_only_with_its_gate() {
    let section = "flowControl: { maxRequests: 10, priorityBands: [] }\n";
    let (table, report) = imported(&format!("plugins: []\n{section}"));
    assert!(table.get("queue").is_none() && report.contains("feature gate flowControl"), "{report}");
    let (table, report) = imported(&format!("featureGates: [flowControl]\nplugins: []\n{section}"));
    // S2.5
    assert_eq!(table["queue"]["limit"].as_integer(), Some(10));
    // S2.5: llm-d's own thresholds.
    assert_eq!(table["routing"]["busy"]["decode"]["engine_queue"].as_integer(), Some(5));
    assert!(report.contains("flowControl.priorityBands -> "), "{report}");
}

#[test]
fn s2_a_configuration_that_llm_d_would_refuse_is_refused() {
    for (text, part) in [
        (format!("{HEAD}plugins:\n- name: a\n"), "line 4: a plugin without `type`"),
        (format!("{HEAD}plugins:\n- type: a\n- type: a\n"), "line 5: the plugin `a` appears twice"),
        (format!("{HEAD}plugins: 7\n"), "line 3: `plugins` is not a list"),
        (
            format!("{HEAD}plugins: [{{ type: q }}]\n{PROFILE}  - {{ pluginRef: q, weight: x }}\n"),
            "weight: `x` is not",
        ),
        (format!("{HEAD}schedulingProfiles: [{{}}]\n"), "a scheduling profile without `name`"),
        ("kind: EndpointPickerConfig\napiVersion: v9\n".to_owned(), "apiVersion `v9` is not known"),
        (
            format!("{HEAD}plugins: [{{ type: disagg-profile-handler }}]\n"),
            "no profile has the name `decode`",
        ),
    ] {
        let refused = refused(&text);
        // S2.1
        assert!(refused.contains(part), "{text}: {refused}");
    }
}

#[test]
fn s2_what_is_not_known_is_in_the_report_and_ends_nothing() {
    for (text, part) in [
        (format!("{HEAD}plugins: []\n{PROFILE}  - pluginRef: a\n"), "its type is not known: write a policy"),
        (
            format!("{HEAD}plugins: [{{ type: a, parameters: 7 }}]\n"),
            "they are not a map: its defaults are taken",
        ),
    ] {
        let made = import(&text, &target()).unwrap();
        assert!(made.report.text().contains(part), "{text}: {}", made.report.text());
    }
}

#[test]
fn s2_workers_come_from_the_flags_or_are_asked_for() {
    let text = format!("{HEAD}plugins: [{{ type: queue-scorer }}]\n");
    let with = Target { selector: Some("app=vllm".to_owned()), ext_proc: true, ..target() };
    let made = import(&text, &with).unwrap();
    let table: toml::Table = made.draft.text("x").parse().unwrap();
    // S2.6
    assert_eq!(table["discovery"]["kubernetes"][0]["selector"].as_str(), Some("app=vllm"));
    assert_eq!(table["ext_proc"]["listen"].as_str(), Some("0.0.0.0:9002"));
    let without = import(&text, &target()).unwrap();
    // S2.6
    assert!(without.report.text().contains("workers -> none: the file names no engines"));
    assert!(without.draft.text("x").contains("# [[discovery.kubernetes]]\n"));
}

#[test]
fn s2_version_1_and_its_discovery_are_read() {
    let text = "kind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n- { name: disc, type: file-discovery, \
                parameters: { path: /e.yaml } }\nschedulingProfiles:\n- name: default\n  plugins:\n  - { \
                pluginRef: queue-scorer, weight: 2 }\n";
    let read = |version: &str, discovery: &str| {
        let text = format!("apiVersion: {version}\n{text}dataLayer:\n  discovery: {discovery}\n");
        let made = import(&text, &target()).unwrap();
        (made.draft.text("x").parse::<toml::Table>().unwrap(), made.report.text())
    };
    let (old, _) = read("llm-d.ai/v1alpha1", "{ pluginRef: disc }");
    for version in ["llm-d.ai/v1", "llm-d.ai/v1beta1"] {
        let (new, report) = read(version, "{ endpoints: { pluginRef: disc } }");
        // S2.1
        assert_eq!(new, old, "{version}");
        assert!(report.contains("0 without counterpart"), "{report}");
    }
    let (_, report) = read("llm-d.ai/v1", "{ endpoints: { pluginRef: disc }, oracles: {} }");
    // S2.4
    assert!(report.contains("dataLayer.discovery.oracles"), "{report}");
    assert!(refused(&format!("apiVersion: llm-d.ai/v2\n{text}")).contains("`llm-d.ai/v2` is not known"));
}

#[test]
fn s2_what_is_not_known_leaves_a_hole() {
    let (table, report) = imported(&format!(
        "plugins:\n- type: queue-scorer\n- type: oracle-scorer\n  parameters: [1, 2]\n- type: oracle-handler\n\
         {PROFILE}  - pluginRef: queue-scorer\n  - pluginRef: oracle-scorer\n    weight: 9\n  - pluginRef: \
         never-listed\n  - pluginRef: kv-cache-utilization-scorer\n    weight: 4\n"
    ));
    let settings = settings(&table, "aggregated");
    assert_eq!((settings["queue"].as_float(), settings["kv"].as_float()), (Some(1.0), Some(4.0)));
    for part in [
        "plugin `oracle-scorer` in a profile -> its type is not known",
        "parameters of the plugin `oracle-scorer` -> they are not a map",
        "plugin `oracle-handler` -> its type `oracle-handler` is not known",
        "plugin `never-listed` in a profile -> its type is not known",
    ] {
        // S2.4
        assert!(report.contains(part), "{part}\n{report}");
    }
}

#[test]
fn s2_kv_events_of_pods_become_a_default_of_their_source() {
    let text = format!(
        "{HEAD}plugins:\n- type: token-producer\n- type: precise-prefix-cache-producer\n  parameters:\n    \
         kvEventsConfig: {{ discoverPods: true, podDiscoveryConfig: {{ socketPort: 5600 }} }}\n- type: \
         prefix-cache-scorer\n  parameters: {{ prefixMatchInfoProducerName: precise-prefix-cache-producer }}\n\
         {PROFILE}  - pluginRef: prefix-cache-scorer\n"
    );
    let target = Target { selector: Some("app=vllm".to_owned()), ..target() };
    let made = import(&text, &target).unwrap();
    let table: toml::Table = made.draft.text("x").parse().unwrap();
    let defaults = &table["discovery"]["kubernetes"][0]["defaults"];
    // S2.6
    assert_eq!(defaults["kv_events"].as_str(), Some("tcp://{host}:5600"));
}

#[test]
fn s2_a_profile_whose_only_scorer_is_not_known_is_not_random() {
    for kind in ["of-tomorrow", "kv-aware-scorer"] {
        let (table, report) = imported(&format!(
            "plugins:\n- {{ name: best, type: {kind} }}\n- {{ type: max-score-picker }}\n{PROFILE}  - \
             {{ pluginRef: best, weight: 1 }}\n  - pluginRef: max-score-picker\n"
        ));
        let slot = &table["policies"]["slots"]["aggregated"];
        // S2.4
        assert_eq!(slot["native"].as_str(), Some("least-loaded"), "{kind}");
        assert!(report.contains("least-loaded, without the scorers named below"), "{report}");
        assert!(report.contains("1 without counterpart"), "{report}");
    }
}

#[test]
fn s2_a_gate_that_is_off_changes_nothing() {
    let (table, report) = imported(&format!(
        "plugins:\n- type: queue-scorer\n{PROFILE}  - pluginRef: queue-scorer\nfeatureGates:\n- \
         flowControl=false\n- of-tomorrow=false\n"
    ));
    // S2.4
    assert!(report.contains("feature gate `flowControl=false` -> left out: it is off"), "{report}");
    assert!(report.contains("0 without counterpart") && table.get("queue").is_none(), "{report}");
}

#[test]
fn s2_thresholds_in_the_section_of_the_saturation_detector_are_read() {
    let of = |gate: &str, section: &str| {
        imported(&format!(
            "plugins:\n- type: queue-scorer\n- type: max-score-picker\n{PROFILE}  - pluginRef: queue-scorer\n{section}{gate}"
        ))
    };
    let section = "saturationDetector:\n  queueDepthThreshold: 20\n  kvCacheUtilThreshold: 0.95\n  \
                   metricsStalenessThreshold: 150ms\n  oracle: yes\n";
    let within = format!("flowControl:\n  {}\n", section.replace("\n  ", "\n    ").trim_end());
    for section in [section, &within] {
        let (table, report) = of("featureGates:\n- flowControl\n", section);
        for leg in ["prefill", "decode", "aggregated"] {
            let busy = &table["routing"]["busy"][leg];
            // S2.5
            assert_eq!(
                (busy["engine_queue"].as_integer(), busy["kv_usage"].as_float()),
                (Some(20), Some(0.95))
            );
        }
        // S2.4
        assert!(report.contains("saturationDetector -> routing.busy"), "{report}");
        let (table, without) = of("", section);
        assert!(table.get("routing").is_none_or(|routing| routing.get("busy").is_none()), "{table}");
        // S2.4
        assert!(without.contains("saturationDetector -> left out: without flow control"), "{without}");
        for report in [report, without] {
            // S2.4
            assert!(
                !report.contains("metricsStalenessThreshold"),
                "its entry is that of the section: {report}"
            );
            assert!(report.contains("saturationDetector.oracle -> it has no counterpart"), "{report}");
            // The picker that the profile takes by default is listed once.
            assert_eq!(report.matches("`max-score-picker`").count(), 1, "{report}");
        }
    }
}
