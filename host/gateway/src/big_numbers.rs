//! Numbers beyond 2^53: JavaScript and many JSON readers round them, so each is also there as a text.

use serde_json::{Map, Value};

/// The largest whole number that a double holds exactly.
const EXACT: u64 = 1 << 53;

/// Adds `KEY_text` next to each KEY whose value is such a number, or a list with one, on every level.
pub(crate) fn with_texts(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(with_texts).collect(),
        Value::Object(members) => Value::Object(members.into_iter().flat_map(member).collect::<Map<_, _>>()),
        other => other,
    }
}

fn member((key, value): (String, Value)) -> Vec<(String, Value)> {
    let text = match &value {
        Value::Number(_) | Value::Array(_) if is_big(&value) => {
            Some((format!("{key}_text"), text_of(&value)))
        }
        _ => None,
    };
    [(key, with_texts(value))].into_iter().chain(text).collect()
}

/// Returns whether a value is such a number, or a list with one on any level.
fn is_big(value: &Value) -> bool {
    if let Value::Array(items) = value {
        return items.iter().any(is_big);
    }
    value.as_u64().or(value.as_i64().map(i64::unsigned_abs)).is_some_and(|number| number > EXACT)
}

fn text_of(value: &Value) -> Value {
    match value {
        Value::Array(items) => items.iter().map(text_of).collect(),
        other => Value::from(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_that_a_double_cannot_hold_have_a_text_next_to_them() {
        let big = u64::MAX - 1;
        let told = with_texts(
            json!({ "id": big, "ranks": [{ "hash": -9_007_199_254_740_993_i64 }], "ids": [1, big],
                "rows": [[big, 0], [7, 1]], "n": 5 }),
        );
        let expected = json!({
            "id": big, "id_text": "18446744073709551614",
            "ranks": [{ "hash": -9_007_199_254_740_993_i64, "hash_text": "-9007199254740993" }],
            "ids": [1, big], "ids_text": ["1", "18446744073709551614"],
            "rows": [[big, 0], [7, 1]], "rows_text": [["18446744073709551614", "0"], ["7", "1"]], "n": 5,
        });
        assert_eq!(told, expected);
    }
}
