//! `policies`: builds every policy of the repository into a component. `--all` includes Python and
//! JavaScript.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::Context as _;
use pointsman_guest_build::{GuestBuild, Project};

use crate::{digest::sha256, fleet, setup, sh};

/// Directories in `policies/` with policies that are not written in Rust.
const LANGUAGES: [&str; 2] = ["python", "js"];
/// Memory of an instance that is enough for both languages, bytes.
const SCRIPT_MEMORY: &str = "67108864";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Directory for the components [default: target/policies].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Also build the policies in Python and JavaScript. Needs python3 and npm; installs tools under target/.
    #[arg(long)]
    all: bool,
    /// Test the policies in Python and JavaScript with the test cases of the equal policies in Rust, and
    /// measure them.
    #[arg(long, requires = "all")]
    test: bool,
}

/// Builds each directory of `policies/` that has a `policy.toml`.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let out = args.out.clone().unwrap_or_else(|| sh::root().join("target/policies"));
    for name in projects(&sh::root().join("policies"))? {
        let bytes = GuestBuild::new(&sh::root(), &format!("policy-{name}")).build()?;
        store(&out, &name, &bytes)?;
    }
    let built = if args.all { scripts(&out)? } else { Vec::new() };
    if args.test { test(&built) } else { Ok(()) }
}

/// Builds the policies in Python and JavaScript; returns each policy's name and component.
fn scripts(out: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut built = Vec::new();
    let tools = sh::root().join("target/langs");
    for language in LANGUAGES {
        let folder = sh::root().join("policies").join(language);
        for name in projects(&folder)? {
            let started = Instant::now();
            let component = Project::open(&folder.join(&name), Some(&tools))?.build()?;
            let path = store(out, &format!("{language}-{name}"), &component.bytes)?;
            sh::status(&format!("built in {:.1} s", started.elapsed().as_secs_f64()));
            built.push((name, path));
        }
    }
    Ok(built)
}

fn test(built: &[(String, PathBuf)]) -> anyhow::Result<()> {
    let program = fleet::build_programs("release", &[fleet::POLICY])?.join(fleet::POLICY.name);
    for (name, component) in built {
        let policy = |command: &str| {
            let mut run = Command::new(&program);
            run.args([command, "--memory-bytes", SCRIPT_MEMORY, "--deadline-ms", "20"]).arg(component);
            run
        };
        let cases = sh::root().join("policies").join(name).join("cases.toml");
        sh::run(policy("test").arg("--cases").arg(cases))?;
        sh::run(policy("bench").args(["--rows", "8,64,512"]))?;
    }
    Ok(())
}

fn projects(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("could not list {}", folder.display()))? {
        let entry = entry?;
        if entry.path().join("policy.toml").is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

fn store(out: &Path, name: &str, bytes: &[u8]) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(out).with_context(|| format!("could not create {}", out.display()))?;
    let path = out.join(format!("{name}.wasm"));
    std::fs::write(&path, bytes).with_context(|| format!("could not write {}", path.display()))?;
    let digest = sha256(bytes);
    sh::print(&format!("{name:<20} {:>8} bytes  sha256 {digest}", bytes.len()));
    Ok(path)
}
