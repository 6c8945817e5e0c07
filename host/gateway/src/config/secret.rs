//! A text that logs and error messages must not show.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Text that is shown in place of a secret.
pub(super) const HIDDEN: &str = "[secret]";

/// A key or token. `Debug` hides it, and there is no `Display`.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Returns the text, for a comparison or for a header.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(HIDDEN)
    }
}

impl schemars::JsonSchema for Secret {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Secret".into()
    }

    /// A text, or where it is.
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let reference = |key: &str| {
            serde_json::json!({
                "type": "object",
                "properties": { key: { "type": "string" } },
                "required": [key],
                "additionalProperties": false
            })
        };
        let forms = [serde_json::json!({ "type": "string" }), reference("env"), reference("file")];
        schemars::json_schema!({ "anyOf": forms })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HIDDEN)
    }
}
