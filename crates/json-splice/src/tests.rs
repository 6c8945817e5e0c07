use proptest::prelude::*;
use serde_json::{Map, Value};

use super::*;

fn body(text: &str) -> JsonBody {
    JsonBody::parse(Bytes::copy_from_slice(text.as_bytes())).unwrap()
}

#[test]
fn what_is_not_edited_stays_byte_for_byte() {
    let text =
        "{ \"a\" : 1.0 ,\n\t\"max_tokens\":  7, \"z\\u0031\": [1e400, {\"max_tokens\": 3}] , \"s\":\"}\" }";
    let body = body(text);
    assert_eq!(body.edit().finish(), text);
    assert_eq!(body.edit().remove("nope").finish(), text);
    assert_eq!(body.edit().set("max_tokens", "1").finish(), text.replace(":  7", ":  1").as_str());
    let edited = body.edit().remove("a").set("stream", "false").finish();
    assert_eq!(
        edited,
        "{\n\t\"max_tokens\":  7, \"z\\u0031\": [1e400, {\"max_tokens\": 3}] , \"s\":\"}\",\"stream\":false }"
    );
    assert_eq!(body.get("z1"), Some("[1e400, {\"max_tokens\": 3}]"));
}

#[test]
fn the_places_of_long_strings_in_a_value_are_known() {
    let (long, short) = ("l".repeat(MIN_LONG_STRING - 2), "s".repeat(MIN_LONG_STRING - 3));
    let text = format!(
        r#"{{"{long}":"{long}", "a": [ {{"{long}":"{short}","data" : "{long}"}} , "\"{short}\""], "b":7,"c":"x{long}"}}"#
    );
    let body = body(&text);
    let strings = |key: &str| -> Vec<String> {
        body.long_strings(key).map(|place| body.get(key).unwrap()[place].to_owned()).collect()
    };
    assert_eq!(strings("a"), [format!("\"{long}\""), format!(r#""\"{short}\"""#)]);
    assert_eq!(strings(&long), [format!("\"{long}\"")]);
    assert_eq!(
        (strings("b").len(), strings("missing").len(), strings("c")),
        (0, 0, vec![format!("\"x{long}\"")])
    );
    let many = self::body(&format!("{{\"a\":[{}1],\"b\":\"{long}\"}}", format!("\"{long}\",").repeat(4_100)));
    assert_eq!((many.long_strings("a").count(), many.long_strings("b").count()), (4_096, 0));
}

#[test]
fn the_last_of_several_equal_keys_counts_and_edits_meet_all() {
    let body = body(r#"{"n":1,"x":2,"n":3}"#);
    assert_eq!(body.get("n"), Some("3"));
    assert_eq!(body.edit().set("n", "9").finish(), r#"{"n":9,"x":2}"#);
    assert_eq!(body.edit().remove("n").finish(), r#"{"x":2}"#);
    assert_eq!(body.edit().remove("n").remove("x").finish(), "{}");
    assert_eq!(self::body("{}").edit().set("k\"", "1").finish(), r#"{"k\"":1}"#);
}

#[test]
fn stripped_keys_go_in_any_case_and_with_any_escapes() {
    let body = body(r#"{"rid":1,"RID":2,"\u0052iD":3,"r\u0069d":4,"rids":5}"#);
    assert_eq!(body.edit().strip(&["rid"]).finish(), r#"{"rids":5}"#);
    assert_eq!(body.edit().strip(&["rid"]).set("rid", "9").finish(), r#"{"rid":9,"rids":5}"#);
}

#[test]
fn an_inner_object_is_read_on_its_own() {
    let body = body(r#"{"x":{"a":[1,2]},"n":null,"l":[]}"#);
    let inner = body.object("x").unwrap().unwrap();
    assert_eq!((inner.get("a"), inner.counts("a").items), (Some("[1,2]"), 2));
    assert!(body.object("n").is_none() && body.object("l").is_none() && body.object("y").is_none());
}

#[test]
fn an_error_names_its_line_and_column() {
    let error =
        |text: &'static str| JsonBody::parse(Bytes::from_static(text.as_bytes())).unwrap_err().to_string();
    assert!(error("{\"a\": }").contains("line 1 column 7"), "{}", error("{\"a\": }"));
    assert!(error("[1]").contains("expected an object"));
    assert!(error("").contains("EOF"));
    assert!(error("{} x").contains("trailing characters"));
    assert!(
        error("{\"a\\ud800\":1}").contains("surrogate") || error("{\"a\\ud800\":1}").contains("hex escape")
    );
    let invalid = JsonBody::parse(Bytes::from_static(b"{\"a\":\"\xff\"}")).unwrap_err();
    assert!(invalid.to_string().contains("utf-8"), "{invalid}");
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[ -~\\n\u{e9}\"]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(2, 12, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::hash_map("[a-c\"\\\\]{0,2}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

proptest! {
    #[test]
    fn an_edited_body_parses_to_what_was_meant(
        fields in proptest::collection::vec(("[a-e\"]{1,2}", json()), 0..8),
        set in proptest::collection::btree_map("[a-e]{1,2}", json(), 0..3),
        removed in proptest::collection::vec("[a-e]{1,2}", 0..3),
        pretty in any::<bool>(),
    ) {
        let object: Map<String, Value> = fields.into_iter().collect();
        let print = if pretty { serde_json::to_string_pretty } else { serde_json::to_string };
        let text = print(&object).unwrap();
        let body = body(&text);
        let values: Vec<(String, String)> =
            set.iter().map(|(key, value)| (key.clone(), value.to_string())).collect();
        let mut edit = body.edit();
        for key in &removed {
            edit = edit.remove(key);
        }
        for (key, value) in &values {
            edit = edit.set(key, value.as_str());
        }
        let mut expected = object.clone();
        removed.iter().for_each(|key| drop(expected.remove(key)));
        expected.extend(set);
        let edited = edit.finish();
        let parsed: Value = serde_json::from_slice(&edited).unwrap();
        prop_assert_eq!(parsed, Value::Object(expected.clone()));
        let again = JsonBody::parse(edited).unwrap();
        let is_set = |key: &String| values.iter().any(|(set, _)| set == key);
        for key in object.keys().filter(|key| !removed.contains(key) && !is_set(key)) {
            prop_assert_eq!(again.get(key), body.get(key));
        }
    }
}
