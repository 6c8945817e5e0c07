//! The crates of `crates/`: code that other projects can take. These crates depend only on each other and on
//! third-party crates, read no file outside of their directories, and do not name the gateway.

use std::{
    collections::BTreeSet,
    fs,
    path::{Component, Path},
};

use super::{
    modules::{Crate, rust_files},
    shown,
};

/// Directory of these crates.
const FOLDER: &str = "crates";
/// Tables of a manifest that name other crates.
const DEPENDENCIES: [&str; 3] = ["dependencies", "dev-dependencies", "build-dependencies"];
/// Words that their files must not contain.
const WORDS: [&str; 2] = ["pointsman", "gateway"];

/// Returns every broken rule, as a line for the user.
pub(super) fn broken(root: &Path, crates: &[Crate]) -> anyhow::Result<Vec<String>> {
    let folder = root.join(FOLDER);
    let (own, others): (Vec<_>, Vec<_>) = crates.iter().partition(|krate| krate.dir.starts_with(&folder));
    let others: BTreeSet<&str> = others.iter().map(|krate| krate.package()).collect();
    let mut broken = Vec::new();
    for krate in own {
        let manifest = krate.dir.join("Cargo.toml");
        let wrong = krate.dependencies(&DEPENDENCIES).filter(|name| others.contains(name));
        broken.extend(wrong.map(|name| format!("{}: must not depend on {name}", krate.name)));
        let mut files = Vec::new();
        rust_files(&krate.dir, &mut files)?;
        files.extend([manifest, krate.dir.join("README.md")]);
        for file in files {
            let name = shown(root, &file);
            let Ok(text) = fs::read_to_string(&file) else {
                broken.push(format!("{name}: is missing"));
                continue;
            };
            let inside = file.strip_prefix(&krate.dir).unwrap_or(&file);
            broken.extend(problems(inside, &text).into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    Ok(broken)
}

/// Returns the problems in the text of a file of such a crate.
fn problems(file: &Path, text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let words = WORDS.into_iter().filter(|word| lower.contains(word));
    let mut problems: Vec<String> =
        words.map(|word| format!("contains `{word}`; it has to make sense without the gateway")).collect();
    // Number of directories between the crate's own directory and the file.
    let depth = file.parent().map_or(0, |parent| parent.components().count());
    let leaves = |path: &&str| {
        let ups = Path::new(path).components().take_while(|part| matches!(part, Component::ParentDir));
        ups.count() > depth
    };
    let paths = text.split('"').filter(|part| part.starts_with("../") && !part.contains('\n')).filter(leaves);
    problems.extend(paths.map(|path| format!("reads {path}, which is outside of the crate")));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_gateway_and_files_of_others_are_found() {
        let problems = |file: &str, text: &str| problems(Path::new(file), text);
        assert_eq!(
            problems("src/lib.rs", "// The Gateway's index.\n"),
            ["contains `gateway`; it has to make sense without the gateway"]
        );
        assert_eq!(problems("Cargo.toml", "name = \"pointsman-x\"").len(), 1);
        assert!(problems("src/lib.rs", "include_str!(\"../README.md\")").is_empty());
        assert!(problems("src/a/tests.rs", "include_bytes!(\"../../fixtures/x\")").is_empty());
        assert_eq!(
            problems("src/a/tests.rs", "include_bytes!(\"../../../fixtures/x\")"),
            ["reads ../../../fixtures/x, which is outside of the crate"]
        );
    }

    #[test]
    fn a_crate_that_depends_on_the_host_is_found() {
        let root = tempfile::TempDir::new().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("host/a/Cargo.toml", "[package]\nname = \"own-a\"\n");
        write("host/a/src/main.rs", "fn main() {}\n");
        for (name, table) in [
            ("b", "dev-dependencies]\nown-a.workspace = true"),
            ("c", "build-dependencies.own-a]\npath = \"x\""),
            ("d", "target.'cfg(unix)'.dependencies]\nown-a = \"1\" # own"),
            ("e", "dependencies]\n# own-a = 1"),
        ] {
            write(&format!("crates/{name}/Cargo.toml"), &format!("[package]\nname = \"{name}\"\n[{table}\n"));
            write(&format!("crates/{name}/src/lib.rs"), "pub fn f() {}\n");
            write(&format!("crates/{name}/README.md"), "A crate.\n");
        }
        fs::remove_file(root.path().join("crates/e/README.md")).unwrap();
        let crates = crate::structure::modules::crates(root.path()).unwrap();
        let expected = ["b", "c", "d"].map(|name| format!("{name}: must not depend on own-a"));
        let expected = [&expected[..], &["crates/e/README.md: is missing".to_owned()]].concat();
        assert_eq!(broken(root.path(), &crates).unwrap(), expected);
    }
}
