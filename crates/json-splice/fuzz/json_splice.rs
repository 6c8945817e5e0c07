//! Compares the scan and the edits of a body with serde_json's tree.
#![no_main]

use bytes::Bytes;
use json_splice::{JsonBody, JsonError, MIN_LONG_STRING};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

fuzz_target!(|data: &[u8]| {
    let Some((choice, text)) = data.split_first() else { return };
    let tree = serde_json::from_slice::<Map<String, Value>>(text);
    let body = match JsonBody::parse(Bytes::copy_from_slice(text)) {
        // Bodies that serde_json refuses because of their structure, and not because of the value of a
        // number or an escape.
        Ok(body) => {
            type Fields = std::collections::BTreeMap<String, serde::de::IgnoredAny>;
            let skipped = serde_json::from_slice::<Fields>(text);
            assert!(skipped.is_ok(), "{skipped:?}");
            body
        }
        // serde_json has no such limits.
        Err(JsonError::Keys | JsonError::Depth) => return,
        Err(error) => {
            assert!(tree.is_err(), "{error}");
            return;
        }
    };
    assert_eq!(body.edit().finish(), text);
    // Numbers out of range and the like are not judged.
    let Ok(tree) = tree else { return };
    for (key, value) in &tree {
        let raw = body.get(key).expect("a key of the tree");
        assert_eq!(&serde_json::from_str::<Value>(raw).expect("a value"), value);
        for place in body.long_strings(key) {
            let string = raw.get(place).expect("a place in the value");
            assert!(string.len() >= MIN_LONG_STRING && serde_json::from_str::<String>(string).is_ok());
        }
    }
    let keys: Vec<&str> = tree.keys().map(String::as_str).collect();
    let pick = |place: u8| keys.get(usize::from(place) % (keys.len() + 1)).copied().unwrap_or("other\"key");
    let (set, removed) = (pick(choice & 15), pick(choice >> 4));
    let edited = body.edit().remove(removed).set(set, "[null]").finish();
    let mut expected = tree.clone();
    expected.remove(removed);
    expected.insert(set.to_owned(), serde_json::json!([null]));
    assert_eq!(serde_json::from_slice::<Map<String, Value>>(&edited).expect("an object"), expected);
    let again = JsonBody::parse(edited).expect("an object");
    for key in keys.iter().filter(|key| **key != set && **key != removed) {
        assert_eq!(again.get(key), body.get(key), "what is not edited stays as it is");
    }
});
