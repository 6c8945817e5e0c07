//! Running commands, and saying what is done.

use std::{io::Write as _, path::PathBuf, process::Command};

use anyhow::{Context as _, bail};

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The cargo that runs us.
pub(crate) fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// Runs a command to its end; its output is ours.
pub(crate) fn run(command: &mut Command) -> anyhow::Result<()> {
    let shown = show(command);
    tell(&format!("$ {shown}"));
    let status = command.status().with_context(|| format!("could not run `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Whether a command can be run and succeeds; its output is swallowed.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The commit of the workspace, or nothing outside a clone.
pub(crate) fn commit() -> String {
    let head = Command::new("git").args(["rev-parse", "--short", "HEAD"]).current_dir(root()).output();
    head.map(|head| String::from_utf8_lossy(&head.stdout).trim().to_owned()).unwrap_or_default()
}

/// A line to the person at the terminal.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// A line of the result.
pub(crate) fn print(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A live bar.
pub(crate) fn progress(count: u64, what: &str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(count);
    let style = indicatif::ProgressStyle::with_template("{msg:>10} {bar:40} {pos}/{len} {elapsed}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar.set_message(what.to_owned());
    bar
}

fn show(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let words =
        std::iter::once(name).chain(command.get_args()).map(|word| word.to_string_lossy().into_owned());
    words.collect::<Vec<_>>().join(" ")
}
