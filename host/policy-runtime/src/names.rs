//! Names of tenants in the settings of policies. A policy knows a tenant by a salted hash of its name.

use pointsman_workers::name_hash;
use serde_json::Value;

/// Replaces `tenant:NAME`, as a text or as a key of a table, by the decimal hash of the tenant NAME.
pub fn hash_tenants(settings: &mut Value, salt: u64) {
    let hash = |text: &str| {
        let name = text.strip_prefix("tenant:")?;
        Some(name_hash(name.as_bytes(), salt).to_string())
    };
    match settings {
        Value::String(text) => {
            if let Some(hash) = hash(text) {
                *text = hash;
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| hash_tenants(value, salt)),
        Value::Object(entries) => {
            for (key, mut value) in std::mem::take(entries) {
                hash_tenants(&mut value, salt);
                entries.insert(hash(&key).unwrap_or(key), value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Returns JSON in which [`hash_tenants`] replaced the names. A text that is not JSON stays as it is: the
/// policy says what is wrong with it.
#[must_use]
pub fn with_hashed_tenants(settings: &str, salt: u64) -> String {
    match serde_json::from_str::<Value>(settings) {
        Ok(mut value) if settings.contains("tenant:") => {
            hash_tenants(&mut value, salt);
            value.to_string()
        }
        _ => settings.to_owned(),
    }
}
