//! The Helm chart in `deploy/helm`, against the Kustomize files in `deploy/kubernetes` and the configuration.
//!
//! `deploy/check.sh` checks what it renders against the published schemas. Tests that render
//! need `helm`, those that compare also `kubectl`: `deploy/tools.sh` installs both.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "tests and their helpers may fail"
)]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use pointsman_gateway::config::Config;
use serde::Deserialize as _;
use serde_json::Value;

mod combined;
mod rendered;
mod values;

/// Labels that name the release and the chart. The Kustomize files have none of them.
const LABELS_OF_HELM: [&str; 4] = [
    "helm.sh/chart",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
];

pub(crate) fn root() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).canonicalize().unwrap()
}

fn chart() -> PathBuf {
    root().join("deploy/helm/pointsman")
}

fn read(name: &str) -> String {
    fs::read_to_string(chart().join(name)).unwrap()
}

fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).unwrap()
}

/// Finds a program: the one that `POINTSMAN_NAME` gives, or else the first one in `PATH`. Without one, it
/// prints that the test is skipped.
#[expect(clippy::print_stderr, reason = "a test says that it was skipped")]
fn program(name: &str) -> Option<PathBuf> {
    let given = std::env::var_os(format!("POINTSMAN_{}", name.to_uppercase())).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        given.or_else(|| std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file()));
    if found.is_none() {
        eprintln!("skipped: {name} is not installed (deploy/tools.sh installs it)");
    }
    found
}

/// Helm, with directories of its own in place of the user's.
struct Helm {
    program: PathBuf,
    home: tempfile::TempDir,
}

impl Helm {
    fn installed() -> Option<Self> {
        Some(Self { program: program("helm")?, home: tempfile::tempdir().unwrap() })
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.program);
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            command.env(variable, self.home.path());
        }
        // No cluster takes part.
        command.env("KUBECONFIG", self.home.path().join("none"));
        command.args(arguments).output().unwrap()
    }

    /// Returns the output of `helm template` for values, or the last sentence of its error.
    fn template(&self, values: &[&str]) -> Result<String, String> {
        self.template_of("pointsman", values)
    }

    fn template_of(&self, release: &str, values: &[&str]) -> Result<String, String> {
        let chart = chart();
        let mut arguments = vec!["template", release, chart.to_str().unwrap(), "--namespace", "serving"];
        for value in values {
            // `--set` where an option does not begin the text.
            if !value.starts_with("--") {
                arguments.push("--set");
            }
            arguments.push(value);
        }
        let ran = self.run(&arguments);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        if ran.status.success() { Ok(text(ran.stdout)) } else { Err(text(ran.stderr)) }
    }
}

/// The objects of a stream of YAML by kind and name.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(text).map(|one| Value::deserialize(one).unwrap());
    documents
        .filter(|object| !object.is_null())
        .map(|object| {
            let part = |value: &Value| value.as_str().unwrap().to_owned();
            (format!("{}/{}", part(&object["kind"]), part(&object["metadata"]["name"])), comparable(object))
        })
        .collect()
}

/// An object without what differs by the tool: labels of Helm, the order of lists whose entries have names,
/// and how `pointsman.toml` is written.
fn comparable(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(key, _)| !LABELS_OF_HELM.contains(&key.as_str()));
            let kept = kept.map(|(key, value)| {
                let value =
                    if key == "pointsman.toml" { configuration(value.as_str().unwrap()) } else { value };
                (key, comparable(value))
            });
            Value::Object(kept.collect())
        }
        Value::Array(list) => {
            let mut list: Vec<Value> = list.into_iter().map(comparable).collect();
            if list.iter().all(|entry| entry["name"].is_string()) {
                list.sort_by_key(|entry| entry["name"].as_str().map(str::to_owned));
            }
            Value::Array(list)
        }
        other => other,
    }
}

/// Every value of a configuration, defaults included.
fn configuration(text: &str) -> Value {
    let config: Config = toml::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    serde_json::to_value(config).unwrap()
}
