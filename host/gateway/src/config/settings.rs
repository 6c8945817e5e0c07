//! The configuration after validation.

use std::ops::Deref;

use pointsman_config_file::{Changes, Compared as _};

use super::{Config, credentials::Credentials};

/// Maximum number of names of backups in a message.
const MAX_BACKUPS_SHOWN: usize = 10;

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

    /// Returns whether clients have to authenticate: with a key, a certificate or a token. A directory of
    /// keys counts without a key in it, because the removal of the last key must not let everybody in.
    #[must_use]
    pub(crate) fn clients_are_known(&self) -> bool {
        let auth = &self.auth;
        !auth.keys.is_empty() || auth.key_dir.is_some() || self.has_other_client_credentials()
    }

    /// Returns whether operators have to authenticate.
    #[must_use]
    pub(crate) fn operators_are_known(&self) -> bool {
        self.server.admin_token.is_some() || self.auth.knows_operators()
    }

    /// Says which keys seem to be missing in `auth.key_dir`, and which of its files are not read.
    #[must_use]
    pub(crate) fn missing_keys(&self) -> Vec<String> {
        let none = "`auth.key_dir` holds no key: every client is refused".to_owned();
        let count = self.credentials.dangling_links;
        let links = format!(
            "`auth.key_dir` has links that lead to no file ({count}), and their keys are refused: restore the files, \
             or remove the links"
        );
        let backups = &self.credentials.backups;
        let shown: Vec<&str> = backups.iter().take(MAX_BACKUPS_SHOWN).map(String::as_str).collect();
        let names = format!(
            "`auth.key_dir` has files whose names are those of backups ({}), and their keys are refused: `{shown}`; \
             remove or rename them",
            backups.len(),
            shown = shown.join("`, `"),
        );
        let told = [(self.refuses_every_client(), none), (count > 0, links), (!backups.is_empty(), names)];
        told.into_iter().filter_map(|(applies, text)| applies.then_some(text)).collect()
    }

    /// Returns whether `auth.key_dir` makes clients authenticate and holds no key, nor is there another way.
    fn refuses_every_client(&self) -> bool {
        let keys = &self.credentials;
        let no_keys = keys.keys.is_empty() && keys.dir_keys.is_empty();
        self.auth.key_dir.is_some() && no_keys && !self.has_other_client_credentials()
    }

    fn has_other_client_credentials(&self) -> bool {
        self.auth.jwt.is_some() || self.auth.certificates.iter().any(|entry| entry.role.is_none())
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
