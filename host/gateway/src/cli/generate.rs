//! Completions and manual pages, made from the definitions of the command line.

use std::{path::Path, process::ExitCode};

use anyhow::Context as _;
use clap::CommandFactory as _;

use super::{Cli, print};

pub(super) fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "pointsman", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn manual_pages(dir: &Path) -> anyhow::Result<ExitCode> {
    let written = std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
    written.with_context(|| format!("cannot write the manual pages to `{}`", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}
