//! TLS of the listeners: certificates from files that may change, and the names of clients.
//!
//! ```text
//! files -> pem (read, bounded) -> server (check, build) -> listeners (in force; new handshakes use it)
//! ```

mod listeners;
mod names;
mod pem;
mod server;
mod x509;

pub(crate) use listeners::{Handshake, ListenerTls, Loaded, TlsListeners};
pub(crate) use names::CertificateNames;
