//! Credentials from Docker's configuration: `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`.

use std::{
    collections::BTreeMap,
    env, fs, io,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use reqwest::header::HeaderValue;
use serde::Deserialize;

use super::{error::RegistryError, helper};
use crate::place::Reference;

/// Largest configuration that is read, bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Credentials for a registry. No type with a secret implements `Debug`.
pub(super) struct Credentials {
    pub(super) secret: Secret,
    /// Place where the secret was found, or searched.
    source: String,
}

/// How the user is identified.
#[derive(PartialEq, Eq)]
pub(super) enum Secret {
    None,
    Password {
        user: String,
        password: String,
    },
    /// A token that the token server exchanges for one of the registry.
    IdentityToken(String),
    /// A token of the registry.
    RegistryToken(String),
}

/// The parts of Docker's configuration that name credentials.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Config {
    auths: BTreeMap<String, Entry>,
    #[serde(rename = "credHelpers")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    creds_store: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: String,
    username: String,
    password: String,
    identitytoken: String,
    registrytoken: String,
}

impl Credentials {
    /// Finds the credentials of a registry, as Docker does: its own helper, the common helper, the file.
    pub(super) async fn find(reference: &Reference) -> Result<Self, RegistryError> {
        let Some(path) = path() else {
            return Ok(Self {
                secret: Secret::None,
                source: "HOME is not set, so none were read".to_owned(),
            });
        };
        Self::read(&path, reference).await
    }

    /// Describes where the credentials come from.
    pub(super) fn source(&self) -> &str {
        &self.source
    }

    async fn read(path: &Path, reference: &Reference) -> Result<Self, RegistryError> {
        let config = Config::read(path)?;
        let key = reference.credentials_key();
        let own = lookup(&config.cred_helpers, reference).filter(|(_, helper)| !helper.is_empty());
        let common = Some((key, &config.creds_store)).filter(|(_, helper)| !helper.is_empty());
        let asked = |entry| if host_and_path(entry).1.is_empty() { key } else { entry };
        if let Some((entry, name)) = own.or(common)
            && let Some((user, secret)) = helper::get(name, asked(entry)).await?
        {
            let source = format!("the credentials used are those of docker-credential-{name}");
            // This name marks the secret as an identity token.
            let token = user == "<token>";
            let password = |password| Secret::Password { user, password };
            let secret = if token { Secret::IdentityToken(secret) } else { password(secret) };
            return Ok(Self { secret, source });
        }
        let file = path.display();
        let (name, secret) = match lookup(&config.auths, reference) {
            Some((name, entry)) => (name, entry.secret(path, name)?),
            None => (key, Secret::None),
        };
        let source = match secret {
            Secret::None => format!("{file} has no credentials for {name}"),
            _ => format!("the credentials used are those for {name} in {file}"),
        };
        Ok(Self { secret, source })
    }
}

impl Config {
    /// Reads the file; one that does not exist has no credentials.
    fn read(path: &Path) -> Result<Self, RegistryError> {
        let fail = |problem: String| {
            let problem = format!("cannot read credentials from {}: {problem}", path.display());
            RegistryError::new(problem, "repair the file, or name another directory in DOCKER_CONFIG")
        };
        let size = match fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(fail(error.to_string())),
        };
        if size > MAX_CONFIG_BYTES {
            return Err(fail(format!("the file has {size} bytes; the limit is {MAX_CONFIG_BYTES}")));
        }
        let bytes = fs::read(path).map_err(|error| fail(error.to_string()))?;
        // The message of the parser could quote a secret.
        serde_json::from_slice(&bytes)
            .map_err(|error| fail(format!("wrong JSON at line {} column {}", error.line(), error.column())))
    }
}

impl Entry {
    fn secret(&self, path: &Path, key: &str) -> Result<Secret, RegistryError> {
        if !self.registrytoken.is_empty() {
            return Ok(Secret::RegistryToken(self.registrytoken.clone()));
        }
        if !self.identitytoken.is_empty() {
            return Ok(Secret::IdentityToken(self.identitytoken.clone()));
        }
        if self.auth.is_empty() {
            let (user, password) = (self.username.clone(), self.password.clone());
            return Ok(if user.is_empty() { Secret::None } else { Secret::Password { user, password } });
        }
        let pair = STANDARD.decode(self.auth.trim()).ok().and_then(|pair| String::from_utf8(pair).ok());
        let pair = pair.as_deref().and_then(|pair| pair.split_once(':'));
        let (user, password) = pair.ok_or_else(|| {
            RegistryError::new(
                format!("{}: `auth` of {key} is not base64 of USER:PASSWORD", path.display()),
                "log in again with `docker login`",
            )
        })?;
        let password = password.trim_end_matches('\0').to_owned();
        Ok(Secret::Password { user: user.to_owned(), password })
    }
}

