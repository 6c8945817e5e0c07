//! What a reload reads: the configuration file, and the files with keys that it names.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::{Path, PathBuf},
};

use pointsman_config_file::secret_files;

use super::stamp::Stamp;
use crate::config::{Auth, Environment, SECRET_KEYS, credentials};

/// Where settings say that keys are.
#[derive(Debug)]
pub(super) struct KeyFiles {
    dir: Option<PathBuf>,
    /// Files of the identity server.
    files: Vec<PathBuf>,
}

/// The files at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    text: Vec<u8>,
    /// Files that the text and the environment name for secrets.
    secrets: HashMap<PathBuf, Stamp>,
    /// Keys of clients, the files with digests that they name, and the files of the identity server.
    keys: HashMap<PathBuf, Stamp>,
}

impl KeyFiles {
    pub(super) fn of(auth: &Auth) -> Self {
        let files = auth.jwt.iter().flat_map(|jwt| [&jwt.jwks_file, &jwt.jwks_ca]).flatten();
        Self { dir: auth.key_dir.clone(), files: files.cloned().collect() }
    }
}

impl Watched {
    /// Looks at the file of the configuration, and at those that it and the environment name for secrets.
    /// `before`: what they were, with the same environment. Blocks.
    ///
    /// # Errors
    /// The file of the configuration cannot be read.
    pub(super) fn read(path: &Path, environment: &Environment, before: Option<&Self>) -> io::Result<Self> {
        // Opening a pipe would wait for somebody who writes to it.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let text = fs::read(path)?;
        let secrets: BTreeSet<PathBuf> = match before.filter(|before| before.text == text) {
            Some(before) => before.secrets.keys().cloned().collect(),
            None => secret_files(&String::from_utf8_lossy(&text), &SECRET_KEYS, environment.overrides()),
        };
        // They are few: each look reads them.
        Ok(Self { secrets: stamped(secrets, None), keys: HashMap::new(), text })
    }

    /// Looks at the files with keys, too. `before`: what the last look found, which is not read again where
    /// it did not change. Blocks.
    pub(super) fn with_keys(self, files: KeyFiles, before: Option<&Self>) -> Self {
        let dir = files.dir.and_then(|dir| credentials::files_of(&dir).ok());
        let (names, backups) = dir.unwrap_or_default();
        let before = before.map(|before| &before.keys);
        let mut keys = stamped(names, before);
        let digests: BTreeSet<PathBuf> = keys.values().flat_map(Stamp::named).cloned().collect();
        keys.extend(stamped(digests.into_iter().chain(backups).chain(files.files), before));
        Self { keys, ..self }
    }

    /// Returns whether the configuration has no text.
    pub(super) fn is_empty(&self) -> bool {
        self.text.trim_ascii().is_empty()
    }
}

/// Looks at files, which `before` has from the look before.
fn stamped(
    files: impl IntoIterator<Item = PathBuf>,
    before: Option<&HashMap<PathBuf, Stamp>>,
) -> HashMap<PathBuf, Stamp> {
    let stamped = |file: PathBuf| {
        let stamp = Stamp::of(&file, before.and_then(|before| before.get(&file)));
        (file, stamp)
    };
    files.into_iter().map(stamped).collect()
}
