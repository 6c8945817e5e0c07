//! Whether an engine whose URL begins with `http://` speaks TLS. Such engines do not say so: most of them
//! only close the connection, and others answer with an alert or with status 400.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use http::Uri;
use rustls::{ClientConfig, ClientConnection, RootCertStore, crypto::ring};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

use crate::{resolver::Resolver, tls::server_name};

/// What operators read about such an engine.
pub(super) const PROBLEM: &str = "the engine speaks TLS here: begin the worker's url with https://";
/// How long the engine may take to answer.
const LIMIT: Duration = Duration::from_secs(1);

/// Settings of the question. No authority is trusted, since only the first bytes of the answer count.
static SETTINGS: LazyLock<Option<Arc<ClientConfig>>> = LazyLock::new(|| {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
    Some(Arc::new(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth()))
});

/// Returns whether the engine answers the first message of TLS with one of TLS.
pub(super) async fn speaks_tls(url: &str, names: &Resolver) -> bool {
    let answer = tokio::time::timeout(LIMIT, first_bytes(url, names)).await;
    // A part of a handshake, or an alert.
    matches!(answer, Ok(Some([0x16 | 0x15, 3])))
}

async fn first_bytes(url: &str, names: &Resolver) -> Option<[u8; 2]> {
    let url: Uri = url.parse().ok()?;
    let host = url.host()?;
    let mut hello = Vec::new();
    let name = server_name(host, None).ok()?;
    ClientConnection::new((*SETTINGS).clone()?, name).ok()?.write_tls(&mut hello).ok()?;
    let addresses = names.addresses(&format!("{host}:{}", url.port_u16().unwrap_or(80))).await.ok()?;
    let mut stream = TcpStream::connect(addresses.as_slice()).await.ok()?;
    stream.write_all(&hello).await.ok()?;
    let mut bytes = [0; 2];
    stream.read_exact(&mut bytes).await.ok()?;
    Some(bytes)
}
