//! What the files of a configuration contain that says who may call, and whose policies are trusted.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use pointsman_config_file::{Changes, Compared};

use super::{
    Config, KeyDigest, KeyEntry, Problem, Role, SECRET_KEYS, Secret, Server,
    auth::{Jwt, KeyFile, MAX_TENANT},
};

mod jwt;

/// Limit of the keys of clients.
const MAX_KEYS: usize = 100_000;
/// Limit of the files in the directory of keys.
const MAX_FILES: usize = 10_000;
/// Limit of a file with a digest, and of a file of the directory, bytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;
/// Limit of an id, bytes.
const MAX_ID: usize = 64;

/// Keys, tokens and public keys: those of the configuration with those of the files that it names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Credentials {
    /// Bearer token of operators; `None` if no token is needed.
    pub(crate) admin_token: Option<Secret>,
    /// API keys of clients.
    pub(crate) keys: Vec<KeySettings>,
    /// API keys from the directory of key files.
    pub(crate) dir_keys: Vec<KeySettings>,
    /// Tokens of operators.
    pub(crate) operators: Vec<OperatorSettings>,
    /// Tokens of an identity server.
    pub(crate) jwt: Option<JwtSettings>,
    /// Trusted minisign public keys.
    pub(super) trusted_keys: Vec<String>,
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
    /// What tokens must say.
    pub(crate) rules: Jwt,
    /// Where the public keys are.
    pub(crate) keys: KeySource,
}

/// Where public keys are.
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
struct Reader(Vec<Problem>);

impl Credentials {
    /// Reads what a configuration names.
    pub(super) fn read(config: &Config, problems: &mut Vec<Problem>) -> Self {
        let (server, auth) = (&config.server, &config.auth);
        let mut reader = Reader::default();
        if !auth.plain_api_keys {
            reader.plain_keys(server);
        }
        reader.published_keys(server);
        let (keys, dir_keys) = reader.keys(config);
        let credentials = Self {
            admin_token: reader.kept(server.operators_token(auth.knows_operators())).flatten(),
            keys,
            dir_keys,
            operators: reader.operators(config),
            jwt: auth.jwt.as_ref().and_then(|jwt| reader.jwt(jwt)),
            trusted_keys: config.policies.read_trusted_keys(&mut reader.0),
        };
        problems.append(&mut reader.0);
        credentials
    }
}

impl Compared for Credentials {
    fn changes(&self, new: &Self, _: &str, changes: &mut Changes) {
        let keys = [
            ("server.admin_token", self.admin_token != new.admin_token),
            ("auth.keys", self.keys != new.keys),
            ("auth.key_dir", self.dir_keys != new.dir_keys),
            ("auth.operators", self.operators != new.operators),
            ("auth.jwt", self.jwt != new.jwt),
            ("policies.trusted_keys", self.trusted_keys != new.trusted_keys),
        ];
        for (key, _) in keys.into_iter().filter(|(_, changed)| *changed) {
            changes.add(key.to_owned(), false);
        }
    }

    fn keep_started(&mut self, _: &Self) {}
}

