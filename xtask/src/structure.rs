//! Checks the module rules of ARCHITECTURE.md, and the crates of each program. Parses the sources and asks
//! cargo for packages and dependency trees; builds nothing.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::sh;

mod circles;
mod programs;

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
    (
        "lab-cli",
        "cli embedded-policies endpoint-picker guest-build http-client lab policy-runtime rig sim tokens workers",
    ),
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
const THREAD_LOCALS: [&str; 2] = ["host/policy-runtime/src/", "host/routing/src/buffers.rs"];
/// Maximum number of lines of a file, without tests.
const MAX_FILE_LINES: usize = 400;
/// Largest width of a comment, columns; rustfmt does not wrap comments.
const MAX_COMMENT_COLUMNS: usize = 110;
/// Words that files of `crates/` must not contain: other projects can take this code.
const WORDS: [&str; 2] = ["pointsman", "gateway"];

/// What `cargo metadata` tells about a package.
#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    dependencies: Vec<Dependency>,
    targets: Vec<Target>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    /// `dev` or `build`; `None` for a normal dependency.
    kind: Option<String>,
    /// Directory of a package of this repository.
    path: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    kind: Vec<String>,
    src_path: PathBuf,
}

/// Checks every rule; prints each one that is broken, and the number of crates of each program.
pub(crate) fn check() -> anyhow::Result<()> {
    let root = sh::root().canonicalize()?;
    let mut broken = Vec::new();
    for package in packages()? {
        broken.extend(edges(&root, &package));
        let others = ["test", "bench", "example", "custom-build"];
        let is_code = |target: &&Target| !target.kind.iter().any(|kind| others.contains(&kind.as_str()));
        for target in package.targets.iter().filter(is_code) {
            broken.extend(circles::broken(&package.name, &target.src_path)?);
        }
    }
    for file in
        [".rs", ".toml", ".md"].into_iter().map(sh::tracked_files).collect::<Result<Vec<_>, _>>()?.concat()
    {
        // A file that was removed is still in the list until the removal is staged.
        if let Ok(text) = std::fs::read_to_string(root.join(&file)) {
            broken.extend(
                problems(&file, &text).into_iter().map(|problem| format!("{}: {problem}", file.display())),
            );
        }
    }
    broken.extend(programs::broken()?);
    broken.iter().for_each(|line| sh::print(line));
    ensure!(broken.is_empty(), "the source tree breaks {} module rules; see ARCHITECTURE.md", broken.len());
    sh::print("module rules: all hold");
    Ok(())
}

fn packages() -> anyhow::Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let mut cargo = sh::cargo();
    let output = sh::output(cargo.args(["metadata", "--no-deps", "--format-version", "1", "--locked"]))?;
    let metadata: Metadata = serde_json::from_str(&output).context("the output of `cargo metadata`")?;
    Ok(metadata.packages)
}

/// Returns the dependencies that a package of `host` or of `crates` must not have.
fn edges(root: &Path, package: &Package) -> Vec<String> {
    let own = |name: &str| name.strip_prefix("pointsman-").map(str::to_owned);
    let allowed =
        EDGES.iter().find(|(name, _)| Some(*name) == own(&package.name).as_deref()).map_or("", |(_, to)| *to);
    let is_wrong = |dependency: &&Dependency| {
        if package.manifest_path.starts_with(root.join("crates")) {
            return dependency.path.as_ref().is_some_and(|path| !path.starts_with(root.join("crates")));
        }
        let is_of_host = package.manifest_path.starts_with(root.join("host")) && dependency.kind.is_none();
        is_of_host
            && own(&dependency.name).is_some_and(|name| !allowed.split_whitespace().any(|one| one == name))
    };
    let wrong = package.dependencies.iter().filter(is_wrong);
    wrong.map(|dependency| format!("{}: must not depend on {}", package.name, dependency.name)).collect()
}

