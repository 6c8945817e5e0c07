//! Certificates and keys from PEM files, read within bounds and checked, and what a TLS client makes of them.

mod client;
pub mod pem;
pub mod provider;
pub mod x509;

pub use client::{client_config, system_roots};
