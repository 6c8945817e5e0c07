//! `check-config`: lists every problem of a configuration, or summarizes it if there are no problems.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use pointsman_cli::escaped;

use super::{ServeArgs, print};
use crate::{
    config::{Config, ConfigErrors, Environment},
    daemon,
};

/// The arguments of `serve`; the file may also be given without a flag.
#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// TOML configuration.
    #[arg(conflicts_with = "config", value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    serve: ServeArgs,
}

impl CheckArgs {
    pub(super) fn run(mut self) -> anyhow::Result<ExitCode> {
        self.serve.config = self.file.take().or(self.serve.config);
        let (path, serve) = (self.serve.config.clone(), self.serve);
        let loaded = Config::load_with_problems(path.as_deref(), &Environment::of_process(), |config| {
            serve.overrule(config)
        });
        let (config, problems) = match loaded {
            Ok(loaded) => loaded,
            Err(errors) => return report(&errors, None),
        };
        let found = daemon::check(&config, problems)?;
        if found.problems.problems.is_empty() {
            show("warning: ", &found.warnings)?;
            return summarize(&config);
        }
        report(&found.problems, Some(&found.warnings))
    }
}

/// Writes problems and warnings, each on its own line, and their number.
fn report(problems: &ConfigErrors, warnings: Option<&ConfigErrors>) -> anyhow::Result<ExitCode> {
    show("", problems)?;
    if let Some(warnings) = warnings {
        show("warning: ", warnings)?;
    }
    let count = problems.problems.len();
    let noun = if count == 1 { "problem" } else { "problems" };
    writeln!(std::io::stderr(), "pointsman: {count} {noun}")?;
    Ok(ExitCode::from(2))
}

fn show(prefix: &str, errors: &ConfigErrors) -> std::io::Result<()> {
    let mut out = std::io::stderr().lock();
    for problem in &errors.problems {
        writeln!(out, "{prefix}{}", escaped(&errors.shown(problem)))?;
    }
    Ok(())
}

fn summarize(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = format!(
        "listen {}\nadmin {}\nenforce_disagg {}\npolicies {}\n",
        config.server.listen,
        config.server.admin_listen,
        config.routing.enforce_disagg,
        config.policies.dir.as_deref().unwrap_or(Path::new("(built-in only)")).display(),
    );
    for worker in &config.workers {
        text.push_str(&format!("worker {} {} {} {}\n", worker.id, worker.role, worker.engine, worker.url));
    }
    print(&(text + "ok\n"))?;
    Ok(ExitCode::SUCCESS)
}
