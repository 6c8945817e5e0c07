//! `[replicas]`: exchange of load between the gateways of a fleet, over NATS.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Problem, duration};

/// Most bytes of the name of a gateway or of a fleet.
const MAX_NAME: usize = 64;
/// Longest lease. The load of a gateway that stopped without a word counts until its lease ends.
const MAX_LEASE: Duration = Duration::from_secs(300);

/// `[replicas]`: the gateways of a fleet send each other their bookings.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Replicas {
    /// URLs of NATS servers, tried in turn; empty: this gateway exchanges nothing.
    pub servers: Vec<String>,
    /// Name of the fleet, a part of the subjects.
    pub fleet: String,
    /// Name of this gateway, a part of its subject; empty: the names of its host and its port.
    pub name: String,
    /// Time between two batches of changes.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
    /// Time between two messages with all bookings, which repair what was lost.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub snapshot_interval: Duration,
    /// How long the others count the bookings of this gateway when they hear nothing of it.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub lease: Duration,
    /// User; none: no password.
    pub username: Option<String>,
    /// File with the user's password.
    pub password_file: Option<PathBuf>,
    /// File with a token.
    pub token_file: Option<PathBuf>,
    /// File with a JWT and an NKey seed, as `nsc` writes it.
    pub credentials_file: Option<PathBuf>,
    /// TLS; `None`: only if the server or a URL asks for it.
    pub tls: Option<ReplicasTls>,
}

/// `[replicas.tls]`: TLS towards the NATS servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReplicasTls {
    /// PEM file with the authorities that sign the servers' certificates; none: those of the system.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the certificate of this gateway.
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
}

impl Default for Replicas {
    fn default() -> Self {
        Self {
            servers: Vec::new(),
            fleet: "default".to_owned(),
            name: String::new(),
            interval: Duration::from_millis(5),
            snapshot_interval: Duration::from_secs(10),
            lease: Duration::from_secs(3),
            username: None,
            password_file: None,
            token_file: None,
            credentials_file: None,
            tls: None,
        }
    }
}

impl Replicas {
    /// Returns what is wrong with the values.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut add =
            |key: &str, message: String| problems.push(Problem::new(format!("replicas.{key}"), message));
        if !self.servers.is_empty() && cfg!(not(feature = "replicas")) {
            add("servers", "this build cannot use NATS: build it with the feature `replicas`".to_owned());
        }
        for (number, url) in self.servers.iter().enumerate() {
            let host = url.strip_prefix("nats://").or_else(|| url.strip_prefix("tls://"));
            if !host.is_some_and(|host| !host.is_empty() && !host.contains(['@', '/', '?', '#'])) {
                let shown = if url.contains('@') { "[secret]" } else { url };
                let message = format!(
                    "`{shown}` is not the URL of a NATS server: expected `nats://HOST:PORT` or `tls://HOST:PORT`"
                );
                add(&format!("servers[{number}]"), message);
            }
        }
        for (key, name) in [("fleet", &self.fleet), ("name", &self.name)] {
            let fits = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
            let given = !name.is_empty() || key == "name";
            if !given || !fits || name.len() > MAX_NAME {
                let message =
                    format!("`{name}` is not a name: expected up to {MAX_NAME} letters, digits, `-` and `_`");
                add(key, message);
            }
        }
        self.check_times(&mut add);
        self.check_pairs(&mut add);
        problems
    }

    fn check_times(&self, add: &mut impl FnMut(&str, String)) {
        let between = |time: Duration, least: Duration, most: Duration| (least..=most).contains(&time);
        let (millisecond, second) = (Duration::from_millis(1), Duration::from_secs(1));
        if !between(self.interval, millisecond, second) {
            add("interval", format!("`{:?}` is out of range: expected 1ms to 1s", self.interval));
        }
        if !between(self.lease, 200 * millisecond, MAX_LEASE) {
            add("lease", format!("`{:?}` is out of range: expected 200ms to 5m", self.lease));
        } else if self.lease < self.interval * 8 {
            add(
                "lease",
                format!("`{:?}` is less than 8 times `replicas.interval`: use a longer one", self.lease),
            );
        }
        if !between(self.snapshot_interval, 200 * millisecond, 3_600 * second) {
            let message = format!("`{:?}` is out of range: expected 200ms to 1h", self.snapshot_interval);
            add("snapshot_interval", message);
        }
    }

    fn check_pairs(&self, add: &mut impl FnMut(&str, String)) {
        let Self { username, password_file, token_file, credentials_file, .. } = self;
        let tls = self.tls.as_ref();
        let has = |file: fn(&ReplicasTls) -> &Option<PathBuf>| tls.is_some_and(|tls| file(tls).is_some());
        let pairs = [
            ("username", "password_file", username.is_some(), password_file.is_some()),
            ("tls.cert_file", "tls.key_file", has(|tls| &tls.cert_file), has(|tls| &tls.key_file)),
        ];
        for (one, other, has_one, has_other) in pairs {
            if has_one != has_other {
                let (given, missing) = if has_one { (one, other) } else { (other, one) };
                add(given, format!("needs `replicas.{missing}`, too: give both or none"));
            }
        }
        let ways = [username.is_some(), token_file.is_some(), credentials_file.is_some()];
        if ways.into_iter().filter(|way| *way).count() > 1 {
            let message =
                "only one of `username`, `token_file` and `credentials_file` may be given: remove the others";
            let key = if credentials_file.is_some() { "credentials_file" } else { "token_file" };
            add(key, message.to_owned());
        }
    }

    /// Appends the dotted path of each key whose value differs in `new`.
    pub(super) fn changed_keys(&self, new: &Self, paths: &mut Vec<String>) {
        let Self { servers, fleet, name, interval, snapshot_interval, lease, .. } = self;
        let Self { username, password_file, token_file, credentials_file, tls, .. } = self;
        let keys = [
            ("servers", *servers != new.servers),
            ("fleet", *fleet != new.fleet),
            ("name", *name != new.name),
            ("interval", *interval != new.interval),
            ("snapshot_interval", *snapshot_interval != new.snapshot_interval),
            ("lease", *lease != new.lease),
            ("username", *username != new.username),
            ("password_file", *password_file != new.password_file),
            ("token_file", *token_file != new.token_file),
            ("credentials_file", *credentials_file != new.credentials_file),
            ("tls", *tls != new.tls),
        ];
        paths.extend(
            keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| format!("replicas.{key}")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_cannot_serve_are_named() {
        let wrong = Replicas {
            servers: vec!["http://a:1".to_owned(), "nats://u:secret@a:1".to_owned()],
            fleet: "a.*".to_owned(),
            name: "a b".to_owned(),
            interval: Duration::ZERO,
            snapshot_interval: Duration::ZERO,
            lease: Duration::from_secs(1_000),
            username: Some("u".to_owned()),
            token_file: Some("t".into()),
            tls: Some(ReplicasTls { key_file: Some("k".into()), ..ReplicasTls::default() }),
            ..Replicas::default()
        };
        let problems = wrong.problems();
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let expected = [
            "replicas.servers[0]",
            "replicas.servers[1]",
            "replicas.fleet",
            "replicas.name",
            "replicas.interval",
            "replicas.lease",
            "replicas.snapshot_interval",
            "replicas.username",
            "replicas.tls.key_file",
            "replicas.token_file",
        ];
        assert_eq!(paths, expected);
        assert!(!problems.iter().any(|problem| problem.message.contains("secret@")), "{problems:?}");
        assert!(Replicas::default().problems().is_empty());
    }
}
