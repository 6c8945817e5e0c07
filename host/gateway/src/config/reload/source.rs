//! Where the configuration comes from.

use std::{fmt, fs, path::PathBuf, sync::Arc};

use super::watched::{KeyFiles, Watched};
use crate::config::{Config, settings::Settings};

/// Reads the configuration as it was read at the start: the file, and the flags that take precedence over it.
pub type ReadConfig = Arc<dyn Fn() -> anyhow::Result<Config> + Send + Sync>;

/// Source of the configuration.
#[derive(Clone)]
pub struct ConfigSource {
    /// File that is watched for changes, with the files that it names.
    pub(super) path: Option<PathBuf>,
    read: ReadConfig,
    /// The files before the configuration of the start was read.
    pub(super) at_start: Option<Arc<Watched>>,
}

impl ConfigSource {
    /// Source of a configuration that is read after this: later changes of the file `path` are applied.
    /// Blocks.
    #[must_use]
    pub fn new(path: Option<PathBuf>, read: ReadConfig) -> Self {
        let at_start = path.as_deref().and_then(|path| Watched::read(path, None).ok()).map(Arc::new);
        Self { path, read, at_start }
    }

    /// Looks at the files with keys that the configuration of the start names, before they are read. Blocks.
    pub(crate) fn with_keys_of(mut self, config: &Config) -> Self {
        let keys = KeyFiles::of(&config.auth);
        self.at_start = self.at_start.map(|files| Arc::new(Arc::unwrap_or_clone(files).with_keys(keys)));
        self
    }

    /// Reads and checks the configuration. Also returns the files as they were before. Blocks.
    pub(super) fn settings(&self) -> Result<(Settings, Option<Arc<Watched>>), String> {
        let path = self.path.iter().find(|path| fs::metadata(path).is_ok_and(|found| !found.is_file()));
        if let Some(path) = path {
            return Err(format!("{}: the configuration is not a regular file", path.display()));
        }
        let files = self.path.as_deref().and_then(|path| Watched::read(path, None).ok());
        let config = (self.read)().map_err(|error| format!("{error:#}"))?;
        let files = files.map(|files| Arc::new(files.with_keys(KeyFiles::of(&config.auth))));
        Ok((config.resolve().map_err(|errors| errors.to_string())?, files))
    }
}

impl fmt::Debug for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigSource").field("path", &self.path).finish_non_exhaustive()
    }
}
