//! Finds the crates of a tree and their module files. It does not know the rules.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

use super::syntax;

/// One library or binary with its modules, without tests.
pub(crate) struct Crate {
    /// Package name; `NAME (bin)` for a binary beside a library.
    pub(crate) name: String,
    /// Directory of the manifest.
    pub(crate) dir: PathBuf,
    manifest: toml::Table,
    /// Every module file; the first is the crate root.
    pub(crate) modules: Vec<Module>,
}

/// One source file.
pub(crate) struct Module {
    /// Path from the crate root: empty for the root itself.
    pub(crate) path: Vec<String>,
    /// The file.
    pub(crate) file: PathBuf,
    /// Its text.
    pub(crate) text: String,
    /// Its syntax tree.
    pub(crate) syntax: syn::File,
}

impl Crate {
    /// Returns the name of the package.
    pub(crate) fn package(&self) -> &str {
        self.name.trim_end_matches(" (bin)")
    }

    /// Returns the names in these tables of the manifest, for every platform.
    pub(crate) fn dependencies(&self, tables: &[&str]) -> impl Iterator<Item = &str> {
        let platforms = self.manifest.get("target").and_then(toml::Value::as_table).into_iter().flatten();
        let platforms = platforms.filter_map(|(_, platform)| platform.as_table());
        let tables = std::iter::once(&self.manifest)
            .chain(platforms)
            .flat_map(|all| tables.iter().filter_map(|name| all.get(*name)?.as_table()).collect::<Vec<_>>());
        tables.flat_map(|table| table.keys().map(String::as_str))
    }
}

/// Returns every crate with a `src` directory below `root`, in the order of their directories.
pub(crate) fn crates(root: &Path) -> anyhow::Result<Vec<Crate>> {
    let mut manifests = Vec::new();
    find_manifests(root, &mut manifests)?;
    manifests.sort();
    let mut crates = Vec::new();
    for manifest in manifests {
        let dir = manifest.parent().unwrap_or(root).to_owned();
        let text = fs::read_to_string(&manifest)?;
        let manifest: toml::Table = text.parse().with_context(|| format!("in {}", manifest.display()))?;
        let name = manifest.get("package").and_then(|package| package.get("name")?.as_str());
        let Some(name) = name.map(str::to_owned) else { continue };
        let roots = [("src/lib.rs", ""), ("src/main.rs", " (bin)")];
        for (file, suffix) in roots.map(|(file, suffix)| (dir.join(file), suffix)) {
            if file.is_file() {
                let mut modules = Vec::new();
                read(&file, Vec::new(), true, &mut modules)?;
                let (name, dir, manifest) = (format!("{name}{suffix}"), dir.clone(), manifest.clone());
                crates.push(Crate { name, dir, manifest, modules });
            }
        }
    }
    Ok(crates)
}

fn find_manifests(dir: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        let skipped = ["target", ".git", "node_modules"].iter().any(|skipped| name == *skipped);
        if entry.file_type()?.is_dir() && !skipped {
            find_manifests(&entry.path(), found)?;
        } else if name == "Cargo.toml" {
            found.push(entry.path());
        }
    }
    Ok(())
}

/// Reads a file, and the files of the modules that it declares.
fn read(file: &Path, path: Vec<String>, root: bool, modules: &mut Vec<Module>) -> anyhow::Result<()> {
    let shown = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    let syntax = syn::parse_file(&text).with_context(|| format!("cannot parse {shown}"))?;
    let declared = syntax::declared_modules(&syntax);
    modules.push(Module { path: path.clone(), file: file.to_owned(), text, syntax });
    let is_mod_rs = file.file_name().is_some_and(|name| name == "mod.rs");
    let dir = if root || is_mod_rs { file.with_file_name("") } else { file.with_extension("") };
    for name in declared {
        let beside = [dir.join(format!("{name}.rs")), dir.join(&name).join("mod.rs")];
        // A module without such a file is generated or has a `path` attribute.
        if let Some(child) = beside.iter().find(|child| child.is_file()) {
            read(child, [path.clone(), vec![name]].concat(), false, modules)?;
        }
    }
    Ok(())
}

/// Finds every Rust file below a directory, including tests.
pub(super) fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() && !path.ends_with("target") {
            rust_files(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(())
}
