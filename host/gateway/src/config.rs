//! The configuration: a file, as it is written, and validated settings, split into what a reload applies and what only
//! a restart changes.
//!
//! ```text
//! text -> parse -> Config (as written) -> resolve -> Settings { fixed: Static, reloadable: Reloadable }
//! ```
//! Every step reports all problems at once, each with its dotted path and, for a file, its line. The other modules of
//! the gateway use the values from here; this module uses none of theirs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use pointsman_workers::WorkerSpec;
use serde::Deserialize;

mod duration;
mod models;
mod parse;
mod policies;
mod problem;
pub mod reload;
mod resolve;
mod sections;
mod server;
pub mod settings;
mod slots;
#[cfg(test)]
mod tests;

pub use models::{Model, TokenSource};
pub use policies::Policies;
pub use problem::{ConfigErrors, Problem};
pub use sections::{Decisions, Index, LegOrder, Probe, Queue, Routing, Server, Timeouts};
pub use slots::{PartEntry, ScorerEntry, SlotEntry, TrialEntry};

use problem::Lines;
use settings::Settings;

/// The configuration as it is written. Every key has a default; the sections define them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Listeners.
    pub server: Server,
    /// How requests are routed.
    pub routing: Routing,
    /// Where policies come from and what they may use.
    pub policies: Policies,
    /// Prefix index.
    pub index: Index,
    /// Requests that wait while every eligible worker is busy.
    pub queue: Queue,
    /// Record of decisions.
    pub decisions: Decisions,
    /// Time limits.
    pub timeouts: Timeouts,
    /// How workers are probed.
    pub probe: Probe,
    /// Models, by name.
    pub models: BTreeMap<String, Model>,
    /// Workers.
    pub workers: Vec<WorkerSpec>,
    /// Where the values were written.
    #[serde(skip)]
    origin: Origin,
}

/// The file that a configuration came from.
#[derive(Clone, Debug, Default)]
struct Origin {
    file: Option<PathBuf>,
    lines: Lines,
    /// Elements of arrays that could not be read and are missing from the configuration.
    unread: parse::UnreadElements,
}

impl Config {
    /// Reads a file without validating the values.
    ///
    /// # Errors
    /// The file cannot be read or is not TOML, or keys or types are wrong: all problems with their lines.
    pub fn read(path: &Path) -> Result<Self, ConfigErrors> {
        let (config, problems) = parse::read(path)?;
        if problems.is_empty() { Ok(config) } else { Err(config.errors(problems)) }
    }

    /// Reads a file, applies `overrides`, which take precedence over it, and validates the result.
    ///
    /// # Errors
    /// As [`Config::read`], and the problems of [`Config::resolve`] together with them.
    pub fn load(path: Option<&Path>, overrides: impl FnOnce(&mut Self)) -> Result<Self, ConfigErrors> {
        let (mut config, mut problems) = path.map_or_else(|| Ok(<(Self, Vec<_>)>::default()), parse::read)?;
        overrides(&mut config);
        problems.extend(config.invalid_values());
        if problems.is_empty() { Ok(config) } else { Err(config.errors(problems)) }
    }

    /// Validates the values.
    ///
    /// # Errors
    /// All problems.
    pub fn resolve(&self) -> Result<Settings, ConfigErrors> {
        resolve::resolve(self).map_err(|problems| self.errors(problems))
    }

    /// Validates the values, for callers that do not need the settings.
    ///
    /// # Errors
    /// As [`Config::resolve`].
    pub fn check(&self) -> Result<(), ConfigErrors> {
        self.resolve().map(drop)
    }

    /// Returns what is wrong with the values, by their paths in the file.
    fn invalid_values(&self) -> Vec<Problem> {
        let mut problems = resolve::resolve(self).err().unwrap_or_default();
        for problem in &mut problems {
            problem.path = self.origin.unread.path_in_file(&problem.path);
        }
        problems
    }

    fn errors(&self, problems: Vec<Problem>) -> ConfigErrors {
        ConfigErrors::new(self.origin.file.clone(), problems, &self.origin.lines)
    }
}
