//! The arms and the fleet that `trace export` prints.

use super::*;

#[test]
fn i10_the_arm_of_a_lane_is_what_its_slots_ran() {
    let decision = |slot: &str, lane: &str, policy: &str| LoggedDecision {
        slot: slot.into(),
        lane: lane.into(),
        policy: Some(policy.into()),
        digest: Some("cd".into()),
        decider: "policy".into(),
        worker: Some(1),
        rank: Some(0),
        ..Default::default()
    };
    let of = |decisions: Vec<LoggedDecision>| LoggedRequest { decisions, ..request(0, 40, &[900]) };
    let shadow = || Some(LoggedShadow { agrees: true, ..Default::default() });
    let pair = |prefill: &str, decode: &str, last: &str| {
        let decided = LoggedDecision { shadow: shadow(), ..decision("decode-override", "active", last) };
        of(vec![decided, decision("prefill", "active", prefill), decision("decode", "active", decode)])
    };
    let alone = |policy: &str| of(vec![decision("aggregated", "active", policy)]);
    let default = || pair("kv-aware", "predicted-latency", "predicted-disagg");
    let (text, _) = exported(&[default(), default(), alone("predicted-latency")]);
    // I10.12
    assert!(text.contains("--jitter-ms 20 \\\n      --arm active=default\n"), "{text}");
    assert!(!text.contains("warning") && !text.contains("shadow="), "{text}");
    let mine = || pair("mine", "longest-prefix", "conditional-disagg");
    let (text, _) = exported(&[mine(), mine(), alone("longest-prefix"), alone("kv-aware")]);
    let warned = "--arm active=longest-prefix+conditional-disagg\n\nwarning: the arm \
                  active=longest-prefix+conditional-disagg is not exactly what ran, because an arm has one policy \
                  for all slots; decisions of this lane: aggregated kv-aware (1) and longest-prefix (1), decode \
                  longest-prefix (2), decode-override conditional-disagg (2), prefill ./mine.wasm (2)\n";
    // I10.17
    assert!(text.contains(warned), "{text}");
    let canary = of(vec![decision("prefill", "canary", "cache-aware")]);
    let (text, _) = exported(&[default(), canary]);
    let warned = "the arm canary=cache-aware is not exactly what ran, because an arm has one policy for all slots; \
                  decisions of this lane: prefill cache-aware (1)\n";
    // I10.17
    assert!(text.contains(warned), "{text}");
    let bound =
        LoggedDecision { decider: "session".into(), policy: None, ..decision("aggregated", "active", "") };
    let native = LoggedDecision {
        decider: "native".into(),
        reason: Some("round-robin".into()),
        digest: None,
        ..bound.clone()
    };
    let (text, _) = exported(&[of(vec![native]), of(vec![bound.clone()]), of(vec![bound])]);
    // I10.12: the decision of a session does not say which native mode the slot has
    assert!(text.contains("--arm active=round-robin\n"), "{text}");
}

/// A decision of the active lane for a worker.
fn decided(slot: &str, worker: u64, decider: &str, filter: Option<&str>) -> LoggedDecision {
    LoggedDecision {
        slot: slot.into(),
        lane: "active".into(),
        policy: Some("predicted-latency".into()),
        digest: Some("cd".into()),
        filter: filter.map(str::to_owned),
        decider: decider.into(),
        worker: Some(worker),
        rank: Some(0),
        ..Default::default()
    }
}

fn of(decisions: Vec<LoggedDecision>) -> LoggedRequest {
    LoggedRequest { decisions, ..request(0, 40, &[900]) }
}

#[test]
fn i10_21_a_decode_engine_that_computed_whole_requests_is_counted_once() {
    let pair = |decode: u64| {
        of(vec![decided("prefill", 1, "policy", None), decided("decode", decode, "policy", None)])
    };
    let local = |worker: u64| of(vec![decided("aggregated", worker, "plan", None)]);
    let (text, _) = exported(&[pair(3), pair(4), local(3), local(4)]);
    let fleet = "  block_tokens = 16\n  [[engines]]\n  role = \"prefill\"\n  count = 1\n  blocks = 65536  # assumed: the \
                 log has no number of KV blocks\n  [[engines]]\n  role = \"decode\"\n  count = 2\n  blocks = 65536  #";
    // I10.21
    assert!(text.contains(fleet), "{text}");
    // An aggregated engine beside a pair stays one.
    let (text, _) = exported(&[pair(3), local(3), local(5)]);
    assert!(text.contains("role = \"aggregated\"\n  count = 1\n"), "{text}");
}

