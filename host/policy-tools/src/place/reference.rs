//! The name of an artifact in a registry: `HOST[:PORT]/REPOSITORY[:TAG][@sha256:HEX]`.

use std::{fmt, str::FromStr};

/// Longest repository name that registries accept, bytes.
const MAX_REPOSITORY_BYTES: usize = 255;
/// Names of Docker Hub, which serves its API from another host.
#[cfg(feature = "registry")]
const DOCKER_HUB: [&str; 2] = ["docker.io", "index.docker.io"];
#[cfg(feature = "registry")]
const DOCKER_HUB_API: &str = "registry-1.docker.io";

/// The name of an artifact in a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Host with an optional port, as written.
    pub(crate) registry: String,
    /// Path of the repository, without slashes at its ends.
    pub(crate) repository: String,
    /// The tag; `latest` if the reference has neither a tag nor a digest.
    pub(crate) tag: Option<String>,
    /// `sha256:` and 64 lower case hexadecimal digits. It decides which manifest is meant.
    pub(crate) digest: Option<String>,
}

impl Reference {
    /// Returns whether a text without a scheme names a registry: its first part contains a dot or a port, or
    /// is `localhost`.
    pub(crate) fn looks_like_one(text: &str) -> bool {
        let host = text.split_once('/').map(|(host, _)| host);
        host.is_some_and(|host| !host.starts_with('.') && (host == "localhost" || host.contains(['.', ':'])))
    }

    /// Returns the host, and port if one is given, that serves the registry's API.
    #[cfg(feature = "registry")]
    pub(crate) fn api_host(&self) -> &str {
        if DOCKER_HUB.contains(&self.registry.as_str()) { DOCKER_HUB_API } else { &self.registry }
    }

    /// Returns the name of the registry in Docker's configuration.
    #[cfg(feature = "registry")]
    pub(crate) fn credentials_key(&self) -> &str {
        if self.is_at(DOCKER_HUB_API) { "https://index.docker.io/v1/" } else { &self.registry }
    }

    /// Returns whether a host in Docker's configuration is its registry.
    #[cfg(feature = "registry")]
    pub(crate) fn is_at(&self, host: &str) -> bool {
        let is_hub = |host: &str| DOCKER_HUB.contains(&host) || host == DOCKER_HUB_API;
        host == self.registry || (is_hub(host) && is_hub(&self.registry))
    }

    /// Returns the digest or, without one, the tag: the last part of the manifest's URL.
    #[cfg(feature = "registry")]
    pub(crate) fn manifest(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or("latest")
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = |problem: String| {
            format!(
                "cannot parse the reference \"{}\": {problem}; \
                 expected HOST[:PORT]/REPOSITORY[:TAG][@sha256:HEX]",
                text.escape_debug()
            )
        };
        let (registry, path) = text.split_once('/').ok_or_else(|| fail("it has no repository".into()))?;
        if !is_host(registry) {
            return Err(fail(format!("\"{}\" is not a host", registry.escape_debug())));
        }
        let (path, digest) = match path.split_once('@') {
            Some((path, digest)) => (path, Some(digest)),
            None => (path, None),
        };
        if let Some(digest) = digest.filter(|digest| !is_digest(digest)) {
            return Err(fail(format!("\"{}\" is not a sha256 digest", digest.escape_debug())));
        }
        let (repository, tag) = match path.rsplit_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, None),
        };
        if let Some(tag) = tag.filter(|tag| !is_tag(tag)) {
            return Err(fail(invalid_tag(tag)));
        }
        if repository.len() > MAX_REPOSITORY_BYTES || !repository.split('/').all(is_repository_part) {
            return Err(fail(format!(
                "\"{}\" is not a repository: use lower case letters, digits, `.`, `_`, `-` and `/`",
                repository.escape_debug()
            )));
        }
        let tag = tag.or_else(|| digest.is_none().then_some("latest"));
        Ok(Self {
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest: digest.map(str::to_owned),
        })
    }
}

