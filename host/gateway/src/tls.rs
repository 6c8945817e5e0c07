//! TLS of the listeners and towards engines: certificates from files that may change, and the names of
//! clients.
//!
//! ```text
//! files -> pem (read, bounded) -> server  (check, build) -> listeners (in force; new handshakes use it)
//!                              -> engines (check, build) -> `EngineTls` of the workers
//! ```

mod changes;
mod context;
mod engines;
mod listeners;
mod names;
mod server;

pub(crate) use context::{Loaded, TlsContext};
pub(crate) use listeners::{Handshake, ListenerTls};
pub(crate) use names::CertificateNames;
