//! `config`: the schema of the configuration, an example, and the values in force.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Subcommand};

use super::{ServeArgs, print};
use crate::config::{Config, Environment};

/// The page that describes every key. Its first block of TOML is the example.
const PAGE: &str = include_str!("../../../../docs/configuration.md");

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
            Self::Schema => print(&format!("{}\n", schema()?))?,
            Self::Example => print(example().context("the example is missing from docs/configuration.md")?)?,
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

fn schema() -> anyhow::Result<String> {
    let mut schema = schemars::schema_for!(Config);
    schema.insert("title".to_owned(), "Configuration of pointsman".into());
    Ok(serde_json::to_string_pretty(&schema)?)
}

/// The first block of TOML on the page.
fn example() -> Option<&'static str> {
    let (_, after) = PAGE.split_once("```toml\n")?;
    Some(after.split_once("```")?.0)
}
