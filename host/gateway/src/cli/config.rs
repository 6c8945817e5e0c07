//! `config`: the schema of the configuration, an example, and the values in force.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use pointsman_config_file::reference;

use super::{ServeArgs, print};
use crate::config::{Config, Environment};

/// The subcommands of `config`.
#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Print the JSON Schema of the configuration file, for editors and checks.
    Schema,
    /// Print an example with every key, its default and what it does.
    Example,
    /// Print the values that `serve` would use, each with where it comes from: the file, an environment
    /// variable, a flag or the default. Secrets are hidden.
    Show(Box<ShowArgs>),
}

/// Arguments of `config show`: those of `serve`.
#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Print a JSON array of path, value and source.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    serve: ServeArgs,
}

impl ConfigCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Schema => print(&format!("{}\n", serde_json::to_string_pretty(&schema())?))?,
            Self::Example => print(&reference::example(&Config::schema()))?,
            Self::Show(args) => return args.run(),
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl ShowArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let serve = self.serve;
        let environment = Environment::of_process();
        let config = Config::load(serve.config.as_deref(), &environment, |config| serve.overrule(config))?;
        let shown = config.shown()?;
        let text =
            if self.json { serde_json::to_string_pretty(&shown.values())? + "\n" } else { shown.to_string() };
        print(text.trim_start_matches('\n'))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The schema without the parts that only the reference needs.
fn schema() -> serde_json::Value {
    let mut schema = Config::schema();
    reference::strip(&mut schema);
    schema
}
