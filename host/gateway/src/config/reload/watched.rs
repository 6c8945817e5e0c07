//! What a reload reads: the configuration file, and the files with keys that it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::config::{Auth, SECRET_KEYS, credentials};

/// Where settings say that keys are.
#[derive(Debug)]
pub(super) struct KeyFiles {
    dir: Option<PathBuf>,
    file: Option<PathBuf>,
}

/// Time of a file's last change, and its length; `None` if it is absent.
type Stamp = Option<(SystemTime, u64)>;

/// The files at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    text: Vec<u8>,
    /// Files that the text names for its secrets.
    secrets: BTreeMap<PathBuf, Stamp>,
    /// Keys of clients, and of the identity server.
    keys: BTreeMap<PathBuf, Stamp>,
}

impl KeyFiles {
    pub(super) fn of(auth: &Auth) -> Self {
        let file = auth.jwt.as_ref().and_then(|jwt| jwt.jwks_file.clone());
        Self { dir: auth.key_dir.clone(), file }
    }
}

impl Watched {
    /// Looks at the file of the configuration, and at those that it names for its secrets. `before`: what
    /// they were. Blocks.
    ///
    /// # Errors
    /// The file of the configuration cannot be read.
    pub(super) fn read(path: &Path, before: Option<&Self>) -> io::Result<Self> {
        // Opening a pipe would wait for somebody who writes to it.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let text = fs::read(path)?;
        let secrets: BTreeSet<PathBuf> = match before.filter(|before| before.text == text) {
            Some(before) => before.secrets.keys().cloned().collect(),
            None => pointsman_config_file::secret_files(&String::from_utf8_lossy(&text), &SECRET_KEYS),
        };
        Ok(Self { secrets: stamped(secrets), keys: BTreeMap::new(), text })
    }

    /// Looks at the files with keys, too. Blocks.
    pub(super) fn with_keys(self, files: KeyFiles) -> Self {
        let dir = files.dir.and_then(|dir| credentials::files_of(&dir).ok());
        let (keys, backups) = dir.unwrap_or_default();
        Self { keys: stamped(keys.into_iter().chain(backups).chain(files.file)), ..self }
    }

    /// Returns whether the configuration has no text.
    pub(super) fn is_empty(&self) -> bool {
        self.text.trim_ascii().is_empty()
    }
}

fn stamped(files: impl IntoIterator<Item = PathBuf>) -> BTreeMap<PathBuf, Stamp> {
    let stamp = |file: &Path| {
        let metadata = fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    let stamped = |file: PathBuf| {
        let stamp = stamp(&file);
        (file, stamp)
    };
    files.into_iter().map(stamped).collect()
}
