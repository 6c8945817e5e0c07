//! Definitions that exist in several places agree, and names that must be absent are absent.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use pointsman_routing::facts::{FactType, RequestFact, WorkerFact};

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn name(ty: FactType) -> &'static str {
    match ty {
        FactType::U32 => "u32",
        FactType::F32 => "f32",
        FactType::U64 => "u64",
    }
}

#[test]
fn the_host_the_sdk_and_the_document_have_one_table_of_facts() {
    let request = RequestFact::ALL.iter().map(|fact| ("request", fact.name(), name(fact.ty())));
    let worker = WorkerFact::ALL.iter().map(|fact| ("worker", fact.name(), name(fact.ty())));
    let host: Vec<_> = request.chain(worker).collect();
    assert_eq!(host, pointsman_policy_sdk::facts::ALL);
    let document = std::fs::read_to_string(root().join("wit/facts.md")).unwrap();
    let rows: BTreeSet<(&str, &str)> = document
        .lines()
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim).skip(1);
            let fact = cells.next()?.strip_prefix('`')?.strip_suffix('`')?;
            Some((fact, cells.next()?))
        })
        .filter(|(fact, ty)| !fact.contains('/') && !["u32", "f32", "u64"].contains(fact) && !ty.is_empty())
        .collect();
    assert_eq!(rows, host.iter().map(|(_, fact, ty)| (*fact, *ty)).collect());
}

/// The helpers run in plain Python and Node, with tests of their own.
#[test]
fn the_helpers_in_python_and_javascript_pass_their_tests_without_a_component() {
    let tests = [
        ("python3", &["policies/python/test_helper.py"][..]),
        ("node", &["--test", "policies/js/helper.test.mjs"]),
    ];
    for (program, arguments) in tests {
        let Ok(output) = std::process::Command::new(program).args(arguments).current_dir(root()).output()
        else {
            println!("skipped: {program} is not installed");
            continue;
        };
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        // O6.2, O6.3, T4.6, T4.7, T4.8, T4.11
        assert!(output.status.success(), "{text}");
    }
}

#[test]
fn invariant_1_crates_depend_one_way_only() {
    let depends = |krate: &str| -> BTreeSet<String> {
        let text = std::fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        manifest["dependencies"].as_table().unwrap().keys().cloned().collect()
    };
    let absent = |krate: &str, names: &[&str]| {
        let found: Vec<_> =
            depends(krate).into_iter().filter(|name| names.contains(&name.as_str())).collect();
        assert!(found.is_empty(), "{krate} depends on {found:?}");
    };
    absent(
        "host/workers",
        &["axum", "wasmtime", "pointsman-routing", "pointsman-gateway", "pointsman-policy-runtime"],
    );
    absent(
        "host/routing",
        &["axum", "hyper", "http", "wasmtime", "pointsman-gateway", "pointsman-policy-runtime"],
    );
    absent(
        "host/orchestration",
        &["axum", "hyper", "http", "wasmtime", "pointsman-gateway", "pointsman-policy-runtime"],
    );
    absent("host/discovery", &["axum", "wasmtime", "pointsman-routing", "pointsman-gateway"]);
    absent("host/import", &["axum", "hyper", "http", "wasmtime", "pointsman-routing", "pointsman-gateway"]);
    absent("host/replicas", &["axum", "hyper", "http", "wasmtime", "pointsman-gateway"]);
    absent("host/endpoint-picker", &["axum", "wasmtime", "pointsman-routing", "pointsman-gateway"]);
    absent("host/policy-runtime", &["axum", "hyper", "http", "pointsman-gateway"]);
    absent("host/gateway", &["wasmtime", "wasmtime-wasi"]);
    absent("host/lab", &["axum", "hyper", "http", "wasmtime", "pointsman-gateway"]);
    absent("host/sim", &["pointsman-gateway", "pointsman-routing", "pointsman-workers"]);
}

#[test]
fn invariant_6_no_fact_is_text_a_header_or_a_clock() {
    let names =
        RequestFact::ALL.iter().map(|fact| fact.name()).chain(WorkerFact::ALL.iter().map(|fact| fact.name()));
    for name in names {
        for word in ["text", "content", "header", "body", "url", "address"] {
            assert!(!name.contains(word), "{name}");
        }
    }
    let wit = std::fs::read_to_string(root().join("wit/policy.wit")).unwrap();
    let imports: Vec<_> = wit.lines().map(str::trim).filter(|line| line.starts_with("import ")).collect();
    let known = ["import log;", "import state;"];
    assert!(imports.iter().all(|import| known.contains(import)), "{imports:?}");
}

/// Top-level items of a WIT text by their first line, without comments and blank lines.
fn items(text: &str) -> BTreeMap<String, Vec<String>> {
    let (mut items, mut current) = (BTreeMap::<String, Vec<String>>::new(), String::new());
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//") && !line.trim().is_empty()) {
        if !line.starts_with([' ', '}']) {
            current = line.to_owned();
        }
        items.entry(current.clone()).or_default().push(line.trim().to_owned());
    }
    items
}

/// Returns the items of a release that are missing or differ. The package's name may differ: it names the
/// release.
fn broken(released: &str, now: &str) -> Vec<String> {
    let now = items(now);
    items(released)
        .into_iter()
        .filter(|(name, _)| !name.starts_with("package pointsman:policy@0.1."))
        .filter(|(name, body)| now.get(name) != Some(body))
        .map(|(name, _)| name)
        .collect()
}

#[test]
fn the_contract_keeps_every_release_of_its_line() {
    let now = std::fs::read_to_string(root().join("wit/policy.wit")).unwrap();
    let mut releases = 0;
    for entry in std::fs::read_dir(root().join("wit/released")).unwrap() {
        let released = std::fs::read_to_string(entry.unwrap().path().join("policy.wit")).unwrap();
        assert_eq!(broken(&released, &now), Vec::<String>::new(), "wit/EVOLUTION.md says what may change");
        releases += 1;
        // The comparison reports a difference and allows a comment.
        let other = released.replace("attempt: u32,", "attempt: u64,");
        assert_eq!(broken(&released, &other), ["interface types {"]);
        let other = released.replace("  seed: u64,\n", "");
        assert_eq!(broken(&released, &other), ["interface types {"]);
        let more = format!("{released}\ninterface more {{\n  observe: func();\n}}\n");
        assert_eq!(broken(&released, &more), Vec::<String>::new());
    }
    assert_eq!(releases, 1);
}
