//! `defaults` of a source: keys of the `--worker` flag that complete its descriptions of workers.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use pointsman_config_file::Report;
use pointsman_discovery::Scheme;
use pointsman_workers::WorkerSpec;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, de};

use super::DiscoveryScheme;

/// A value of the flag, as text. The file may have a number or a boolean.
pub(super) struct FlagValue(String);

/// Reads the values as text.
///
/// # Errors
/// A value is a list or a table.
pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    let values = BTreeMap::<String, FlagValue>::deserialize(deserializer)?;
    Ok(values.into_iter().map(|(key, FlagValue(text))| (key, text)).collect())
}

/// Checks keys and values. The source itself may give the keys of `of_source`, besides the URL.
pub(super) fn check(
    defaults: &BTreeMap<String, String>,
    scheme: DiscoveryScheme,
    of_source: &[&str],
    report: &mut Report<'_>,
) {
    let pairs = defaults.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    for error in WorkerSpec::problems_of_defaults(pairs, &Scheme::from(scheme).to_string(), of_source) {
        report.add(&format!("defaults.{}", error.key), error.problem);
    }
}

impl<'de> Deserialize<'de> for FlagValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = FlagValue;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a number or a boolean")
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<FlagValue, E> {
                Ok(FlagValue(value.to_owned()))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<FlagValue, E> {
                Ok(FlagValue(value.to_string()))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<FlagValue, E> {
                Ok(FlagValue(value.to_string()))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<FlagValue, E> {
                Ok(FlagValue(value.to_string()))
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<FlagValue, E> {
                Ok(FlagValue(value.to_string()))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

impl JsonSchema for FlagValue {
    fn schema_name() -> Cow<'static, str> {
        "FlagValue".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["string", "number", "boolean"] })
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn read(defaults: &str) -> Result<Vec<(String, String)>, String> {
        let text = format!("[[discovery.kubernetes]]\ndefaults = {defaults}");
        let mut config: Config = toml::from_str(&text).map_err(|error| error.to_string())?;
        Ok(config.discovery.kubernetes.remove(0).defaults.into_iter().collect())
    }

    #[test]
    fn p9_values_of_defaults_may_be_numbers_and_booleans() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        // P9.12
        assert_eq!(
            read("{ dp_size = 2, engine = 'vllm', local_prefill = true }").unwrap(),
            [pair("dp_size", "2"), pair("engine", "vllm"), pair("local_prefill", "true")]
        );
        let problem = read("{ dp_size = [2] }").unwrap_err();
        // P9.12
        assert!(problem.contains("expected a string, a number or a boolean"), "{problem}");
    }
}
