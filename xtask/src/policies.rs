//! `policies`: builds every policy of the tree into a component. `--all`: those in Python and JavaScript too.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::Context as _;
use pointsman_guest_build::{GuestBuild, Project};
use sha2::{Digest, Sha256};

use crate::{setup, sh};

/// Folders of policies in languages whose tools are not Rust's.
pub(crate) const LANGUAGES: [&str; 2] = ["python", "js"];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the components [default: target/policies].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Those in Python and JavaScript too: needs python3 and npm, and installs their tools under target/ on first use.
    #[arg(long)]
    all: bool,
}

/// Builds each folder of policies/ that has a policy.toml.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let out = args.out.clone().unwrap_or_else(|| sh::root().join("target/policies"));
    for name in projects(&sh::root().join("policies"))? {
        let bytes = GuestBuild::new(&sh::root(), &format!("policy-{name}")).build()?;
        store(&out, &name, &bytes)?;
    }
    if args.all {
        scripts(&out)?;
    }
    Ok(())
}

/// Builds the policies in Python and JavaScript and answers where they are: folder of the source, component.
pub(crate) fn scripts(out: &Path) -> anyhow::Result<Vec<(PathBuf, PathBuf)>> {
    let mut built = Vec::new();
    let tools = sh::root().join("target/langs");
    for language in LANGUAGES {
        let folder = sh::root().join("policies").join(language);
        for name in projects(&folder)? {
            let source = folder.join(&name);
            let begun = Instant::now();
            let project = Project::open(&source, Some(&tools))?;
            let component = project.build()?;
            let path = store(out, &format!("{language}-{name}"), &component.bytes)?;
            sh::tell(&format!("built in {:.1} s", begun.elapsed().as_secs_f64()));
            built.push((source, path));
        }
    }
    Ok(built)
}

fn projects(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.path().join("policy.toml").is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn store(out: &Path, name: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    let path = out.join(format!("{name}.wasm"));
    std::fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    let digest: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    sh::print(&format!("{name:<20} {:>8} bytes  sha256 {digest}", bytes.len()));
    Ok(path)
}
