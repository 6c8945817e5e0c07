//! The cryptography of this process.

use std::sync::{Arc, LazyLock};

use rustls::{
    SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    version::{TLS12, TLS13},
};

/// The only implementation.
pub static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| Arc::new(ring::default_provider()));

static ONLY_TLS13: [&SupportedProtocolVersion; 1] = [&TLS13];
static ALL: [&SupportedProtocolVersion; 2] = [&TLS13, &TLS12];

/// Returns the versions of TLS that are spoken.
pub fn versions(only_tls13: bool) -> &'static [&'static SupportedProtocolVersion] {
    if only_tls13 { &ONLY_TLS13 } else { &ALL }
}
