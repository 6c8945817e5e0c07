use pointsman_routing::Normalize;

use super::*;

fn line(more: &str) -> RecordedDecision {
    let text = format!(
        r#"{{"id":"1f","leg":"prefill","attempt":0,"call":{{"seed":1,"now_us":2,"temperature":0.5}},
        "candidates":[[4294967298,0],[7,1],[9,0]],"inputs_dropped":false,{more}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

const STAGES: &str = r#""stages":[
    {"rows":3,"kept":null,"request":{"prompt-tokens":64},"workers":{"kv-usage":[0.1,"0x7fc00000",0.3]}},
    {"policy":"f","world":"filter","rows":3,"kept":null,"request":{},"workers":{"engine-queue":[1,2,3]}},
    {"policy":"s","world":"scorer","weight":2.0,"normalize":"unit","rows":2,"kept":[0,2],"request":{},"workers":{}}],
    "left":[0,2]"#;

fn wants(request: &[&str], worker: &[&str]) -> pointsman_routing::facts::Wants {
    pointsman_routing::facts::Wants::resolve(request, worker).unwrap()
}

#[test]
fn words_combine_the_facts_of_all_stages_for_the_requested_rows() {
    let line = line(&format!(r#""decider":{{"by":"policy"}},{STAGES}"#));
    let wants =
        wants(&["prompt-tokens", "explain", "temperature"], &["engine-queue", "worker-id", "kv-usage"]);
    let request = [64, 0, 0.5_f32.to_bits()];
    let rows = [1, 3, 2, 9, 1, 0, 0.1_f32.to_bits(), 0.3_f32.to_bits()];
    assert_eq!(line.words(&wants, &[0, 2]).unwrap(), [&request[..], &rows].concat());
    let nan = line.words(&self::wants(&[], &["kv-usage"]), &[1]).unwrap();
    assert_eq!(nan, [0x7fc0_0000]);
    // The gateway that recorded this did not know which figures are known.
    assert_eq!(line.words(&self::wants(&[], &["engine-queue-known"]), &[0, 2]).unwrap(), [1, 1]);
    assert!(line.words(&self::wants(&[], &["engine-running-known"]), &[0]).is_err());
    assert_eq!(line.only_scorer(), Some((2.0, Normalize::Unit)));
    assert_eq!(line.kept_by_the_first_filter(), [0, 2]);
}

#[test]
fn missing_facts_are_named() {
    let line = line(&format!(r#""decider":{{"by":"policy"}},{STAGES}"#));
    let MissingFacts(names) = line.words(&wants(&["n"], &["error-ppm", "kv-usage"]), &[0, 1]).unwrap_err();
    assert_eq!(names, ["n", "error-ppm"]);
    let error = ReplayError::Facts { policy: "p".to_owned(), facts: BTreeMap::from([("n".to_owned(), 3)]) };
    let expected = "the recording lacks facts that \"p\" asks for: `n` (in 3 decisions); \
                    record them with `[decisions] facts = [\"n\"]`";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn decisions_that_no_policy_made_are_skipped_with_the_reason() {
    let case = |more: &str, world| recorded(&line(&format!("{more},\"stages\":[]")), world);
    let fell = |reason: &str| format!(r#""decider":{{"by":"fallback","reason":"{reason}"}}"#);
    assert_eq!(case(&fell("timeout"), World::Scorer), Err("fallback: timeout".to_owned()));
    assert_eq!(case(&fell("abstain"), World::Scorer), Ok(Answer::Abstain));
    assert_eq!(case(r#""decider":{"by":"pin"}"#, World::Selector), Err("decided by pin".to_owned()));
    let chosen = r#""decider":{"by":"native"},"choice":{"row":2,"cost":null}"#;
    assert_eq!(case(chosen, World::Selector), Ok(Answer::Row(2)));
    assert_eq!(case(chosen, World::DecodeOverride), Err("not for a decode-override".to_owned()));
    let plan = r#""decider":{"by":"policy"},"plan":{"word":"local","decode":null}"#;
    assert_eq!(case(plan, World::DecodeOverride), Ok(Answer::Plan("local".to_owned())));
}

#[test]
fn a_difference_has_both_costs_of_both_choices_and_the_facts_that_differ() {
    let chosen = r#""decider":{"by":"policy"},"choice":{"row":0,"cost":1.5},"costs":[1.5,4.0]"#;
    let line = line(&format!("{chosen},{STAGES}"));
    let found = difference(&line, &Answer::Row(0), &Answer::Row(2), &[(0, 9.0), (2, 8.0)]);
    assert_eq!(
        (found.recorded_cost, found.new_cost_recorded, found.by_recorded),
        (Some(1.5), Some(4.0), Some(2.5))
    );
    assert_eq!((found.new_cost, found.by), (Some(8.0), Some(1.0)));
    let differs = |fact: &str, recorded: &str, new: &str| FactDifference {
        fact: fact.to_owned(),
        recorded: recorded.to_owned(),
        new: new.to_owned(),
    };
    assert_eq!(found.facts, [differs("engine-queue", "1", "3"), differs("kv-usage", "0.1", "0.3")]);
    let shed = difference(&line, &Answer::Row(0), &Answer::Shed, &[]);
    assert_eq!((shed.by, shed.by_recorded, shed.facts), (None, None, Vec::new()));
}
