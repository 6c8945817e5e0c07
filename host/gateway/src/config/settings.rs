//! The configuration after validation.

use std::ops::Deref;

use pointsman_config_file::{Changes, Compared as _};

use super::{Config, credentials::Credentials};

/// A validated configuration, and what the files that it names contain.
#[derive(Clone, Debug)]
pub struct Settings {
    config: Config,
    pub(crate) credentials: Credentials,
}

impl Settings {
    pub(super) fn new(config: Config, credentials: Credentials) -> Self {
        Self { config, credentials }
    }

    /// Returns the keys whose values differ in `new`.
    #[must_use]
    pub(crate) fn changes(&self, new: &Self) -> Changes {
        let mut changes = Changes::default();
        self.config.changes(&new.config, "", &mut changes);
        self.credentials.changes(&new.credentials, &mut changes);
        changes
    }

    /// Returns the settings that are in force after a reload: those that only a restart changes come from
    /// the start.
    #[must_use]
    pub(crate) fn with_started(mut self, started: &Self) -> Self {
        self.config.keep_started(&started.config);
        self
    }

    /// Forgets a directory of policies that does not exist, for checks of the rest.
    pub(crate) fn forget_missing_dir(&mut self) {
        let dir = &mut self.config.policies.dir;
        *dir = dir.take().filter(|dir| dir.is_dir());
    }
}

impl Deref for Settings {
    type Target = Config;

    fn deref(&self) -> &Config {
        &self.config
    }
}
