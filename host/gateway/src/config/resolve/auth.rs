//! Validates `[auth]`, and reads the files of keys.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use ipnet::IpNet;

use super::Problems;
use crate::config::{
    Auth, KeyDigest, KeyEntry, SECRET_KEYS, Secret, Server,
    auth::KeyFile,
    settings::{AuthSettings, KeySettings, OperatorSettings},
};

/// Limit of the keys of clients.
const MAX_KEYS: usize = 100_000;
/// Limit of the files in the directory of keys.
const MAX_FILES: usize = 10_000;
/// Limit of a file with a digest, and of a file of the directory, bytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;
/// Limit of an id, bytes.
const MAX_ID: usize = 64;
/// Limit of the name of a tenant, bytes.
pub(super) const MAX_TENANT: usize = 128;

/// Ids and SHA-256 digests that were seen, each with its path.
#[derive(Default)]
struct Seen {
    ids: BTreeMap<String, String>,
    digests: BTreeMap<String, String>,
}

impl Problems {
    pub(super) fn auth(&mut self, auth: &Auth, server: &Server) -> AuthSettings {
        let Auth {
            plain_api_keys,
            ref keys,
            ref key_dir,
            ref operators,
            ref trusted_proxies,
            ref certificates,
            ref jwt,
        } = *auth;
        if !plain_api_keys {
            self.plain_keys(server);
        }
        self.published_keys(server);
        let mut seen = Seen::default();
        let mut valid = Vec::new();
        for (index, entry) in keys.iter().enumerate() {
            valid.extend(self.key(&format!("auth.keys[{index}]"), entry, plain_api_keys, &mut seen));
        }
        let dir_keys =
            key_dir.as_deref().map(|dir| self.key_dir(dir, plain_api_keys, &mut seen)).unwrap_or_default();
        if valid.len() + dir_keys.len() > MAX_KEYS {
            let count = valid.len() + dir_keys.len();
            self.add("auth.keys", format!("{count} keys are more than the limit of {MAX_KEYS}"));
        }
        let mut seen = Seen::default();
        let mut of_operators = Vec::new();
        for (index, entry) in operators.iter().enumerate() {
            let path = format!("auth.operators[{index}]");
            let key = KeyEntry {
                id: entry.id.clone(),
                tenant: String::new(),
                digest: entry.digest.clone(),
                file: entry.file.clone(),
            };
            if let Some(key) = self.key(&path, &key, false, &mut seen) {
                of_operators.push(OperatorSettings { id: key.id, role: entry.role, digest: key.digest });
            }
        }
        let trusted_proxies = self.networks(trusted_proxies);
        if !server.tenant_header.is_empty() && auth.trusted_proxies.is_empty() {
            let message = format!(
                "`{}` has no effect without trusted addresses: name those of the proxies that set it in \
                 auth.trusted_proxies",
                server.tenant_header
            );
            self.add("server.tenant_header", message);
        }
        AuthSettings {
            plain_api_keys,
            keys: valid,
            dir_keys,
            operators: of_operators,
            trusted_proxies,
            certificates: self.certificates(certificates, server),
            jwt: jwt.as_ref().and_then(|jwt| self.jwt(jwt)),
        }
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

    fn networks(&mut self, texts: &[String]) -> Vec<IpNet> {
        let mut networks = Vec::new();
        for (index, text) in texts.iter().enumerate() {
            let address = || text.parse::<std::net::IpAddr>().ok().map(IpNet::from);
            match text.parse::<IpNet>().ok().or_else(address) {
                Some(network) => networks.push(network),
                None => self.add(
                    format!("auth.trusted_proxies[{index}]"),
                    format!("`{text}` is not an address or network: expected `10.0.0.1` or `10.0.0.0/8`"),
                ),
            }
        }
        networks
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
pub(super) fn read(file: &Path) -> Result<String, String> {
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