/// Returns whether a text is a valid tag.
pub(super) fn is_tag(tag: &str) -> bool {
    let rest = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && tag.len() <= 128
        && tag.chars().all(rest)
}

/// Describes a tag that is not valid.
pub(super) fn invalid_tag(tag: &str) -> String {
    let tag = tag.escape_debug();
    format!("\"{tag}\" is not a valid tag: use up to 128 letters, digits, `_`, `.` and `-`")
}

/// Accepts names, IPv4 addresses and IPv6 addresses in brackets, with an optional port.
fn is_host(text: &str) -> bool {
    let (host, rest) = match text.strip_prefix('[').and_then(|text| text.split_once(']')) {
        Some((address, rest)) if address.parse::<std::net::Ipv6Addr>().is_ok() => ("v6", rest),
        Some(_) => return false,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let letter = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let port = rest.strip_prefix(':');
    let port = port.map_or(rest.is_empty(), |port| port.parse::<u16>().is_ok_and(|port| port > 0));
    !host.is_empty() && host.len() <= 253 && host.chars().all(letter) && !host.starts_with(['.', '-']) && port
}

fn is_repository_part(part: &str) -> bool {
    let letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    part.starts_with(letter)
        && part.ends_with(letter)
        && part.chars().all(|c| letter(c) || matches!(c, '.' | '_' | '-'))
        && !part.contains("..")
}

fn is_digest(digest: &str) -> bool {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    digest.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 64 && hex.bytes().all(digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Reference {
        text.parse().unwrap()
    }

    #[test]
    fn references_are_parsed_and_written_back() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for text in [
            "registry.example.com/team/policy:1.0".to_owned(),
            "localhost:5000/p:1".to_owned(),
            "[::1]:5000/a/b_c-d.e:x".to_owned(),
            format!("r.example/p@{digest}"),
            format!("r.example/p:1@{digest}"),
        ] {
            assert_eq!(parsed(&text).to_string(), text);
            assert!(Reference::looks_like_one(&text), "{text}");
        }
        assert_eq!(parsed("r.example/p").tag.as_deref(), Some("latest"));
        assert_eq!(parsed(&format!("r.example/p@{digest}")).tag, None, "a digest needs no tag");
        for text in ["./dir/file.wasm", "dir/file.wasm", "file.wasm", "../x/y"] {
            assert!(!Reference::looks_like_one(text), "{text}");
        }
    }

    #[test]
    fn malformed_references_are_reported_with_the_part_that_is_wrong() {
        for (text, part) in [
            ("r.example", "it has no repository"),
            ("r.example:0/p", "\"r.example:0\" is not a host"),
            ("user@r.example/p", "\"user@r.example\" is not a host"),
            ("r.example/p:-x", "\"-x\" is not a valid tag"),
            ("r.example/p@sha256:12", "\"sha256:12\" is not a sha256 digest"),
            ("r.example/Team/p", "\"Team/p\" is not a repository"),
            ("r.example/../p", "\"../p\" is not a repository"),
            ("r.example/a//b", "is not a repository"),
            ("r.example/p?x=1:1", "is not a repository"),
            ("[::1/p", "is not a host"),
        ] {
            let error = text.parse::<Reference>().unwrap_err();
            assert!(error.contains(part) && error.contains("expected HOST"), "{text}: {error}");
        }
        let long = format!("r.example/{}:1", "a".repeat(300));
        assert!(long.parse::<Reference>().is_err());
    }

    #[cfg(feature = "registry")]
    #[test]
    fn docker_hub_has_an_api_host_and_a_key_of_its_own() {
        let hub = parsed("docker.io/team/policy:1");
        assert_eq!(
            (hub.api_host(), hub.credentials_key()),
            ("registry-1.docker.io", "https://index.docker.io/v1/")
        );
        let other = parsed("r.example:5000/p");
        assert_eq!((other.api_host(), other.credentials_key()), ("r.example:5000", "r.example:5000"));
        assert_eq!((hub.manifest(), other.manifest()), ("1", "latest"));
    }
}