#[test]
fn i10_22_the_filters_and_sessions_that_an_arm_lacks_are_warnings() {
    let by = |decider: &str, filter| of(vec![decided("aggregated", 1, decider, filter)]);
    let (text, _) = exported(&[by("policy", None), by("policy", None)]);
    assert!(!text.contains("warning"), "{text}");
    let (text, _) =
        exported(&[by("policy", Some("formula")), by("session", Some("formula")), by("policy", None)]);
    let filter = "\nwarning: aggregated active had the filter formula before its policy (2 decisions), and the arm has no \
                  filter: add it, as in --arm active=formula@'SETTINGS'+POLICY\n";
    // I10.22
    assert!(text.contains(filter), "{text}");
    let sessions = "\nwarning: 1 of 3 decisions came from sessions: the simulation has them only with the gateway's \
                    `session_affinity` in `[routing]` of fleet.toml\n";
    // I10.22
    assert!(text.contains(sessions), "{text}");
    let mut shadowed = by("policy", None);
    let shadow =
        LoggedShadow { policy: Some("kv-aware".into()), filter: Some("mine".into()), ..Default::default() };
    shadowed.decisions[0].shadow = Some(shadow);
    let (text, _) = exported(&[shadowed]);
    let filter = "\nwarning: aggregated shadow had the filter mine before its policy (1 decisions), and the arm has no \
                  filter: add it, as in --arm shadow=./mine.wasm@'SETTINGS'+POLICY\n";
    // I10.22
    assert!(text.contains(filter), "{text}");
}

#[test]
fn i10_23_the_settings_and_scorers_that_an_arm_lacks_are_warnings() {
    let mut decision = decided("aggregated", 1, "policy", None);
    (decision.settings_digest, decision.scorers) =
        (Some("ab12".into()), Some("mine (weight 2, normalize MinMax), picker WeightedRandom".into()));
    let (text, _) = exported(&[of(vec![decision])]);
    let settings = "\nwarning: aggregated active ran predicted-latency with settings (digest ab12, 1 decisions), which the \
                    log does not contain, and the arm has none: add them, as in --arm \
                    active=predicted-latency@'SETTINGS'\n";
    // I10.23
    assert!(text.contains(settings), "{text}");
    let with_settings = |slot: &str, policy: &str| {
        let mut decision = decided(slot, 1, "policy", None);
        (decision.policy, decision.settings_digest) = (Some(policy.into()), Some("ab12".into()));
        decision
    };
    let pair = |prefill: &str, decode: &str, last: &str| {
        of(["prefill", "decode", "decode-override"]
            .into_iter()
            .zip([prefill, decode, last])
            .map(|(slot, policy)| with_settings(slot, policy))
            .collect())
    };
    let (all_default, _) = exported(&[pair("kv-aware", "predicted-latency", "predicted-disagg")]);
    let arm = "contain, and the arm default takes no settings\n";
    // I10.23
    assert!(all_default.matches(arm).count() == 3 && !all_default.contains("SETTINGS"), "{all_default}");
    let (own, _) = exported(&[
        pair("kv-aware", "kv-aware", "conditional-disagg"),
        of(vec![with_settings("aggregated", "longest-prefix")]),
    ]);
    for arm in ["kv-aware@'SETTINGS'+conditional-disagg\n", "kv-aware+conditional-disagg@'SETTINGS'\n"] {
        // I10.23
        assert!(own.contains(&format!("and the arm has none: add them, as in --arm active={arm}")), "{own}");
    }
    let other = "ran longest-prefix with settings (digest ab12, 1 decisions), which the log does not contain, and the \
                 arm does not have this policy\n";
    // I10.23
    assert!(own.contains(other), "{own}");
    let scorers = "\nwarning: aggregated active ranked by scorers (1 decisions): mine (weight 2, normalize MinMax), picker \
                   WeightedRandom. An arm adds the costs";
    // I10.23
    assert!(text.contains(scorers), "{text}");
}
