//! Cells of the table: the expected end, and the gateway's report.

use serde_json::Value;

use super::cases::Expected;

/// The gateway's report about a case.
pub(super) struct Evidence {
    pub(super) policies: String,
    pub(super) metrics: String,
}

impl Expected {
    /// Returns the cell of the expected end.
    pub(super) fn shown(&self) -> String {
        match self {
            Self::Refused(kind) => format!("refused: {kind}"),
            Self::RolledBack(failures) => format!("fallback, rolled back: {}", failures.join(" or ")),
            Self::Stray => "listed as stray".to_owned(),
            Self::Serves => "harmless".to_owned(),
            Self::Any => "any".to_owned(),
        }
    }
}

/// Returns the cell of a refusal: its kind and the beginning of its message.
pub(super) fn refusal_cell(record: &Value) -> String {
    let message = record["message"].as_str().unwrap_or_default();
    let printable = |c| if c == '|' || char::is_control(c) { ' ' } else { c };
    let mut short: String = message.chars().take(70).map(printable).collect();
    if short.chars().count() < message.chars().count() {
        short.push('…');
    }
    format!("{}: {short}", record["kind"].as_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::refusal_cell;

    #[test]
    fn messages_fit_a_cell() {
        let cell = |message: &str| refusal_cell(&json!({ "kind": "probe", "message": message }));
        assert_eq!(cell("a|b\nc"), "probe: a b c");
        assert_eq!(cell(&"é".repeat(70)), format!("probe: {}", "é".repeat(70)));
        assert_eq!(cell(&"é".repeat(71)), format!("probe: {}…", "é".repeat(70)));
    }
}
