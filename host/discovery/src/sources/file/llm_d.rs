//! The endpoints file of llm-d's router (plugin `file-discovery`).
//!
//! ```yaml
//! endpoints:
//!   - name: vllm-0
//!     address: "10.0.0.1"
//!     port: "8000"
//!     labels: { llm-d.ai/role: prefill }
//! ```

use std::collections::{BTreeMap, HashMap};

use pointsman_workers::WorkerSpec;
use serde::{Deserialize, Deserializer};

use super::{
    super::{
        llm_d_role::{ENCODE, ROLE_LABEL, role_of},
        scheme::Scheme,
    },
    syntax::Listed,
};
use crate::found::{Found, Refusal};

/// Endpoints of the last reading by name, valid ones as they are, others as they were last.
pub(super) type Known = HashMap<String, Found>;

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

/// Returns the workers of a file by their position in its list, and the refused endpoints. `of_source` has
/// the scheme, and the defaults: the engine, and the role of endpoints without a role label. An endpoint that
/// becomes invalid keeps its worker of `known`, except one that becomes an encoder.
pub(super) fn workers(
    file: &EndpointsFile,
    of_source: (Scheme, &BTreeMap<String, String>),
    known: &mut Known,
) -> (Vec<(usize, Found)>, Vec<Refusal>) {
    let (mut listed, mut refused, mut now) = (Vec::new(), Vec::new(), Known::new());
    for (place, endpoint) in (1..).zip(&file.endpoints.0) {
        let found = match worker(endpoint, of_source) {
            Ok(spec) => Some(Found::staying(spec)),
            Err(problem) => {
                refused.push(Refusal::new(&endpoint.name, &problem));
                let is_encoder = endpoint.labels.get(ROLE_LABEL).is_some_and(|role| role == ENCODE);
                known.get(&endpoint.name).filter(|_| !is_encoder).cloned()
            }
        };
        if let Some(found) = found {
            now.insert(endpoint.name.clone(), found.clone());
            listed.push((place, found));
        }
    }
    *known = now;
    (listed, refused)
}

fn worker(
    endpoint: &Endpoint,
    (scheme, defaults): (Scheme, &BTreeMap<String, String>),
) -> Result<WorkerSpec, String> {
    let port = match &endpoint.port {
        Port::Text(text) => text.parse::<u16>().map_err(|_| format!("port `{text}`: expected 1 to 65535"))?,
        Port::Number(port) => *port,
    };
    let url = scheme.url(&endpoint.address, port);
    let role = endpoint.labels.get(ROLE_LABEL).map(|role| role_of(role)).transpose()?;
    let labels: Vec<(String, &str)> =
        endpoint.labels.iter().map(|(name, value)| (format!("label.{name}"), value.as_str())).collect();
    let pairs = defaults.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let pairs = pairs.chain(labels.iter().map(|(key, value)| (key.as_str(), *value)));
    let pairs = pairs.chain(role.map(|role| ("role", role))).chain([("url", url.as_str())]);
    WorkerSpec::from_pairs(pairs).map_err(|error| error.to_string())
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
        let file: EndpointsFile = serde_yaml_ng::from_str(FILE).unwrap();
        let (workers, refused) = workers(&file, (Scheme::Http, &defaults.into()), &mut Known::new());
        let shown: Vec<_> =
            workers.iter().map(|(_, found)| (&*found.spec.url, found.spec.role, found.spec.engine)).collect();
        // P5.3
        assert_eq!(
            shown,
            [
                ("http://10.0.0.1:8000", Role::Prefill, Engine::Vllm),
                ("http://10.0.0.2:8001", Role::Decode, Engine::Vllm)
            ]
        );
        assert_eq!((&*workers[0].1.spec.labels["zone"], refused), ("a", vec![]));
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
            let file = serde_yaml_ng::from_str(&text).unwrap();
            let (found, _) = workers(&file, (Scheme::Https, &defaults), &mut Known::new());
            // P5.3, P10.4
            assert_eq!((found[0].1.spec.role, &*found[0].1.spec.url), (ours, "https://h:70"), "{role}");
        }
    }

    #[test]
    fn p5_an_endpoint_that_describes_no_worker_is_refused_alone() {
        let defaults = BTreeMap::from([("engine".to_owned(), "vllm".to_owned())]);
        let mut known = Known::new();
        let mut read = |port: &str, role: &str| {
            let text = format!(
                "endpoints:\n- {{ name: x, address: h, port: \"{port}\", labels: {{ llm-d.ai/role: {role} }} }}\n\
                 - {{ name: y, address: h, port: \"71\", labels: {{ llm-d.ai/role: decode }} }}"
            );
            let (found, refused) =
                workers(&serde_yaml_ng::from_str(&text).unwrap(), (Scheme::Http, &defaults), &mut known);
            let urls: Vec<_> =
                found.iter().map(|(place, found)| format!("{place} {}", found.spec.url)).collect();
            let refused: Vec<_> =
                refused.into_iter().map(|one| format!("{}: {}", one.entry, one.problem)).collect();
            (urls.join(", "), refused.join(", "))
        };
        let both = || "1 http://h:70, 2 http://h:71".to_owned();
        let bad_port = "x: port `70000`: expected 1 to 65535".to_owned();
        // P5.7: nothing is known of it, it is valid, it becomes invalid, it becomes an encoder
        assert_eq!(read("70000", "prefill"), ("2 http://h:71".to_owned(), bad_port.clone()));
        assert_eq!(read("70", "prefill"), (both(), String::new()));
        assert_eq!(read("70000", "prefill"), (both(), bad_port.clone()));
        assert_eq!(read("70000", "prefill"), (both(), bad_port));
        let encoder =
            "x: label llm-d.ai/role `encode`: an encoder serves neither prefill nor decode".to_owned();
        assert_eq!(read("70", "encode"), ("2 http://h:71".to_owned(), encoder));
        let unknown = "x: label llm-d.ai/role `cook`: expected prefill, decode or prefill-decode".to_owned();
        assert_eq!(read("70", "cook"), ("2 http://h:71".to_owned(), unknown));
    }
}
