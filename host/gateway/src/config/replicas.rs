//! `[replicas]`: exchange of load between the gateways of a fleet, over NATS.

use std::{path::PathBuf, time::Duration};

use pointsman_config_file::{
    Report,
    duration::{millis, secs, text},
    section,
};
use pointsman_workers::url_without_secrets;

/// Maximum length of the name of a gateway or of a fleet, bytes.
const MAX_NAME: usize = 64;
/// Longest lease. The load of a gateway that stopped without a word counts until its lease ends.
const MAX_LEASE: Duration = secs(300);

/// Exchange of load between the gateways of one fleet; see replicas.md.
#[section(restart, rules)]
pub struct Replicas {
    /// NATS servers, tried in turn: ["tls://nats-1:4222"]; empty: no exchange.
    pub servers: Vec<String>,
    /// Name of the fleet, part of the subjects; the same for all its gateways.
    #[key(default = "default".to_owned())]
    pub fleet: String,
    /// Name of this gateway, unique in the fleet; empty: host name and port.
    pub name: String,
    /// Least time between two batches of changes.
    #[key(default = millis(5), range = millis(1)..=secs(1), reason = "is out of range")]
    pub interval: Duration,
    /// Time between two messages with all bookings, which make up for lost ones.
    #[key(default = secs(10), range = millis(200)..=secs(3_600), reason = "is out of range")]
    pub snapshot_interval: Duration,
    /// How long others count the load of a gateway that is silent.
    #[key(default = secs(3), range = millis(200)..=MAX_LEASE, reason = "is out of range")]
    pub lease: Duration,
    /// User, with password_file; or token_file, nkey_file or credentials_file; default: none.
    #[key(example = "\"pointsman\"")]
    pub username: Option<String>,
    /// File with the user's password. These files are read again for each connection.
    #[key(example = "\"/etc/pointsman/nats-password\"")]
    pub password_file: Option<PathBuf>,
    /// File with a token.
    #[key(example = "\"/etc/pointsman/nats-token\"")]
    pub token_file: Option<PathBuf>,
    /// File with the seed of an NKey, SU….
    #[key(example = "\"/etc/pointsman/nats.nk\"")]
    pub nkey_file: Option<PathBuf>,
    /// File with a JWT and an NKey seed, as nsc writes it.
    #[key(example = "\"/etc/pointsman/nats.creds\"")]
    pub credentials_file: Option<PathBuf>,
    /// TLS towards the servers; no table: TLS only for tls:// or if the server asks for it.
    pub tls: Option<ReplicasTls>,
}

/// TLS towards the NATS servers.
#[section]
#[derive(Eq)]
pub struct ReplicasTls {
    /// PEM file with the authorities that sign the servers' certificates; default: those of the system.
    #[key(example = "\"/etc/pointsman/nats-ca.crt\"")]
    pub ca_file: Option<PathBuf>,
    /// PEM file with the certificate of this gateway.
    #[key(example = "\"/etc/pointsman/gateway.crt\"")]
    pub cert_file: Option<PathBuf>,
    /// PEM file with its key.
    #[key(example = "\"/etc/pointsman/gateway.key\"")]
    pub key_file: Option<PathBuf>,
}

impl Replicas {
    fn rules(&self, report: &mut Report<'_>) {
        if !self.servers.is_empty() && cfg!(not(feature = "replicas")) {
            report.add("servers", "this build cannot use NATS: build it with the feature `replicas`");
        }
        for (number, url) in self.servers.iter().enumerate() {
            let host = url.strip_prefix("nats://").or_else(|| url.strip_prefix("tls://"));
            if !host.is_some_and(|host| !host.is_empty() && !host.contains(['@', '/', '?', '#'])) {
                let shown = url_without_secrets(url);
                let message = format!(
                    "`{shown}` is not the URL of a NATS server: expected `nats://HOST:PORT` or `tls://HOST:PORT`"
                );
                report.add(&format!("servers[{number}]"), message);
            }
        }
        for (key, name) in [("fleet", &self.fleet), ("name", &self.name)] {
            let fits = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
            let given = !name.is_empty() || key == "name";
            if !given || !fits || name.len() > MAX_NAME {
                let message =
                    format!("`{name}` is not a name: expected up to {MAX_NAME} letters, digits, `-` and `_`");
                report.add(key, message);
            }
        }
        if self.lease < self.interval * 8 {
            let message =
                format!("`{}` is less than 8 times `replicas.interval`: use a longer one", text(self.lease));
            report.add("lease", message);
        }
        self.check_credentials(report);
    }

    fn check_credentials(&self, report: &mut Report<'_>) {
        let Self { username, password_file, token_file, nkey_file, credentials_file, tls, .. } = self;
        report.pair(("username", username.is_some()), ("password_file", password_file.is_some()));
        if let Some(tls) = tls {
            let (cert, key) = (tls.cert_file.is_some(), tls.key_file.is_some());
            report.at("tls").pair(("cert_file", cert), ("key_file", key));
        }
        let files = [
            ("credentials_file", credentials_file.is_some()),
            ("nkey_file", nkey_file.is_some()),
            ("token_file", token_file.is_some()),
        ];
        let given = || files.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key);
        if let Some(key) = given().next().filter(|_| given().count() + usize::from(username.is_some()) > 1) {
            let message = "only one of `username`, `token_file`, `nkey_file` and `credentials_file` may be given: \
                           remove the others";
            report.add(key, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use pointsman_config_file::Section as _;

    use super::*;

    #[test]
    fn values_that_cannot_serve_are_named() {
        let mut wrong = Replicas {
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
        let mut problems = Vec::new();
        wrong.check(&mut Report::new(&mut problems).at("replicas"));
        let paths: Vec<&str> = problems.iter().map(|problem| problem.path.as_str()).collect();
        let expected = [
            "replicas.interval",
            "replicas.snapshot_interval",
            "replicas.lease",
            "replicas.servers[0]",
            "replicas.servers[1]",
            "replicas.fleet",
            "replicas.name",
            "replicas.username",
            "replicas.tls.key_file",
            "replicas.token_file",
        ];
        assert_eq!(paths, expected);
        assert!(!problems.iter().any(|problem| problem.message.contains("secret@")), "{problems:?}");
        let mut problems = Vec::new();
        Replicas::default().check(&mut Report::new(&mut problems));
        assert!(problems.is_empty());
    }
}
