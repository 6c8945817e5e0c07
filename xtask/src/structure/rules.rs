//! The rules: crate edges, no circles between siblings, no thread-locals, file sizes.
//! The rules for `crates/` are in [`super::standalone`].

use std::path::Path;

use syn::spanned::Spanned as _;

use super::{
    graph,
    modules::{Crate, Module},
    shown, standalone, syntax,
};

/// Names, without `pointsman-`, of the crates of this product that each crate of `host` may depend on. A
/// crate that is missing here may depend on none of them.
const EDGES: &[(&str, &str)] = &[
    (
        "gateway",
        "admin-cli certificates cli config-file decision-log discovery embedded-policies \
         endpoint-picker http-client orchestration policy-admin policy-runtime replicas routing tokens workers",
    ),
    (
        "policy-tools",
        "admin-cli cli embedded-policies guest-build http-client policy-admin policy-cases policy-runtime routing \
         workers",
    ),
    (
        "lab",
        "cli config-file decision-log embedded-policies orchestration policy-runtime replicas routing \
         sim workers",
    ),
    ("lab-cli", "cli embedded-policies guest-build http-client lab policy-runtime rig sim tokens workers"),
    ("admin-cli", "cli http-client"),
    ("config-file", "config-derive"),
    ("discovery", "http-client workers"),
    ("orchestration", "routing workers"),
    ("policy-admin", "admin-cli cli policy-runtime"),
    ("policy-runtime", "formula routing workers"),
    ("replicas", "orchestration routing workers"),
    ("routing", "workers"),
    ("tools", "admin-cli cli import"),
];

/// Files of `host` that may use thread-locals, for a buffer pool or a handler of the platform.
const THREAD_LOCALS: &[&str] = &["host/policy-runtime/src/", "host/routing/src/buffers.rs"];

/// Maximum number of lines of a file, without tests.
const MAX_FILE_LINES: usize = 400;

/// Returns every broken rule, as a line for the user.
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
    edges(root, crates, &mut broken);
    broken.extend(standalone::broken(root, crates)?);
    Ok(broken)
}

/// Returns the number of lines of a file without its inline test modules.
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

fn edges(root: &Path, crates: &[Crate], broken: &mut Vec<String>) {
    let own = |name: &str| name.strip_prefix("pointsman-").map(str::to_owned);
    for krate in crates.iter().filter(|krate| krate.dir.starts_with(root.join("host"))) {
        let package = own(krate.package());
        let allowed = EDGES.iter().find(|(name, _)| Some(*name) == package.as_deref());
        let allowed: Vec<&str> = allowed.map_or("", |(_, to)| *to).split_whitespace().collect();
        for dependency in krate.dependencies(&["dependencies"]).filter_map(own) {
            if !allowed.contains(&dependency.as_str()) {
                broken.push(format!("{}: must not depend on pointsman-{dependency}", krate.name));
            }
        }
    }
}
