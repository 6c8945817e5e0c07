//! Settings of the exchange.

use std::{path::PathBuf, time::Duration};

/// Settings of the exchange.
#[derive(Clone, Debug)]
pub struct ReplicasConfig {
    /// URLs of NATS servers, tried in turn.
    pub servers: Vec<String>,
    /// Name of the fleet: a part of the subject.
    pub fleet: String,
    /// Name of this gateway: a part of the subject.
    pub name: String,
    /// Tokens in a block of this gateway.
    pub block_size: u32,
    /// Time between two batches.
    pub interval: Duration,
    /// Time between two snapshots.
    pub snapshot_interval: Duration,
    /// How long this gateway counts as alive after a message.
    pub lease: Duration,
    /// How the gateway proves who it is.
    pub credentials: Credentials,
    /// TLS; `None`: only if the server or a URL asks for it.
    pub tls: Option<TlsFiles>,
}

/// How the gateway proves who it is. Files are read for each connection.
#[derive(Clone, Debug, Default)]
pub enum Credentials {
    /// The gateway does not authenticate.
    #[default]
    None,
    /// User, and a file with the password.
    User(String, PathBuf),
    /// File with a token.
    Token(PathBuf),
    /// File with the seed of an NKey.
    NKey(PathBuf),
    /// File with a JWT and the seed of an NKey, as `nsc` writes it.
    Jwt(PathBuf),
}

/// Files of TLS, read for each connection.
#[derive(Clone, Debug, Default)]
pub struct TlsFiles {
    /// Authorities that sign the server's certificate; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Certificate and key of this gateway.
    pub client: Option<(PathBuf, PathBuf)>,
}
