//! What is wrong with the settings of a policy.

/// Names the setting that cannot be read. Line and column of the error are those of JSON that the host wrote,
/// so they are left out.
pub(crate) fn problem(text: &str, error: &serde_json::Error) -> String {
    let all = error.to_string();
    let what = all.split_once(" at line ").map_or(&*all, |(what, _)| what);
    // Both name the setting themselves.
    let has_name = what.starts_with("unknown field") || what.starts_with("missing field");
    let key = if has_name || error.line() != 1 { None } else { key_of_value(text, error.column()) };
    match key {
        Some(key) => format!("settings.{key}: {what}"),
        None => format!("settings: {what}"),
    }
}

/// Returns the key of the outermost object whose value has this byte, counted from 1.
fn key_of_value(text: &str, column: usize) -> Option<&str> {
    let (mut depth, mut key, mut is_key) = (0_u32, None, false);
    let (mut string, mut is_escaped) = (None, false);
    for (at, byte) in text.bytes().enumerate().take(column) {
        match (string, byte) {
            _ if is_escaped => is_escaped = false,
            (Some(_), b'\\') => is_escaped = true,
            (Some(begin), b'"') => {
                if depth == 1 && is_key {
                    (key, is_key) = (text.get(begin + 1..at), false);
                }
                string = None;
            }
            (Some(_), _) => {}
            (None, b'"') => string = Some(at),
            (None, b'{' | b'[') => {
                depth += 1;
                is_key = depth == 1;
            }
            (None, b'}' | b']') => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    key = None;
                }
            }
            (None, b',') if depth == 1 && at + 1 < column => (key, is_key) = (None, true),
            (None, _) => {}
        }
    }
    key
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    struct Settings {
        weight: f32,
        is_on: bool,
        rows: Vec<u32>,
        name: String,
    }

    impl Default for Settings {
        fn default() -> Self {
            Self { weight: 1.0, is_on: true, rows: Vec::new(), name: String::new() }
        }
    }

    #[test]
    fn t3_a_setting_of_the_wrong_type_is_named_without_a_place_in_json() {
        let told = |text: &str| problem(text, &serde_json::from_str::<Settings>(text).unwrap_err());
        let cases = [
            (r#"{"weight":"2"}"#, "settings.weight: invalid type: string \"2\", expected f32"),
            (
                r#"{"name":"a,\"{","is-on":5}"#,
                "settings.is-on: invalid type: integer `5`, expected a boolean",
            ),
            (r#"{"is-on":5,"weight":1}"#, "settings.is-on: invalid type: integer `5`, expected a boolean"),
            (r#"{"rows":[1,-2],"weight":1}"#, "settings.rows: invalid value: integer `-2`, expected u32"),
            (r#"{"name":null}"#, "settings.name: invalid type: null, expected a string"),
            (
                r#"{"weight":1,"x":2}"#,
                "settings: unknown field `x`, expected one of `weight`, `is-on`, `rows`, `name`",
            ),
            ("5", "settings: invalid type: integer `5`, expected struct Settings"),
            ("{", "settings: EOF while parsing an object"),
        ];
        for (text, expected) in cases {
            // T3.7
            assert_eq!(told(text), expected, "{text}");
        }
    }
}
