//! The keys and tokens of those who may call, in the configuration and in the files that it names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use pointsman_config_file::Changes;

use super::{
    Config, KeyDigest, KeyEntry, OperatorEntry, Problem, Role, SECRET_KEYS,
    auth::{Jwt, KeyFile, MAX_TENANT},
};

mod jwt;

/// Maximum number of keys of clients.
const MAX_KEYS: usize = 100_000;
/// Maximum number of files in the directory of keys.
const MAX_FILES: usize = 10_000;
/// Maximum size of a file with a digest, and of a file of the directory, bytes.
pub(super) const MAX_FILE_BYTES: u64 = 1024 * 1024;
/// Endings of the names of files that editors and other tools leave beside a file that they change.
const BACKUP_ENDINGS: [&str; 12] =
    ["bak", "backup", "old", "orig", "rej", "save", "swp", "swo", "swx", "swn", "tmp", "new"];
/// Maximum length of an id, bytes.
const MAX_ID: usize = 64;

/// Keys and tokens: those of the configuration with those of the files that it names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Credentials {
    /// API keys of clients.
    pub(crate) keys: Vec<KeySettings>,
    /// API keys from the directory of key files.
    pub(crate) dir_keys: Vec<KeySettings>,
    /// Tokens of operators.
    pub(crate) operators: Vec<OperatorSettings>,
    /// Tokens of an identity server.
    pub(crate) jwt: Option<JwtSettings>,
    /// Number of links in the directory of key files that lead to no file.
    pub(crate) dangling_links: usize,
    /// Names of the files of that directory that are not read, because they look like backups.
    pub(crate) backups: BTreeSet<String>,
}

/// An API key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeySettings {
    /// Name of the key.
    pub(crate) id: String,
    /// Tenant that its requests count for.
    pub(crate) tenant: Option<String>,
    /// Digest of the key.
    pub(crate) digest: KeyDigest,
}

/// A token of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OperatorSettings {
    /// Name of the operator.
    pub(crate) id: String,
    /// Role of the operator.
    pub(crate) role: Role,
    /// Digest of the token.
    pub(crate) digest: KeyDigest,
}

/// Tokens of an identity server.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct JwtSettings {
    /// Claims that a token must have, and their values.
    pub(crate) rules: Jwt,
    /// Source of the public keys.
    pub(crate) keys: KeySource,
}

/// Source of public keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeySource {
    /// Behind a URL.
    Url {
        /// The address.
        url: String,
        /// Certificates (PEM) that the server may have, besides those of the system.
        ca: Option<Arc<str>>,
    },
    /// The content of a file.
    File(Arc<str>),
}

/// Ids and SHA-256 digests that were seen, each with its path.
#[derive(Default)]
struct Seen {
    ids: BTreeMap<String, String>,
    digests: BTreeMap<String, String>,
}

/// Reads credentials, and collects what is wrong with them.
#[derive(Default)]
struct Reader {
    problems: Vec<Problem>,
    dangling_links: usize,
    backups: BTreeSet<String>,
}

impl Credentials {
    /// Reads what a configuration names.
    pub(super) fn read(config: &Config, problems: &mut Vec<Problem>) -> Self {
        let auth = &config.auth;
        let mut reader = Reader::default();
        reader.problems.extend(config.server.token_problem(auth.knows_operators()));
        let (keys, dir_keys) = reader.keys(config);
        let operators = reader.operators(config);
        let jwt = auth.jwt.as_ref().and_then(|jwt| reader.jwt(jwt));
        problems.append(&mut reader.problems);
        let Reader { dangling_links, backups, .. } = reader;
        Self { keys, dir_keys, operators, jwt, dangling_links, backups }
    }

    /// Reports the keys of the configuration that differ in `new`, or whose files do.
    pub(super) fn changes(&self, new: &Self, changes: &mut Changes) {
        let keys = [
            ("auth.keys", self.keys != new.keys),
            ("auth.key_dir", self.dir_keys != new.dir_keys),
            ("auth.operators", self.operators != new.operators),
            ("auth.jwt", self.jwt != new.jwt),
        ];
        for (key, _) in keys.into_iter().filter(|(_, changed)| *changed) {
            changes.add(key.to_owned(), false);
        }
    }
}

