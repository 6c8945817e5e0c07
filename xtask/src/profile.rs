//! Counts how often each branch of the gateway is taken while it serves the scenarios of `bench gateway`.
//! When `package` builds a release, the compiler uses these counts to lay out the hot path (profile-guided
//! optimisation).

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::{bench::gateway, fleet, setup, sh};

/// Directories and files that the gateway is built from.
const SOURCES: [&str; 6] = ["crates", "host", "policies", "wit", "Cargo.toml", "Cargo.lock"];

/// Builds the gateway with counters, sends requests to it, and writes the counts to a file in the target
/// directory. Returns the path of the file. Only builds with the same profile can use the counts.
pub(crate) async fn count(profile: &str) -> anyhow::Result<PathBuf> {
    let merge = profdata_tool()?;
    let sources = sources()?;
    setup::run()?;
    fs::create_dir_all(fleet::target_dir())?;
    let target = fleet::target_dir().canonicalize()?;
    let output = target.join("pointsman.profdata");
    let (build, counts) = (target.join("profile-build"), target.join("profile-build/counts"));
    let mut cargo = sh::cargo();
    cargo.args(["build", "--locked", "--profile", profile]);
    cargo.args(["--package", "pointsman-gateway", "--package", "pointsman-sim"]);
    cargo.env("CARGO_TARGET_DIR", &build);
    cargo.env("CARGO_ENCODED_RUSTFLAGS", format!("-Cprofile-generate={}", counts.display()));
    sh::run(&mut cargo)?;
    // Build scripts and macros also write counts.
    if counts.exists() {
        fs::remove_dir_all(&counts).with_context(|| format!("removing {}", counts.display()))?;
    }
    gateway::serve_all(&build.join(profile)).await?;
    let files: Vec<PathBuf> = fs::read_dir(&counts)
        .with_context(|| format!("the gateway wrote no counts to {}", counts.display()))?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    ensure!(!files.is_empty(), "the gateway wrote no counts to {}", counts.display());
    sh::run(Command::new(merge).args(["merge", "--sparse", "-o"]).arg(&output).args(files))?;
    fs::write(sources_file(&output), sources.join(""))?;
    Ok(output)
}

/// Checks that the counts in `file` belong to the checked-out commit. The compiler ignores the counts of a
/// function if its code, or the code of a function inlined into it, has changed since.
///
/// # Errors
/// The counts belong to other sources, or their sources are not known.
pub(crate) fn check(file: &Path) -> anyhow::Result<()> {
    let [committed, _] = sources()?;
    check_sources(file, &committed)
}

fn check_sources(file: &Path, wanted: &str) -> anyhow::Result<()> {
    let beside = sources_file(file);
    let counted = fs::read_to_string(&beside).with_context(|| {
        format!("--profile-data: reading {}, which `cargo xtask package` writes", beside.display())
    })?;
    ensure!(
        counted == wanted,
        "--profile-data: the counts in {} are of other sources than those of this commit; leave the option out to count \
         again, without changed files",
        file.display()
    );
    Ok(())
}

/// Returns the path of the file beside the counts that names the sources.
pub(crate) fn sources_file(counts: &Path) -> PathBuf {
    counts.with_added_extension("sources")
}

/// Returns the sources as git's hash of each, and the files that differ from the commit.
fn sources() -> anyhow::Result<[String; 2]> {
    let committed = SOURCES.map(|path| format!("HEAD:{path}"));
    let hashes = git(&["rev-parse"], &committed)?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no", "--"], &SOURCES.map(str::to_owned))?;
    Ok([hashes, changed])
}

fn git(arguments: &[&str], paths: &[String]) -> anyhow::Result<String> {
    let output = Command::new("git").args(arguments).args(paths).current_dir(sh::root()).output();
    let output = output.context("could not start git, which names the sources")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`git {}` failed: {}", arguments.join(" "), problem.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the path of the compiler's tool that merges counts.
fn profdata_tool() -> anyhow::Result<PathBuf> {
    let printed = Command::new("rustc").args(["--print", "target-libdir"]).current_dir(sh::root()).output();
    let printed = printed.context("could not start rustc")?;
    let libraries = String::from_utf8_lossy(&printed.stdout).trim().to_owned();
    let tool = Path::new(&libraries).with_file_name("bin").join("llvm-profdata");
    ensure!(tool.is_file(), "llvm-profdata is missing; install it with `rustup component add llvm-tools`");
    Ok(tool)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_other_sources_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.profdata");
        let problem = |wanted| check_sources(&file, wanted).map_err(|error| format!("{error:#}"));
        let missing = problem("s").unwrap_err();
        assert!(missing.contains("a.profdata.sources, which `cargo xtask package` writes"), "{missing}");
        fs::write(sources_file(&file), "s").unwrap();
        assert_eq!(problem("s"), Ok(()));
        let other = problem("t").unwrap_err();
        assert!(other.contains("are of other sources") && other.contains("count again"), "{other}");
    }

    #[test]
    fn sources_are_named_by_their_hashes() {
        let [committed, _] = sources().unwrap();
        assert!(committed.lines().count() == SOURCES.len(), "{committed}");
        assert!(committed.lines().all(|hash| hash.len() == 40), "{committed}");
    }
}
