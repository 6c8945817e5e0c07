//! What a reload reads: the configuration file, and the files with keys that it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

use crate::config::{Auth, SECRET_KEYS, credentials};

/// Time of a file's last change, and its length; `None` if it is absent.
type Stamp = Option<(SystemTime, u64)>;

/// The files at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Watched {
    text: Vec<u8>,
    /// Files that the text names for its secrets.
    secrets: BTreeMap<PathBuf, Stamp>,
    /// Files of the settings in force: keys of clients, and of the identity server.
    keys: BTreeMap<PathBuf, Stamp>,
}

impl Watched {
    /// Looks at the files; `None` if that of the configuration cannot be read. `before`: what they were.
    /// Blocks.
    pub(super) fn read(path: &Path, before: Option<&Self>, auth: &Auth) -> Option<Self> {
        let text = fs::read(path).ok()?;
        let secrets: BTreeSet<PathBuf> = match before.filter(|before| before.text == text) {
            Some(before) => before.secrets.keys().cloned().collect(),
            None => pointsman_config_file::secret_files(&String::from_utf8_lossy(&text), &SECRET_KEYS),
        };
        let dir = auth.key_dir.iter().flat_map(|dir| credentials::files_of(dir).unwrap_or_default());
        let keys = dir.chain(auth.jwt.iter().filter_map(|jwt| jwt.jwks_file.clone()));
        Some(Self { secrets: stamped(secrets), keys: stamped(keys), text })
    }
}

fn stamped(files: impl IntoIterator<Item = PathBuf>) -> BTreeMap<PathBuf, Stamp> {
    let stamp = |file: &Path| {
        let metadata = fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    files.into_iter().map(|file| (stamp(&file), file)).map(|(stamp, file)| (file, stamp)).collect()
}
