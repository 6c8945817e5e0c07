//! Completions and manual pages, made from the definitions of the command line.

use std::{path::Path, process::ExitCode};

use clap::CommandFactory as _;
use pointsman_cli::{completions as complete, manual_pages as pages};

use super::{Cli, programs};

pub(super) fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    complete(shell, programs::with_their_commands(Cli::command())?)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn manual_pages(dir: &Path) -> anyhow::Result<ExitCode> {
    pages(Cli::command(), "pointsman", dir)?;
    // Its page of `policy` has all commands of that name: it replaces ours.
    programs::manual_pages(dir)?;
    Ok(ExitCode::SUCCESS)
}
