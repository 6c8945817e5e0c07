//! Where the configuration comes from.

use std::{fmt, fs, io, path::PathBuf, sync::Arc};

use super::watched::{KeyFiles, Watched};
use crate::config::{Config, Environment, settings::Settings};

/// Reads the configuration as it was read at the start: the file, and the flags that take precedence over it.
pub type ReadConfig = Arc<dyn Fn() -> anyhow::Result<Config> + Send + Sync>;

/// Source of the configuration.
#[derive(Clone)]
pub struct ConfigSource {
    /// File that is watched for changes, with the files that it names.
    pub(super) path: Option<PathBuf>,
    /// Variables that may name files, too.
    environment: Environment,
    read: ReadConfig,
    /// The files before the configuration of the start was read.
    pub(super) at_start: Option<Arc<Watched>>,
}

impl ConfigSource {
    /// Source of a configuration that `read` reads after this, from the file `path` and from `environment`:
    /// later changes of the file are applied. Blocks.
    #[must_use]
    pub fn new(path: Option<PathBuf>, environment: Environment, read: ReadConfig) -> Self {
        let mut source = Self { path, environment, read, at_start: None };
        source.at_start = source.files(None).and_then(Result::ok).map(Arc::new);
        source
    }

    /// Looks at the file, and at the files with secrets; `None` without a file. `before`: what they were.
    /// Blocks.
    pub(super) fn files(&self, before: Option<&Watched>) -> Option<io::Result<Watched>> {
        self.path.as_deref().map(|path| Watched::read(path, &self.environment, before))
    }

    /// Looks at the files with keys that the configuration of the start names, before they are read. Blocks.
    pub(crate) fn with_keys_of(mut self, config: &Config) -> Self {
        let keys = KeyFiles::of(&config.auth);
        self.at_start =
            self.at_start.map(|files| Arc::new(Arc::unwrap_or_clone(files).with_keys(keys, None)));
        self
    }

    /// Reads and checks the configuration. Also returns the files as they were before. Blocks.
    pub(super) fn settings(&self) -> Result<(Settings, Option<Arc<Watched>>), String> {
        let path = self.path.iter().find(|path| fs::metadata(path).is_ok_and(|found| !found.is_file()));
        if let Some(path) = path {
            return Err(format!("{}: the configuration is not a regular file", path.display()));
        }
        let files = self.files(None).and_then(Result::ok);
        let config = (self.read)().map_err(|error| format!("{error:#}"))?;
        let files = files.map(|files| Arc::new(files.with_keys(KeyFiles::of(&config.auth), None)));
        Ok((config.resolve().map_err(|errors| errors.to_string())?, files))
    }
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSource").field("path", &self.path).finish_non_exhaustive()
    }
}
