//! What a reload reads: the configuration file, and the files with keys that it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use pointsman_config_file::secret_files;
use sha2::{Digest as _, Sha256};

use crate::config::{
    Auth, Environment, SECRET_KEYS,
    credentials::{self, MAX_FILE_BYTES},
};

/// Where settings say that keys are.
#[derive(Debug)]
pub(super) struct KeyFiles {
    dir: Option<PathBuf>,
    file: Option<PathBuf>,
}

/// SHA-256 digest of a file's content; `None` if it cannot be read. The time and the length of a file can
/// stay the same when its content changes: `rsync -t` and images keep times, and keys have one length.
type Stamp = Option<[u8; 32]>;

/// The files at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    text: Vec<u8>,
    /// Files that the text and the environment name for secrets.
    secrets: BTreeMap<PathBuf, Stamp>,
    /// Keys of clients, the files with digests that they name, and the keys of the identity server.
    keys: BTreeMap<PathBuf, Stamp>,
}

impl KeyFiles {
    pub(super) fn of(auth: &Auth) -> Self {
        let file = auth.jwt.as_ref().and_then(|jwt| jwt.jwks_file.clone());
        Self { dir: auth.key_dir.clone(), file }
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
        Ok(Self { secrets: stamped(secrets), keys: BTreeMap::new(), text })
    }

    /// Looks at the files with keys, too. Blocks.
    pub(super) fn with_keys(self, files: KeyFiles) -> Self {
        let dir = files.dir.and_then(|dir| credentials::files_of(&dir).ok());
        let (names, backups) = dir.unwrap_or_default();
        let (mut keys, mut digests) = (BTreeMap::new(), BTreeSet::new());
        for file in names {
            let content = content(&file);
            digests.extend(content.as_deref().map(digest_files).unwrap_or_default());
            keys.insert(file, content.as_deref().map(stamp));
        }
        keys.extend(stamped(digests.into_iter().chain(backups).chain(files.file)));
        Self { keys, ..self }
    }

    /// Returns whether the configuration has no text.
    pub(super) fn is_empty(&self) -> bool {
        self.text.trim_ascii().is_empty()
    }
}

fn stamped(files: impl IntoIterator<Item = PathBuf>) -> BTreeMap<PathBuf, Stamp> {
    let stamped = |file: PathBuf| {
        let stamp = content(&file).as_deref().map(stamp);
        (file, stamp)
    };
    files.into_iter().map(stamped).collect()
}

fn stamp(content: &[u8]) -> [u8; 32] {
    Sha256::digest(content).into()
}

/// Returns the content of a regular file, as far as a reading of it gets.
fn content(file: &Path) -> Option<Vec<u8>> {
    if !fs::metadata(file).ok()?.is_file() {
        return None;
    }
    let mut content = Vec::new();
    fs::File::open(file).ok()?.take(MAX_FILE_BYTES + 1).read_to_end(&mut content).ok()?;
    Some(content)
}

/// Returns the files with digests that a file with keys names.
fn digest_files(content: &[u8]) -> BTreeSet<PathBuf> {
    let text = String::from_utf8_lossy(content);
    // Most name none: parsing thousands of them in each look would take long.
    if text.contains("file") { secret_files(&text, &SECRET_KEYS, &[]) } else { BTreeSet::new() }
}
