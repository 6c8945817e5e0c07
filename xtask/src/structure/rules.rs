//! The rules: crate edges, no circles between siblings, no thread-locals, no unused public items, file sizes.
//! Those of `crates/` are in [`super::standalone`].

use std::{collections::BTreeSet, fs, path::Path};

use syn::spanned::Spanned as _;

use super::{
    graph,
    modules::{Crate, Module, rust_files},
    shown, standalone, syntax,
};

/// Crates of the product that each crate of `host` may depend on. A crate that is missing here may depend on
/// none.
const EDGES: &[(&str, &[&str])] = &[
    (
        "pointsman-gateway",
        &[
            "pointsman-admin-cli",
            "pointsman-certificates",
            "pointsman-cli",
            "pointsman-config-file",
            "pointsman-decision-log",
            "pointsman-discovery",
            "pointsman-embedded-policies",
            "pointsman-endpoint-picker",
            "pointsman-http-client",
            "pointsman-orchestration",
            "pointsman-policy-admin",
            "pointsman-policy-runtime",
            "pointsman-replicas",
            "pointsman-routing",
            "pointsman-tokens",
            "pointsman-workers",
        ],
    ),
    (
        "pointsman-policy-tools",
        &[
            "pointsman-admin-cli",
            "pointsman-cli",
            "pointsman-embedded-policies",
            "pointsman-guest-build",
            "pointsman-http-client",
            "pointsman-policy-admin",
            "pointsman-policy-cases",
            "pointsman-policy-runtime",
            "pointsman-routing",
            "pointsman-workers",
        ],
    ),
    (
        "pointsman-lab",
        &[
            "pointsman-cli",
            "pointsman-config-file",
            "pointsman-decision-log",
            "pointsman-embedded-policies",
            "pointsman-orchestration",
            "pointsman-policy-runtime",
            "pointsman-replicas",
            "pointsman-routing",
            "pointsman-sim",
            "pointsman-workers",
        ],
    ),
    (
        "pointsman-lab-cli",
        &[
            "pointsman-cli",
            "pointsman-embedded-policies",
            "pointsman-guest-build",
            "pointsman-http-client",
            "pointsman-lab",
            "pointsman-policy-runtime",
            "pointsman-rig",
            "pointsman-sim",
            "pointsman-workers",
        ],
    ),
    ("pointsman-admin-cli", &["pointsman-cli", "pointsman-http-client"]),
    ("pointsman-config-file", &["pointsman-config-derive"]),
    ("pointsman-discovery", &["pointsman-http-client", "pointsman-workers"]),
    ("pointsman-orchestration", &["pointsman-routing", "pointsman-workers"]),
    ("pointsman-policy-admin", &["pointsman-admin-cli", "pointsman-cli", "pointsman-policy-runtime"]),
    ("pointsman-policy-runtime", &["pointsman-formula", "pointsman-routing", "pointsman-workers"]),
    ("pointsman-replicas", &["pointsman-orchestration", "pointsman-routing", "pointsman-workers"]),
    ("pointsman-routing", &["pointsman-workers"]),
    ("pointsman-tools", &["pointsman-admin-cli", "pointsman-cli", "pointsman-import"]),
];

/// Files of `host` that may keep a buffer pool, or a handler of the platform, for each thread.
const THREAD_LOCALS: &[&str] = &["host/policy-runtime/src/", "host/routing/src/buffers.rs"];

/// Longest file, tests left out.
const MAX_FILE_LINES: usize = 400;

/// Every broken rule, as a line for a person.
pub(crate) fn broken(root: &Path, crates: &[Crate]) -> anyhow::Result<Vec<String>> {
    let mut broken = Vec::new();
    for krate in crates {
        circles(krate, &mut broken);
        for module in &krate.modules {
            let file = shown(root, &module.file);
            let lines = lines(module);
            if lines > MAX_FILE_LINES {
                broken.push(format!("{file}: {lines} lines, limit {MAX_FILE_LINES}"));
            }
            let allowed = THREAD_LOCALS.iter().any(|allowed| file.starts_with(allowed));
            if file.starts_with("host/") && !allowed && module.text.contains("thread_local!") {
                broken.push(format!("{file}: has a thread-local; pass a context as an argument instead"));
            }
        }
    }
    edges(root, crates, &mut broken)?;
    unused_public_items(root, crates, &mut broken)?;
    broken.extend(standalone::broken(root, crates)?);
    Ok(broken)
}

/// Lines of a file without its inline test modules.
fn lines(module: &Module) -> usize {
    let tests = module.syntax.items.iter().filter_map(|item| match item {
        syn::Item::Mod(tests) if syntax::is_test(&tests.attrs) => {
            let span = tests.span();
            Some(span.end().line - span.start().line + 1)
        }
        _ => None,
    });
    module.text.lines().count().saturating_sub(tests.sum())
}

fn circles(krate: &Crate, broken: &mut Vec<String>) {
    for circle in graph::sibling_circles(krate, &graph::imports(krate)) {
        let children = circle.children.join(", ");
        broken.push(format!("{}: import circle in `{}` between {children}", krate.name, circle.parent));
        broken.extend(circle.examples.iter().map(|example| format!("    {example}")));
    }
}

fn edges(root: &Path, crates: &[Crate], broken: &mut Vec<String>) -> anyhow::Result<()> {
    let host = root.join("host");
    for krate in crates.iter().filter(|krate| krate.dir.starts_with(&host)) {
        let package = krate.name.trim_end_matches(" (bin)");
        let allowed = EDGES.iter().find(|(name, _)| *name == package).map_or(&[][..], |(_, to)| *to);
        let manifest = fs::read_to_string(krate.dir.join("Cargo.toml"))?;
        for dependency in dependencies(&manifest) {
            if dependency.starts_with("pointsman-") && !allowed.contains(&dependency) {
                broken.push(format!("{}: must not depend on {dependency}", krate.name));
            }
        }
    }
    Ok(())
}

/// Names in the `[dependencies]` table of a manifest.
fn dependencies(manifest: &str) -> Vec<&str> {
    let lines = manifest.lines().skip_while(|line| *line != "[dependencies]").skip(1);
    let table = lines.take_while(|line| !line.starts_with('['));
    table.filter_map(|line| line.split(['.', ' ', '=']).next()).filter(|name| !name.is_empty()).collect()
}

/// Public items of the binary crate that no other crate, test or bench names, and no other public item
/// mentions.
fn unused_public_items(root: &Path, crates: &[Crate], broken: &mut Vec<String>) -> anyhow::Result<()> {
    let own = root.join("host/gateway/src");
    let mut names = BTreeSet::new();
    let mut files = Vec::new();
    for dir in ["host", "tests", "xtask"] {
        rust_files(&root.join(dir), &mut files)?;
    }
    for file in files.iter().filter(|file| !file.starts_with(&own) || file.ends_with("src/main.rs")) {
        let text = fs::read_to_string(file)?;
        let words = text.split(|character: char| !character.is_alphanumeric() && character != '_');
        names.extend(words.map(str::to_owned));
    }
    for krate in crates.iter().filter(|krate| krate.name == "pointsman-gateway") {
        names.extend(krate.modules.iter().flat_map(|module| syntax::public_mentions(&module.syntax)));
        for module in &krate.modules {
            for item in syntax::public_items(&module.syntax) {
                if !names.contains(&item) {
                    let file = shown(root, &module.file);
                    broken.push(format!("{file}: `{item}` is public, but no other crate uses it"));
                }
            }
        }
    }
    Ok(())
}
