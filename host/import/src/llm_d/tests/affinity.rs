//! `prefix-cache-affinity-filter`.

use super::*;

const PLUGINS: &str = "plugins:\n- type: prefix-cache-affinity-filter\n  parameters: PARAMETERS\n- type: \
                       token-load-scorer\nschedulingProfiles:\n- name: default\n  plugins:\n  - pluginRef: \
                       prefix-cache-affinity-filter\n";

fn with(parameters: &str, more: &str) -> (toml::Table, String) {
    imported(&format!("{}{more}", PLUGINS.replace("PARAMETERS", parameters)))
}

fn keep(table: &toml::Table) -> &str {
    let filter = &table["policies"]["slots"]["aggregated"]["filters"][0];
    assert_eq!(filter["policy"].as_str(), Some("formula"));
    filter["settings"]["keep"].as_str().unwrap()
}

#[test]
fn s2_workers_with_a_cached_prompt_are_kept_until_they_have_too_much_to_do() {
    let has = "ratio(cached_blocks_device + cached_blocks_host + cached_blocks_disk, request_blocks) >=";
    for (parameters, begins, ends) in [
        ("{}", format!("max({has} 0.8) == 0 || {has} 0.8 || min("), " > 286704"),
        ("{ peakPrefillThroughput: 1000, maxTTFTPenaltyMs: 500 }", format!("max({has} 0.8)"), " > 500"),
        ("{ affinityThreshold: 0.5, maxTTFTPenaltyMs: 0 }", format!("max({has} 0.5) == 0 || {has} "), "0.5"),
        ("{ maxTokensInFlightPenalty: 286720, maxTTFTPenaltyMs: 5000 }", format!("max({has}"), " > 286720"),
    ] {
        let (table, report) = with(parameters, "  - pluginRef: token-load-scorer\n");
        let keep = keep(&table);
        // S2.7
        assert!(keep.starts_with(&begins) && keep.ends_with(ends), "{parameters}: {keep}");
        assert_eq!(settings(&table, "aggregated")["tokens"].as_float(), Some(1.0));
        let told = "filter `prefix-cache-affinity-filter` -> filter `formula`: workers with ";
        // S2.7, S2.4
        assert!(report.contains(told) && report.contains("0 without counterpart"), "{report}");
    }
    let (table, report) = with("{ affinityThreshold: 0.0 }", "  - pluginRef: token-load-scorer\n");
    // S2.7
    assert!(table["policies"]["slots"]["aggregated"].get("filters").is_none(), "{report}");
    let all =
        "{ explorationProbability: 0.1, ttftSource: latencyPredictor, prefillCalibrationFile: /c.json }";
    let (_, report) = with(all, "  - pluginRef: token-load-scorer\n");
    let without = "; without explorationProbability, the predictor of ttftSource, prefillCalibrationFile";
    // S2.7
    assert!(report.contains(without), "{report}");
}

#[test]
fn s2_a_profile_without_a_scorer_draws_among_the_workers_that_are_kept() {
    let (table, _) = with("{}", "");
    let slot = &table["policies"]["slots"]["aggregated"];
    // S2.7: a native selector takes no filters
    assert_eq!((slot["builtin"].as_str(), slot["settings"]["cost"].as_str()), (Some("formula"), Some("0")));
    assert!(keep(&table).starts_with("max("));
}

#[test]
fn s2_the_filter_reads_the_kv_events_that_the_only_producer_follows() {
    let events = "- type: precise-prefix-cache-producer\n  parameters:\n    kvEventsConfig: { \
                  podDiscoveryConfig: { socketPort: 5556 } }\n";
    let text = PLUGINS.replace("PARAMETERS", "{}").replacen("plugins:\n", &format!("plugins:\n{events}"), 1);
    let target = Target { selector: Some("app=vllm".to_owned()), ..target() };
    let text = format!("{HEAD}{text}  - pluginRef: token-load-scorer\n");
    let made = import(&text, &target).unwrap();
    let table: toml::Table = made.draft.text("x").parse().unwrap();
    let defaults = &table["discovery"]["kubernetes"][0]["defaults"];
    // S2.7
    assert_eq!(defaults["kv_events"].as_str(), Some("tcp://{host}:5556"));
    assert!(!made.report.text().contains("no scorer of a profile reads"), "{}", made.report.text());
}