/// Returns the header of a user and a password.
pub(super) fn basic(user: &str, password: &str) -> Result<HeaderValue, RegistryError> {
    let value = format!("Basic {}", STANDARD.encode(format!("{user}:{password}")));
    let mut value = HeaderValue::from_str(&value)
        .map_err(|_| RegistryError::new("the user and password are not valid", "log in again"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn path() -> Option<PathBuf> {
    let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let directory = set("DOCKER_CONFIG").or_else(|| Some(set("HOME")?.join(".docker")))?;
    Some(directory.join("config.json"))
}

/// Finds the entry for a repository, and its name: `HOST/PATH` with the longest path that the repository is
/// in, as podman and Kubernetes write it, or else that of the host.
fn lookup<'a, T>(entries: &'a BTreeMap<String, T>, reference: &Reference) -> Option<(&'a str, &'a T)> {
    let is_in = |path: &str| {
        let rest = reference.repository.strip_prefix(path);
        path.is_empty() || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let fitting = entries.iter().filter_map(|(name, entry)| {
        let (host, path) = host_and_path(name);
        (reference.is_at(host) && is_in(path)).then_some((path.len(), name.as_str(), entry))
    });
    let best = fitting.max_by_key(|(length, name, _)| (*length, *name == reference.credentials_key()));
    best.map(|(_, name, entry)| (name, entry))
}

/// Returns the host and the path of an entry's name. Older versions of Docker wrote `https://HOST/v1/` for
/// the host.
fn host_and_path(name: &str) -> (&str, &str) {
    let rest = name.strip_prefix("https://").or_else(|| name.strip_prefix("http://"));
    let (host, path) = rest.unwrap_or(name).split_once('/').unwrap_or((rest.unwrap_or(name), ""));
    match path.trim_end_matches('/') {
        "v1" | "v2" if rest.is_some() || path.ends_with('/') => (host, ""),
        path => (host, path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(config: &str, reference: &str) -> Result<Credentials, RegistryError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        fs::write(&path, config).unwrap();
        Credentials::read(&path, &reference.parse().unwrap()).await
    }

    fn password(user: &str, password: &str) -> Secret {
        Secret::Password { user: user.to_owned(), password: password.to_owned() }
    }

    #[tokio::test]
    async fn every_kind_of_entry_is_found_by_name_or_url() {
        let config = r#"{ "auths": {
            "r.example": { "auth": "YW5uOmE6Yg==" },
            "https://url.example/v1/": { "username": "bob", "password": "p" },
            "https://index.docker.io/v1/": { "auth": "aHViOnA=" },
            "id.example:5000": { "auth": "YW5uOg==", "identitytoken": "refresh" },
            "token.example": { "registrytoken": "t" },
            "ghcr.example": { "username": "host", "password": "p" },
            "ghcr.example/org-a": { "username": "a", "password": "p" },
            "ghcr.example/org-b": { "username": "b", "password": "p" },
            "ghcr.example/org-b/team": { "username": "team", "password": "p" },
            "other.example/org-a": { "username": "a", "password": "p" },
            "empty.example": {} }, "HttpHeaders": { "x": 1 } }"#;
        for (reference, secret) in [
            ("r.example/p", password("ann", "a:b")),
            ("url.example/p", password("bob", "p")),
            ("docker.io/a/p", password("hub", "p")),
            ("id.example:5000/p", Secret::IdentityToken("refresh".to_owned())),
            ("token.example/p", Secret::RegistryToken("t".to_owned())),
            ("empty.example/p", Secret::None),
            ("id.example/p", Secret::None),
            ("ghcr.example/org-a/p", password("a", "p")),
            ("ghcr.example/org-b/p", password("b", "p")),
            ("ghcr.example/org-b", password("b", "p")),
            ("ghcr.example/org-b/team/p", password("team", "p")),
            ("ghcr.example/org-b/teams/p", password("b", "p")),
            ("ghcr.example/org-c/p", password("host", "p")),
            ("other.example/org-ab/p", Secret::None),
        ] {
            let found = read(config, reference).await.unwrap_or_else(|error| panic!("{reference}: {error}"));
            assert!(found.secret == secret, "{reference}: {}", found.source());
        }
        let missing = Path::new("/does/not/exist/config.json");
        let found = Credentials::read(missing, &"r.example/p".parse().unwrap()).await;
        assert!(
            found.is_ok_and(|found| found.secret == Secret::None && found.source().contains("r.example"))
        );
    }

    #[tokio::test]
    async fn a_broken_configuration_is_reported_without_its_secrets() {
        for (config, part) in [
            ("{ \"auths\": \"hunter2\" }", "wrong JSON at line 1"),
            (
                "{ \"auths\": { \"r.example\": { \"auth\": \"hunter2!\" } } }",
                "is not base64 of USER:PASSWORD",
            ),
            ("{ \"auths\": { \"r.example\": { \"auth\": \"aHVudGVyMg==\" } } }", "is not base64 of"),
            ("{ \"credsStore\": \"../evil\" }", "\"../evil\" is not the name of a credential helper"),
            (
                "{ \"credHelpers\": { \"r.example\": \"not-installed-x\" } }",
                "docker-credential-not-installed-x",
            ),
        ] {
            let error = read(config, "r.example/p").await.err().map(|error| error.to_string());
            let error = error.unwrap_or_else(|| panic!("{config}"));
            assert!(error.contains(part) && !error.contains("hunter2"), "{config}: {error}");
        }
    }
}