impl Reader {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem::new(path, message));
    }

    /// Returns the keys of clients in the configuration, and in the files of the directory.
    fn keys(&mut self, config: &Config) -> (Vec<KeySettings>, Vec<KeySettings>) {
        let (auth, mut seen) = (&config.auth, Seen::default());
        let mut keys = Vec::new();
        for (index, entry) in auth.keys.iter().enumerate() {
            keys.extend(self.key(&format!("auth.keys[{index}]"), entry, &mut seen));
        }
        let dir = auth.key_dir.as_deref();
        let dir_keys = dir.map(|dir| self.key_dir(dir, &mut seen)).unwrap_or_default();
        let count = keys.len() + dir_keys.len();
        if count > MAX_KEYS {
            self.add("auth.keys", format!("{count} keys are more than the limit of {MAX_KEYS}"));
        }
        (keys, dir_keys)
    }

    fn operators(&mut self, config: &Config) -> Vec<OperatorSettings> {
        let (mut seen, mut operators) = (Seen::default(), Vec::new());
        for (index, entry) in config.auth.operators.iter().enumerate() {
            let OperatorEntry { id, role, digest } = entry.clone();
            let key = KeyEntry { id, digest, ..KeyEntry::default() };
            if let Some(key) = self.key(&format!("auth.operators[{index}]"), &key, &mut seen) {
                operators.push(OperatorSettings { id: key.id, role, digest: key.digest });
            }
        }
        operators
    }

    fn key(&mut self, path: &str, entry: &KeyEntry, seen: &mut Seen) -> Option<KeySettings> {
        let KeyEntry { id, tenant, digest } = entry;
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        if id.is_empty() || id.len() > MAX_ID || !id.bytes().all(fits) {
            let message = format!("`{id}` is not an id: expected 1 to {MAX_ID} letters, digits, `-` and `_`");
            self.add(format!("{path}.id"), message);
            return None;
        }
        if tenant.len() > MAX_TENANT {
            let message = format!("{} bytes are more than the limit of {MAX_TENANT}", tenant.len());
            self.add(format!("{path}.tenant"), message);
            return None;
        }
        if let Some(other) = seen.ids.insert(id.clone(), path.to_owned()) {
            self.add(format!("{path}.id"), format!("`{id}` is already the id of {other}: give another one"));
        }
        let missing =
            "it is missing: `pointsman key new` makes a key, `pointsman key hash` the digest of one";
        let read = digest.as_ref().ok_or_else(|| missing.to_owned());
        let read = read.and_then(|digest| KeyDigest::parse(digest.expose()));
        let read = read.and_then(|digest| digest.published().map_or(Ok(digest), Err));
        let digest = read.map_err(|message| self.add(format!("{path}.digest"), message)).ok()?;
        if let Some(other) = seen.digests.insert(digest.to_string(), path.to_owned()) {
            self.add(format!("{path}.digest"), format!("this is the key of {other}, too: give each its own"));
        }
        let tenant = Some(tenant.clone()).filter(|tenant| !tenant.is_empty());
        Some(KeySettings { id: id.clone(), tenant, digest })
    }

    /// Reads the files of the directory, in the order of their names. Hidden ones and backups are left out.
    fn key_dir(&mut self, dir: &Path, seen: &mut Seen) -> Vec<KeySettings> {
        let mut keys = Vec::new();
        let files = match files_of(dir) {
            Ok((files, backups)) => {
                let names = backups.iter().filter_map(|file| file.file_name());
                self.backups = names.map(|name| name.to_string_lossy().into_owned()).collect();
                files
            }
            Err(error) => {
                self.add("auth.key_dir", format!("cannot read `{}`: {error}", dir.display()));
                return keys;
            }
        };
        for file in files {
            if !file.exists() {
                // Its keys are refused, as those of a file that was removed.
                self.dangling_links += 1;
                continue;
            }
            let path = format!("auth.key_dir({})", file.display());
            match read(&file).and_then(|text| parsed(&text)) {
                // A file that is being written, or that was meant to revoke a key, is not one of no keys.
                Ok(parsed) if parsed.auth.keys.is_empty() => {
                    self.add(
                        path,
                        "it holds no key: write what `pointsman key new` prints, or remove the file",
                    );
                }
                Ok(parsed) => {
                    for (index, entry) in parsed.auth.keys.iter().enumerate() {
                        keys.extend(self.key(&format!("{path}[{index}]"), entry, seen));
                    }
                }
                Err(error) => self.add(path, error),
            }
        }
        keys
    }
}

fn parsed(text: &str) -> Result<KeyFile, String> {
    let parsed = pointsman_config_file::parse::<KeyFile>(text, &SECRET_KEYS);
    let (file, problems) = match parsed {
        Ok(parsed) => (Some(parsed.value), parsed.problems),
        Err(problems) => (None, problems),
    };
    match (file, problems.first()) {
        (Some(file), None) => Ok(file),
        (_, first) => {
            let problem = first.map_or("", |first| &*first.message);
            Err(format!("{problem}; a file has what `pointsman key new` prints"))
        }
    }
}

/// Returns the files of a directory with keys and the links that lead to no file, in the order of their
/// names, and the backups there.
pub(super) fn files_of(dir: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), String> {
    let (mut files, mut backups) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(dir).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        // The directory knows the kind of an entry: only a link needs a look.
        let is_listed = |kind: fs::FileType| {
            kind.is_file() || kind.is_symlink() && (entry.path().is_file() || !entry.path().exists())
        };
        if hidden || !entry.file_type().is_ok_and(is_listed) {
            continue;
        }
        let kind = if is_backup(&entry.file_name().to_string_lossy()) { &mut backups } else { &mut files };
        kind.push(entry.path());
        if files.len() + backups.len() > MAX_FILES {
            return Err(format!("more than {MAX_FILES} files"));
        }
    }
    // Paths of one directory: comparing them part by part would take most of the time of a look.
    files.sort_unstable_by(|one: &PathBuf, other| one.as_os_str().cmp(other.as_os_str()));
    Ok((files, backups))
}

/// Returns whether an editor or a package manager leaves files of this name. Such a file holds the keys from
/// before a change, which may be revoked.
fn is_backup(name: &str) -> bool {
    let (_, ending) = name.rsplit_once('.').unwrap_or_default();
    let ending = ending.to_ascii_lowercase();
    name.ends_with('~')
        || name.starts_with('#')
        || BACKUP_ENDINGS.contains(&&*ending)
        || ["dpkg-", "rpm", "ucf-"].iter().any(|tool| ending.starts_with(tool))
}

/// Reads a regular file of limited size.
fn read(file: &Path) -> Result<String, String> {
    let failed = |error: std::io::Error| {
        format!("cannot read `{}`: {error}; check the path and its permissions", file.display())
    };
    if !fs::metadata(file).map_err(failed)?.is_file() {
        return Err(format!("`{}` is not a regular file", file.display()));
    }
    let mut text = String::new();
    let opened = fs::File::open(file).map_err(failed)?;
    opened.take(MAX_FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("`{}` has more than {MAX_FILE_BYTES} bytes", file.display()));
    }
    Ok(text)
}
