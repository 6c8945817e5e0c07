//! Completions and manual pages, made from the definitions of the command line.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::{Command, Subcommand};
use clap_complete::Shell;

use crate::{print, tree::CommandTree};

/// Commands of the programs besides `pointsman`. `pointsman completions` and `pointsman man` run them.
#[derive(Debug, Subcommand)]
pub enum ToolCommand {
    /// Write the manual pages of the commands.
    #[command(hide = true)]
    Man {
        /// Directory for the pages; it is created.
        dir: PathBuf,
    },
    /// Print the commands with their arguments as JSON.
    #[command(hide = true)]
    CommandTree,
}

impl ToolCommand {
    /// Runs the command. `command` is the definition of the program, and `prefix` stands before its commands
    /// when `pointsman` runs them: `pointsman` or `pointsman policy`.
    ///
    /// # Errors
    /// The pages or the text cannot be written.
    pub fn run(self, command: Command, prefix: &'static str) -> anyhow::Result<ExitCode> {
        match self {
            Self::Man { dir } => manual_pages(command, prefix, &dir)?,
            Self::CommandTree => print(&serde_json::to_string(&CommandTree::of(command))?)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Prints the completions of a shell for `pointsman`.
///
/// # Errors
/// Standard output does not take them.
pub fn completions(shell: Shell, mut command: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "pointsman", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Writes the page of a program, and one for each of its commands: `pointsman-compare.1` for the command
/// `pointsman compare` with the prefix `pointsman`.
///
/// # Errors
/// A file cannot be written.
pub fn manual_pages(command: Command, prefix: &'static str, dir: &Path) -> anyhow::Result<()> {
    let program = command.get_name().to_owned();
    let written = fs::create_dir_all(dir).and_then(|()| {
        let mut command =
            command.bin_name(prefix).display_name(prefix.replace(' ', "-")).disable_help_subcommand(true);
        command.build();
        for own in command.get_subcommands().filter(|own| !own.is_hide_set()) {
            clap_mangen::generate_to(own.clone(), dir)?;
        }
        let mut page = Vec::new();
        clap_mangen::Man::new(command).title(&program).render(&mut page)?;
        // Its commands are called by the prefix, but its own name is another one.
        let escaped = |name: &str| format!(".SH NAME\n{} \\- ", name.replace([' ', '-'], "\\-"));
        let page = String::from_utf8_lossy(&page).replacen(&escaped(prefix), &escaped(&program), 1);
        fs::write(dir.join(format!("{program}.1")), page)
    });
    written.with_context(|| format!("cannot write the manual pages to `{}`", dir.display()))
}
