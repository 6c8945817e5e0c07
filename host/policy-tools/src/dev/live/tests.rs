#![allow(clippy::unwrap_used, reason = "tests may fail")]

use serde_json::{Value, json};

use super::*;

fn look(change: impl FnOnce(&mut Value), lines: Lines) -> Look {
    let mut slot = json!({
        "slot": "prefill", "model": null, "state": "active", "generation": 4, "policy": "kv-aware", "version": null,
        "digest": "aa", "parts": [{ "world": "selector", "digest": "aa" }], "calls": 9, "failures": 0,
        "breaker_open": false, "canary": null, "refusals": [],
        "shadow": {
            "generation": 7, "share": 1.0, "policy": "mine", "digest": "aa", "calls": 0, "agree": 0, "disagree": 0,
            "failed": 0,
            "parts": [{ "world": "filter", "digest": "bb" }, { "world": "selector", "digest": "aa" }],
        },
    });
    change(&mut slot);
    Look { slot: Some(serde_json::from_value(slot).unwrap()), compiling: Vec::new(), lines }
}

fn labels(seen: &Seen) -> Vec<&'static str> {
    seen.lines.iter().map(|(label, _)| *label).collect()
}

fn mine() -> OwnPolicy {
    OwnPolicy::placed("bb", Instant::now(), "build 0.40, cases 0.20".to_owned(), 100)
}

#[test]
fn t1_a_filter_is_live_before_the_policy_that_ranks() {
    // The digest of the lane is "aa", which is also active.
    let mut other = OwnPolicy::placed("cc", Instant::now(), String::new(), 100);
    // T1.3
    assert_eq!(labels(&mine().see(&look(|_| {}, Lines::default()))), ["live"]);
    assert!(labels(&other.see(&look(|_| {}, Lines::default()))).is_empty());
}

#[test]
fn it_is_live_once_decides_once_and_each_new_failure_is_told() {
    let mut own = mine();
    let seen = own.see(&look(|_| {}, Lines::default()));
    assert_eq!((labels(&seen), seen.fate), (vec!["live"], Fate::Open));
    let live = &seen.lines[0].1;
    assert!(
        live.starts_with("shadow, generation 7, 0.0") && live.contains("build 0.40, cases 0.20, gateway 0.0"),
        "{live}"
    );
    let deciding = |slot: &mut Value| {
        let trial = &mut slot["shadow"];
        (trial["calls"], trial["agree"], trial["disagree"]) = (json!(10), json!(9), json!(1));
    };
    let seen = own.see(&look(deciding, Lines::default()));
    assert_eq!(labels(&seen), ["decided"]);
    assert_eq!(seen.status.unwrap(), "shadow, generation 7: agrees in 9 of 10 (90 %), 0 failed");
    let refusing = |slot: &mut Value| {
        deciding(slot);
        slot["shadow"]["shed"] = json!(30);
    };
    let status = own.see(&look(refusing, Lines::default())).status.unwrap();
    // T8.1
    assert_eq!(status, "shadow, generation 7: agrees in 9 of 40 (22 %), 30 refused, 0 failed");
    let failing = |slot: &mut Value| {
        deciding(slot);
        slot["shadow"]["failures"] = json!(2);
        slot["shadow"]["breaker_open"] = json!(true);
        slot["shadow"]["last_failure"] =
            json!({ "kind": "trap", "message": "panicked", "at_ms": 5, "request_id": "r`1" });
    };
    let seen = own.see(&look(failing, Lines::default()));
    assert_eq!(
        seen.lines,
        [("failure", "2 of 10 calls failed; the last, request `r'1`: panicked (trap)".to_owned())]
    );
    assert!(seen.status.unwrap().ends_with("; its breaker is open, so it is not called"));
    assert!(own.see(&look(failing, Lines::default())).lines.is_empty());
}

#[test]
fn a_refusal_of_this_content_is_told_from_earlier_ones_and_from_a_withdrawal() {
    let refusal = |digest: &str, at_ms: u64| {
        json!({ "lane": "shadow", "file": "prefill.shadow.wasm", "digest": digest, "kind": "probe",
                "message": "it loops", "at_ms": at_ms })
    };
    let refused = |refusals: Value| {
        look(move |slot| (slot["shadow"], slot["refusals"]) = (Value::Null, refusals), Lines::default())
    };
    let mut own = mine();
    let earlier = json!([refusal("bb", 100), refusal("cc", 200)]);
    assert_eq!(own.see(&refused(earlier)), Seen { lines: vec![], status: None, fate: Fate::Open });
    let seen = own.see(&refused(json!([refusal("bb", 101)])));
    let expected = ("refused", "prefill.shadow.wasm (probe): it loops".to_owned());
    assert_eq!((seen.lines, seen.fate), (vec![expected], Fate::Refused));
    own.see(&look(|_| {}, Lines::default()));
    let seen = own.see(&refused(json!([refusal("bb", 300)])));
    assert_eq!((labels(&seen), seen.fate), (vec!["withdrawn"], Fate::Over));
}

#[test]
fn a_lane_without_it_is_lost_after_several_looks_and_a_restart_is_not() {
    let mut own = mine();
    own.see(&look(|_| {}, Lines::default()));
    let gone = || look(|slot| slot["shadow"] = Value::Null, Lines::default());
    for _ in 1..MAX_ABSENT {
        assert_eq!(own.see(&gone()).fate, Fate::Open);
    }
    let seen = own.see(&look(|slot| slot["shadow"]["generation"] = json!(2), Lines::default()));
    assert_eq!(seen.lines, [("live", "shadow, generation 2".to_owned())]);
    let fates: Vec<Fate> = (0..MAX_ABSENT).map(|_| own.see(&gone()).fate).collect();
    assert_eq!(fates.last(), Some(&Fate::Over));
    let compiling = Look { compiling: vec!["prefill.shadow.wasm".to_owned()], ..gone() };
    assert!(mine().see(&compiling).status.unwrap().starts_with("the gateway compiles it"));
    let none = Look { slot: None, ..gone() };
    assert_eq!(mine().see(&none).fate, Fate::Refused);
}

#[test]
fn lines_of_its_generation_are_shown_up_to_a_limit() {
    let lines = |count: u64, last| Lines {
        lines: (0..count)
            .map(|number| Line {
                level: "info".to_owned(),
                generation: (number != 1).then_some(7),
                text: number.to_string(),
            })
            .collect(),
        last,
    };
    let mut own = mine();
    assert_eq!(own.after(), None);
    own.see(&look(|_| {}, Lines::default()));
    assert_eq!(own.after(), Some(0));
    let seen = own.see(&look(|_| {}, lines(3, 3)));
    assert_eq!(seen.lines, [("log", "info: 0".to_owned()), ("log", "info: 2".to_owned())]);
    assert_eq!(own.after(), Some(3));
    let seen = own.see(&look(|_| {}, lines(30, 33)));
    assert_eq!((seen.lines.len(), &*seen.lines[10].1), (11, "and 19 lines more"));
    // The gateway was restarted: its numbers begin again.
    assert!(own.see(&look(|_| {}, lines(0, 2))).lines.is_empty());
    assert_eq!(own.after(), Some(2));
}