/// Returns the problems in the text of a file. `file` is relative to the root of the repository.
fn problems(file: &Path, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let is_code = file.extension().is_some_and(|end| end == "rs");
    let is_test = file.iter().any(|part| part == "tests" || part == "tests.rs" || part == "benches");
    // An inline module of tests is the last item of its file.
    let lines = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default().lines().count();
    if is_code && !is_test && lines > MAX_FILE_LINES {
        problems.push(format!("{lines} lines, limit {MAX_FILE_LINES}"));
    }
    problems.extend(is_code.then(|| wide_comments(text)).into_iter().flatten());
    let may_have_thread_locals =
        THREAD_LOCALS.iter().any(|allowed| file.to_string_lossy().starts_with(allowed));
    if is_code && file.starts_with("host") && !may_have_thread_locals && text.contains("thread_local!") {
        problems.push("has a thread-local; pass a context as an argument instead".to_owned());
    }
    // Directories between the crate's own directory and the file.
    let Some(depth) = file.strip_prefix("crates").ok().and_then(|file| file.iter().count().checked_sub(2))
    else {
        return problems;
    };
    let lower = text.to_lowercase();
    let words = WORDS.into_iter().filter(|word| lower.contains(word));
    problems.extend(words.map(|word| format!("contains `{word}`; it has to make sense without the gateway")));
    let ups = |path: &str| {
        Path::new(path).components().take_while(|part| matches!(part, Component::ParentDir)).count()
    };
    let paths =
        text.split('"').filter(|part| part.starts_with("../") && !part.contains('\n') && ups(part) > depth);
    problems.extend(paths.map(|path| format!("reads {path}, which is outside of the crate")));
    problems
}

/// Returns the comments that are too wide. A URL cannot be wrapped.
fn wide_comments(text: &str) -> impl Iterator<Item = String> {
    let comments = (1..).zip(text.lines()).filter(|(_, line)| line.trim_start().starts_with("//"));
    let counted = comments.filter(|(_, line)| !line.contains("://"));
    let counted = counted.map(|(number, line)| (number, line.chars().count()));
    let wide = counted.filter(|(_, columns)| *columns > MAX_COMMENT_COLUMNS);
    wide.map(|(number, columns)| {
        format!("line {number}: a comment of {columns} columns, limit {MAX_COMMENT_COLUMNS}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(text: &str) -> Package {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn dependencies_that_the_rules_forbid_are_found() {
        let found = |dir: &str, name: &str, dependency: &str| {
            let text = format!(
                r#"{{"name": "{name}", "manifest_path": "/r/{dir}/Cargo.toml", "targets": [], "dependencies": [{dependency}]}}"#
            );
            !edges(Path::new("/r"), &package(&text)).is_empty()
        };
        let workers = r#"{"name": "pointsman-workers", "kind": null, "path": "/r/host/workers"}"#;
        let gateway = r#"{"name": "pointsman-gateway", "kind": null, "path": "/r/host/gateway"}"#;
        assert!(!found("host/routing", "pointsman-routing", workers));
        assert!(found("host/routing", "pointsman-routing", gateway));
        assert!(found("host/sim", "pointsman-sim", workers));
        assert!(!found("host/sim", "pointsman-sim", &workers.replace("null", "\"dev\"")));
        // A crate of `crates/` depends on no other package of the repository, not even for its tests.
        assert!(found("crates/sse", "sse", &workers.replace("null", "\"dev\"")));
        assert!(!found("crates/sse", "sse", r#"{"name": "zmtp", "kind": null, "path": "/r/crates/zmtp"}"#));
    }

    #[test]
    fn long_files_thread_locals_and_words_of_the_gateway_are_found() {
        let problems = |file: &str, text: &str| problems(Path::new(file), text);
        let long = "\n".repeat(401);
        assert_eq!(problems("host/a/src/b.rs", &long), ["401 lines, limit 400"]);
        assert!(problems("host/a/src/b/tests.rs", &long).is_empty());
        assert!(
            problems("host/a/src/b.rs", &format!("fn a() {{}}\n\n#[cfg(test)]\nmod tests {{{long}}}"))
                .is_empty()
        );
        assert_eq!(problems("host/a/src/b.rs", "thread_local! {}").len(), 1);
        assert!(problems("host/routing/src/buffers.rs", "thread_local! {}").is_empty());
        let word = ["contains `gateway`; it has to make sense without the gateway"];
        assert_eq!(problems("crates/sse/src/lib.rs", "// The Gateway's index.\n"), word);
        assert_eq!(problems("crates/sse/Cargo.toml", "name = \"pointsman-x\"").len(), 1);
        assert!(problems("crates/sse/src/lib.rs", "include_str!(\"../README.md\")").is_empty());
        assert!(problems("crates/sse/src/a/tests.rs", "include_bytes!(\"../../fixtures/x\")").is_empty());
        let outside = ["reads ../../../fixtures/x, which is outside of the crate"];
        assert_eq!(problems("crates/sse/src/a/tests.rs", "include_bytes!(\"../../../fixtures/x\")"), outside);
    }

    #[test]
    fn wide_comments_are_found_with_their_place_and_urls_may_be_long() {
        let wide = "x".repeat(110);
        let text = format!("let a = \"{wide}\";\n// {wide}\n// https://{wide}\n// {}\n", "é".repeat(107));
        assert_eq!(wide_comments(&text).collect::<Vec<_>>(), ["line 2: a comment of 113 columns, limit 110"]);
    }
}
