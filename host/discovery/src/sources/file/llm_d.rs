//! The endpoints file of llm-d's router (plugin `file-discovery`).
//!
//! ```yaml
//! endpoints:
//!   - name: vllm-0
//!     address: "10.0.0.1"
//!     port: "8000"
//!     labels: { llm-d.ai/role: prefill }
//! ```

use std::collections::BTreeMap;

use pointsman_workers::WorkerSpec;
use serde::{Deserialize, Deserializer};

use super::syntax::Listed;
use crate::found::Found;

/// Label that names the role.
const ROLE_LABEL: &str = "llm-d.ai/role";

/// The file. Keys that only llm-d needs are ignored.
#[derive(Deserialize)]
pub(super) struct EndpointsFile {
    endpoints: Listed<Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    name: String,
    address: String,
    port: Port,
    #[serde(default, deserialize_with = "or_empty")]
    labels: BTreeMap<String, String>,
}

/// YAML writes a key without a value as null.
fn or_empty<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// llm-d writes ports as texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Port {
    Text(String),
    Number(u16),
}

/// Returns the workers of a file. `defaults` has the engine, and the role of endpoints without a role label.
///
/// # Errors
/// An endpoint that does not describe a worker.
pub(super) fn workers(
    file: EndpointsFile,
    defaults: &BTreeMap<String, String>,
) -> Result<Vec<Found>, String> {
    let one = |endpoint: &Endpoint| {
        let spec =
            worker(endpoint, defaults).map_err(|error| format!("endpoint `{}`: {error}", endpoint.name))?;
        Ok(Found::staying(spec))
    };
    file.endpoints.0.iter().map(one).collect()
}

fn worker(endpoint: &Endpoint, defaults: &BTreeMap<String, String>) -> Result<WorkerSpec, String> {
    let port = match &endpoint.port {
        Port::Text(text) => text.parse::<u16>().map_err(|_| format!("port `{text}`: expected 1 to 65535"))?,
        Port::Number(port) => *port,
    };
    let address = &endpoint.address;
    let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
    let url = format!("http://{host}:{port}");
    let role = endpoint.labels.get(ROLE_LABEL).map(|role| role_of(role)).transpose()?;
    let labels: Vec<(String, &str)> =
        endpoint.labels.iter().map(|(name, value)| (format!("label.{name}"), value.as_str())).collect();
    let pairs = defaults.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let pairs = pairs.chain(labels.iter().map(|(key, value)| (key.as_str(), *value)));
    let pairs = pairs.chain(role.map(|role| ("role", role))).chain([("url", url.as_str())]);
    WorkerSpec::from_pairs(pairs).map_err(|error| error.to_string())
}

/// Returns our name of a role of llm-d.
fn role_of(role: &str) -> Result<&'static str, String> {
    match role {
        "prefill" | "encode-prefill" => Ok("prefill"),
        "decode" => Ok("decode"),
        "prefill-decode" | "encode-prefill-decode" | "both" => Ok("aggregated"),
        _ => Err(format!("label {ROLE_LABEL} `{role}`: expected prefill, decode or prefill-decode")),
    }
}

#[cfg(test)]
mod tests {
    use pointsman_workers::{Engine, Role};

    use super::*;

    const FILE: &str = r#"
endpoints:
  - name: p
    namespace: default
    address: "10.0.0.1"
    port: "8000"
    labels: { llm-d.ai/role: prefill, zone: a }
  - { name: d, address: "10.0.0.2", port: "8001" }
"#;

    #[test]
    fn endpoints_become_workers_with_roles_of_labels_and_defaults() {
        let defaults = [("engine", "vllm"), ("role", "decode")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let file = serde_yaml_ng::from_str(FILE).unwrap();
        let workers = workers(file, &defaults.into()).unwrap();
        let shown: Vec<_> =
            workers.iter().map(|found| (&*found.spec.url, found.spec.role, found.spec.engine)).collect();
        // P5.3
        assert_eq!(
            shown,
            [
                ("http://10.0.0.1:8000", Role::Prefill, Engine::Vllm),
                ("http://10.0.0.2:8001", Role::Decode, Engine::Vllm)
            ]
        );
        assert_eq!(workers[0].spec.labels["zone"], "a");
    }

    #[test]
    fn roles_with_an_encoder_are_those_of_the_legs_that_the_worker_serves() {
        for (role, ours) in [
            ("encode-prefill", Role::Prefill),
            ("decode", Role::Decode),
            ("prefill-decode", Role::Aggregated),
            ("encode-prefill-decode", Role::Aggregated),
            ("both", Role::Aggregated),
        ] {
            let text = format!(
                "endpoints: [{{ name: x, address: h, port: 70, labels: {{ llm-d.ai/role: {role} }} }}]"
            );
            let defaults = BTreeMap::from([("engine".to_owned(), "vllm".to_owned())]);
            let found = workers(serde_yaml_ng::from_str(&text).unwrap(), &defaults).unwrap();
            // P5.3
            assert_eq!(found[0].spec.role, ours, "{role}");
        }
    }

    #[test]
    fn a_problem_names_the_endpoint() {
        let problem =
            |text: &str| workers(serde_yaml_ng::from_str(text).unwrap(), &BTreeMap::new()).unwrap_err();
        let bad_port = "endpoints: [{ name: x, address: h, port: \"70000\" }]";
        assert_eq!(problem(bad_port), "endpoint `x`: port `70000`: expected 1 to 65535");
        let no_engine = "endpoints: [{ name: y, address: h, port: \"70\" }]";
        assert_eq!(problem(no_engine), "endpoint `y`: engine: is missing");
    }
}
