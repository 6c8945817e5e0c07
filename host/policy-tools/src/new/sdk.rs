//! The SDK of Rust policies as files: a project has its own copy, and builds without a checkout.

use toml::{Table, Value};

/// Directory of the SDK in a project.
pub(super) const DIR: &str = "sdk";

/// Path in the SDK's directory, and text.
macro_rules! files {
    ($($to:literal from $from:literal: $($name:literal)*;)*) => {
        [$($((concat!($to, "/", $name), include_str!(concat!("../../../../", $from, "/", $name))),)*)*]
    };
}

const FILES: [(&str, &str); 20] = files! {
    "src" from "policies/sdk/src":
        "bindings.rs" "facts.rs" "least.rs" "lib.rs" "policy.rs" "rng.rs" "settings.rs" "state.rs" "testing.rs"
        "view.rs";
    "cases/src" from "policies/cases/src":
        "answer.rs" "facts.rs" "lib.rs" "outcome.rs" "parse.rs" "parse/tests.rs" "report.rs";
    "wit" from "wit": "policy.wit" "facts.md";
    "." from ".": "LICENSE";
};

const SDK: &str = include_str!("../../../../policies/sdk/Cargo.toml");
const CASES: &str = include_str!("../../../../policies/cases/Cargo.toml");
const WORKSPACE: &str = include_str!("../../../../Cargo.toml");
/// The path of the WIT in the SDK's sources, as in the repository.
const WIT_PATH: &str = "path: \"../../wit\"";

/// Returns the files of the SDK: paths in its directory, and contents.
pub(super) fn files() -> Vec<(String, String)> {
    let sources = FILES.iter().map(|(path, text)| {
        let path = path.strip_prefix("./").unwrap_or(path);
        (path.to_owned(), text.replace(WIT_PATH, "path: \"wit\""))
    });
    let manifests = [("Cargo.toml", SDK), ("cases/Cargo.toml", CASES)];
    let manifests = manifests.map(|(path, text)| (path.to_owned(), manifest(text)));
    sources.chain(manifests).collect()
}

/// Returns a manifest that stands outside of the repository's workspace.
fn manifest(text: &str) -> String {
    let parse = |text: &str| text.parse::<Table>().unwrap_or_default();
    let (mut manifest, workspace) = (parse(text), parse(WORKSPACE));
    let shared = |key: &str| -> Table {
        workspace.get("workspace").and_then(|all| all.get(key)?.as_table()).cloned().unwrap_or_default()
    };
    // They are about the repository.
    manifest.remove("lints");
    if let Some(Value::Table(package)) = manifest.get_mut("package") {
        resolve(package, &shared("package"));
    }
    for (name, section) in &mut manifest {
        match (name.as_str(), section) {
            ("dependencies", Value::Table(table)) => resolve(table, &shared("dependencies")),
            ("target", Value::Table(targets)) => {
                for (_, target) in targets {
                    if let Some(Value::Table(table)) = target.get_mut("dependencies") {
                        resolve(table, &shared("dependencies"));
                    }
                }
            }
            _ => {}
        }
    }
    format!("# Part of Pointsman, written by `pointsman policy new`.\n{manifest}")
}

/// Replaces `workspace = true` by the workspace's value.
fn resolve(table: &mut Table, shared: &Table) {
    for (name, value) in table {
        let Value::Table(inherited) = &mut *value else { continue };
        if inherited.remove("workspace").is_none() {
            continue;
        }
        let rest = std::mem::take(inherited);
        let mut found = match name.as_str() {
            // The one crate of the repository that the SDK uses.
            "pointsman-policy-cases" => Value::Table(Table::from_iter([("path".to_owned(), "cases".into())])),
            _ => shared.get(name).cloned().unwrap_or(Value::Boolean(true)),
        };
        if !rest.is_empty() {
            let mut whole = match found {
                Value::Table(table) => table,
                version => Table::from_iter([("version".to_owned(), version)]),
            };
            whole.extend(rest);
            found = Value::Table(whole);
        }
        *value = found;
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;

    /// Returns the paths of the files below a directory.
    fn below(dir: &Path, prefix: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let name = format!("{prefix}/{}", path.file_name().expect("a name").to_str().expect("text"));
            if path.is_dir() {
                found.extend(below(&path, &name));
            } else {
                found.insert(name);
            }
        }
        found
    }

    #[test]
    fn a_project_gets_every_source_of_the_sdk() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let paths: BTreeSet<String> = files().into_iter().map(|(path, _)| path).collect();
        let mut wanted = below(&root.join("policies/sdk/src"), "src");
        wanted.extend(below(&root.join("policies/cases/src"), "cases/src"));
        let rest = ["wit/policy.wit", "wit/facts.md", "LICENSE", "Cargo.toml", "cases/Cargo.toml"];
        wanted.extend(rest.map(str::to_owned));
        assert_eq!(paths, wanted);
    }

    #[test]
    fn no_file_of_the_sdk_refers_to_the_repository() {
        for (path, text) in files() {
            assert!(!text.contains("../../wit") && !text.contains("workspace"), "{path}: {text}");
        }
        let manifest: Table = manifest(SDK).parse().expect("well-formed");
        assert_eq!(manifest["dependencies"]["pointsman-policy-cases"]["path"].as_str(), Some("cases"));
        assert_eq!(manifest["dependencies"]["pointsman-policy-cases"]["optional"].as_bool(), Some(true));
        assert_eq!(manifest["dependencies"]["serde_json"]["version"].as_str(), Some("1"));
        let wasm = &manifest["target"]["cfg(target_family = \"wasm\")"]["dependencies"];
        assert!(wasm["wit-bindgen"].is_str(), "{wasm}");
        assert!(manifest["package"]["version"].is_str() && manifest["package"]["edition"].is_str());
    }
}
