//! The places that workers are read from.

mod blocking;
pub(crate) mod dns;
#[cfg(feature = "etcd")]
pub(crate) mod etcd;
pub(crate) mod file;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
pub(crate) mod http;
#[cfg(feature = "kubernetes")]
pub(crate) mod kubernetes;
mod llm_d_role;
pub(crate) mod scheme;
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
mod table;