impl Reader {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.0.push(Problem::new(path, message));
    }

    /// Returns a value, or keeps the problem with it.
    fn kept<T>(&mut self, read: Result<T, Problem>) -> Option<T> {
        read.map_err(|problem| self.0.push(problem)).ok()
    }

    /// Refuses keys that are written as they are.
    fn plain_keys(&mut self, server: &Server) {
        let advice = "keys are written as they are: run `pointsman key hash --id NAME`, give it the key on stdin, \
                      and put what it prints in the place of the key; or set `auth.plain_api_keys = true`";
        if !server.api_keys.is_empty() {
            self.add("server.api_keys", advice);
        }
        for (tenant, keys) in &server.tenants {
            if !keys.is_empty() {
                self.add(format!("server.tenants.{tenant}"), advice);
            }
        }
    }

    /// Refuses plain keys and a token of operators that stood in the documentation.
    fn published_keys(&mut self, server: &Server) {
        let published = |key: &Secret| KeyDigest::sha256(key.expose()).published();
        let mut add = |path: String, keys: &[Secret]| {
            for (index, key) in keys.iter().enumerate() {
                if let Some(message) = published(key) {
                    self.add(format!("{path}[{index}]"), message);
                }
            }
        };
        add("server.api_keys".to_owned(), &server.api_keys);
        for (tenant, keys) in &server.tenants {
            add(format!("server.tenants.{tenant}"), keys);
        }
    }

    /// Returns the keys of clients in the configuration, and in the files of the directory.
    fn keys(&mut self, config: &Config) -> (Vec<KeySettings>, Vec<KeySettings>) {
        let (auth, mut seen) = (&config.auth, Seen::default());
        let mut keys = Vec::new();
        for (index, entry) in auth.keys.iter().enumerate() {
            keys.extend(self.key(&format!("auth.keys[{index}]"), entry, auth.plain_api_keys, &mut seen));
        }
        let dir = auth.key_dir.as_deref();
        let dir_keys = dir.map(|dir| self.key_dir(dir, auth.plain_api_keys, &mut seen)).unwrap_or_default();
        let count = keys.len() + dir_keys.len();
        if count > MAX_KEYS {
            self.add("auth.keys", format!("{count} keys are more than the limit of {MAX_KEYS}"));
        }
        (keys, dir_keys)
    }

    fn operators(&mut self, config: &Config) -> Vec<OperatorSettings> {
        let (mut seen, mut operators) = (Seen::default(), Vec::new());
        for (index, entry) in config.auth.operators.iter().enumerate() {
            let path = format!("auth.operators[{index}]");
            let key = KeyEntry {
                id: entry.id.clone(),
                tenant: String::new(),
                digest: entry.digest.clone(),
                file: entry.file.clone(),
            };
            if let Some(key) = self.key(&path, &key, false, &mut seen) {
                operators.push(OperatorSettings { id: key.id, role: entry.role, digest: key.digest });
            }
        }
        operators
    }

    fn key(&mut self, path: &str, entry: &KeyEntry, plain: bool, seen: &mut Seen) -> Option<KeySettings> {
        let KeyEntry { id, tenant, digest, file } = entry;
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
        let read = match (digest, file) {
            (Some(digest), None) => KeyDigest::parse(digest.expose()).map_err(|error| ("digest", error)),
            (None, Some(file)) => digest_of_file(file, plain).map_err(|error| ("file", error)),
            (Some(_), Some(_)) => Err(("file", "`digest` is given, too: remove one of them".to_owned())),
            (None, None) => Err((
                "digest",
                "it is missing: `pointsman key new` makes a key, `pointsman key hash` the digest of one"
                    .to_owned(),
            )),
        };
        let given = if digest.is_some() { "digest" } else { "file" };
        let read = read.and_then(|digest| match digest.published() {
            Some(message) => Err((given, message)),
            None => Ok(digest),
        });
        let digest = match read {
            Ok(digest) => digest,
            Err((key, message)) => {
                self.add(format!("{path}.{key}"), message);
                return None;
            }
        };
        if let Some(other) = seen.digests.insert(digest.to_string(), path.to_owned()) {
            self.add(format!("{path}.digest"), format!("this is the key of {other}, too: give each its own"));
        }
        let tenant = Some(tenant.clone()).filter(|tenant| !tenant.is_empty());
        Some(KeySettings { id: id.clone(), tenant, digest })
    }

    /// Reads the files of the directory, in the order of their names. Hidden ones are left out.
    fn key_dir(&mut self, dir: &Path, plain: bool, seen: &mut Seen) -> Vec<KeySettings> {
        let mut keys = Vec::new();
        let files = match files_of(dir) {
            Ok(files) => files,
            Err(error) => {
                self.add("auth.key_dir", format!("cannot read `{}`: {error}", dir.display()));
                return keys;
            }
        };
        for file in files {
            let path = format!("auth.key_dir({})", file.display());
            match read(&file).and_then(|text| parsed(&text)) {
                Ok(parsed) => {
                    for (index, entry) in parsed.auth.keys.iter().enumerate() {
                        keys.extend(self.key(&format!("{path}[{index}]"), entry, plain, seen));
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
            let problem = first.map(|problem| problem.message.as_str()).unwrap_or_default();
            Err(format!("{problem}; a file has what `pointsman key new` prints"))
        }
    }
}

fn files_of(dir: &Path) -> Result<BTreeSet<PathBuf>, String> {
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if hidden || !entry.path().is_file() {
            continue;
        }
        files.insert(entry.path());
        if files.len() > MAX_FILES {
            return Err(format!("more than {MAX_FILES} files"));
        }
    }
    Ok(files)
}

/// Returns the digest in a file; with `plain` also that of a key.
fn digest_of_file(file: &Path, plain: bool) -> Result<KeyDigest, String> {
    let text = read(file)?;
    let text = text.trim();
    match KeyDigest::parse(text) {
        Err(_) if plain && !text.is_empty() => Ok(KeyDigest::sha256(text)),
        Err(error) => Err(format!("`{}`: {error}", file.display())),
        Ok(digest) => Ok(digest),
    }
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
