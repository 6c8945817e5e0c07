use std::fmt;

use proptest::prelude::*;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::*;

/// Values as serde_json finds them; keys are looked at apart.
struct Values<'a>(Vec<&'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for Values<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each<'a>(std::marker::PhantomData<&'a ()>);

        impl<'de: 'a, 'a> Visitor<'de> for Each<'a> {
            type Value = Values<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Values<'a>, M::Error> {
                let mut values = Vec::new();
                while let Some((_, value)) = map.next_entry::<&RawValue, &RawValue>()? {
                    values.push(value);
                }
                Ok(Values(values))
            }
        }

        deserializer.deserialize_map(Each(std::marker::PhantomData))
    }
}

/// serde_json's word.
fn serde(text: &str) -> Option<Vec<(usize, usize)>> {
    let Values(values) = serde_json::from_str(text).ok()?;
    let at = |raw: &RawValue| raw.get().as_ptr() as usize - text.as_ptr() as usize;
    Some(values.iter().map(|raw| (at(raw), at(raw) + raw.get().len())).collect())
}

fn members(text: &str) -> Result<Vec<Member>, Fault> {
    scan(text).map(|scanned| scanned.members)
}

fn ours(text: &str) -> Option<Vec<(usize, usize)>> {
    Some(members(text).ok()?.iter().map(|member| (member.value.start, member.value.end)).collect())
}

#[test]
fn it_takes_what_serde_json_takes() {
    let long = "x".repeat(200);
    let texts = [
        "{}",
        " {\t} \n",
        "{\"a\":1}",
        "{\"a\":01}",
        "{\"a\":-}",
        "{\"a\":-0.0e+1}",
        "{\"a\":1.}",
        "{\"a\":.1}",
        "{\"a\":1e}",
        "{\"a\":+1}",
        "{\"a\":tru}",
        "{\"a\":true,}",
        "{,}",
        "{\"a\"}",
        "{\"a\":}",
        "[]",
        "1",
        "",
        "{\"a\":[]}",
        "{\"a\":[1,]}",
        "{\"a\":[,]}",
        "{\"a\":[[[]]],\"b\":{\"c\":{}}}",
        "{\"a\":[}",
        "{\"a\":{]}",
        "{\"a\":{\"b\" : 1 , \"c\":[ 1 , 2 ]} }",
        "{\"a\":{1:2}}",
        "{\"a\":\"\u{7f}\u{e9}\u{1F600}\"}",
        "{\"a\":\"\t\"}",
        "{\"a\":\"\\x\"}",
        "{\"a\":\"\\u12\"}",
        "{\"a\":\"\\ud800\"}",
        "{\"a\":\"\\u00e9\"}",
        "{\"a\":\"",
        "{\"a\":\"\\",
        "{\"a\":\"\\u",
        "{\"a\":n",
        "{\"a\":null}x",
        "{\"a\":null} ",
        "{'a':1}",
        "{\"a\":NaN}",
        "{\"a\":1 2}",
        "\u{feff}{}",
        "{\"a\":1}{",
        "{\"a\":\"b\"c}",
        "{\"\\n\":1}",
    ];
    for text in texts {
        assert_eq!(ours(text), serde(text), "{text}");
        let inner = format!("{{\"p\":\"{long}\",\"q\":[{text}]}}");
        assert_eq!(ours(&inner), serde(&inner), "{inner}");
    }
}

#[test]
fn a_string_of_any_length_ends_where_it_ends() {
    for length in 0..300 {
        for end in ["\"", "\\\"\"", "\n\"", "\u{1f}\"", "\u{e9}\"", " \"", "!\"", "[\""] {
            let text = format!("{{\"k\":\"{}{end}}}", "y".repeat(length));
            assert_eq!(ours(&text), serde(&text), "{text}");
        }
    }
}

#[test]
fn depth_and_keys_are_limited() {
    let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    // The innermost list is empty and opens no level.
    assert!(members(&nested(MAX_DEPTH + 1)).is_ok());
    for depth in [MAX_DEPTH + 2, 200_000] {
        assert_eq!(members(&nested(depth)), Err(Fault::Depth));
    }
    let keys = |count: usize| format!("{{{}}}", vec!["\"k\":1"; count].join(","));
    assert_eq!(members(&keys(MAX_KEYS)).unwrap().len(), MAX_KEYS);
    assert_eq!(members(&keys(MAX_KEYS + 1)), Err(Fault::Keys));
}

#[test]
fn values_are_counted() {
    let counts = |value: &str| {
        let members = members(&format!("{{\"before\":[1,2],\"a\":{value}}}")).unwrap();
        (members[1].counts.items, members[1].counts.values)
    };
    for (value, expected) in [
        ("1", (0, 1)),
        ("\"a,b\"", (0, 1)),
        ("[]", (0, 1)),
        ("{}", (0, 1)),
        ("[1]", (1, 2)),
        ("[1,[2,3],{\"k\":4,\"l\":[]}]", (3, 8)),
        ("{\"k\":[1,2,3],\"l\":4}", (2, 6)),
    ] {
        assert_eq!(counts(value), expected, "{value}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]
    #[test]
    fn it_takes_what_serde_json_takes_of_anything(text in "\\{\"a\":[\\[\\]{}\",:0-9eE.+\\- \\\\tfnulrase\u{1}]{0,24}\\}") {
        prop_assert_eq!(ours(&text), serde(&text));
    }
}

#[test]
fn the_ends_of_objects_in_a_list_are_noted() {
    let ends = |text: &str| -> Vec<Vec<u32>> {
        members(text).unwrap().into_iter().map(|member| member.object_ends).collect()
    };
    assert_eq!(
        ends(r#"{"a": [ {"x":{"y":[{}]}} , 7, "}", [{}], {}], "b": {"c": [{}]}, "d": [{}], "e": []}"#),
        [vec![18, 37], vec![], vec![3], vec![]]
    );
    let many = format!(r#"{{"a":[{}{{}}],"b":[{{}}]}}"#, "{},".repeat(5_000));
    assert_eq!(ends(&many).iter().map(Vec::len).collect::<Vec<_>>(), [MAX_ENDS, 0]);
}
