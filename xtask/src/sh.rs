//! Runs external commands and writes to the terminal.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail, ensure};
pub(crate) use pointsman_rig::terminal::{print, status};

/// Returns the root directory of the workspace.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns a command for the cargo that runs this program, in the workspace's root.
///
/// The variables that `cargo run` sets for xtask are removed. Otherwise build scripts that read them would
/// run again, and a hundred crates would be compiled again, when cargo is called first by xtask and then
/// directly.
pub(crate) fn cargo() -> Command {
    without_cargo_variables(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())))
}

/// Returns a command in the workspace's root that may call cargo; [`cargo`] says why.
pub(crate) fn without_cargo_variables(mut command: Command) -> Command {
    let of_xtask = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_xtask)) {
        command.env_remove(name);
    }
    command.current_dir(root());
    command
}

/// Runs a command until it ends, with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    status(&format!("$ {shown}"));
    let ended = command.status().with_context(|| format!("could not start `{shown}`"))?;
    if !ended.success() {
        bail!("`{shown}` ended with {ended}");
    }
    Ok(())
}

/// Runs a command until it ends and returns its standard output. An error has the standard error.
pub(crate) fn output(command: &mut Command) -> anyhow::Result<String> {
    let shown = show(command);
    let output = command.output().with_context(|| format!("could not start `{shown}`"))?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{shown}` failed: {}", problem.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a command can be started and succeeds. Its output is discarded.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Whether a program is in PATH.
pub(crate) fn is_installed(program: &str) -> bool {
    succeeds(Command::new("sh").args(["-c", "command -v \"$0\"", program]))
}

/// Returns a program of a virtual environment. If the program is missing, creates the environment and
/// installs wheels of these packages.
pub(crate) fn venv_program(venv: &Path, program: &str, packages: &[&str]) -> anyhow::Result<PathBuf> {
    let found = venv.join("bin").join(program);
    if !found.is_file() {
        run(Command::new("python3").args(["-m", "venv"]).arg(venv))?;
        let mut pip = Command::new(venv.join("bin/pip"));
        run(pip.args(["install", "--quiet", "--only-binary", ":all:"]).args(packages))?;
    }
    Ok(found)
}

/// Returns the files that git tracks and whose names have this ending, relative to the root of the
/// repository.
pub(crate) fn tracked_files(ending: &str) -> anyhow::Result<Vec<PathBuf>> {
    let names = output(Command::new("git").args(["ls-files", "-z"]).current_dir(root()))?;
    Ok(names.split('\0').filter(|name| name.ends_with(ending)).map(PathBuf::from).collect())
}

/// Shows a progress bar.
pub(crate) fn progress(count: u64, what: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(count);
    let style = indicatif::ProgressStyle::with_template("{msg:>10} {bar:40} {pos}/{len} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar.set_message(what.to_owned());
    bar
}

fn show(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let parts =
        std::iter::once(name).chain(command.get_args()).map(|part| part.to_string_lossy().into_owned());
    parts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{show, tracked_files};

    #[test]
    fn commands_are_shown_without_their_directory() {
        assert_eq!(show(Command::new("/usr/bin/cargo").args(["test", "--locked"])), "cargo test --locked");
    }

    #[test]
    fn tracked_files_are_relative_to_the_root() {
        assert!(tracked_files(".rs").unwrap().contains(&"xtask/src/sh.rs".into()));
    }
}
