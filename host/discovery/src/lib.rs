//! Discovery of workers.
//!
//! A [`Source`] reads workers from one place and reports whole snapshots of them. The [`Fleet`] merges the
//! snapshots of all sources and applies what changed to the registry:
//!
//! ```text
//! file, leases, DNS, etcd, Kubernetes          the configuration    operators
//!      |  whole snapshots, or "away"                  |                 |
//!      v                                              v                 v
//!    guard (mass removals wait)                     merge: one owner for each id and URL
//!      +--------------------------------------------> |
//!                                                      v
//!                                        registry (leaving workers drain first)
//! ```
//! A whole snapshot cannot drift from its source: what a source missed is in its next one. A source that is
//! away reports no snapshot, so its last one stays in force.
//!
//! This crate serves no HTTP and knows no request.

mod fleet;
mod found;
mod guard;
mod leases;
mod merge;
mod source;
mod sources;

pub use fleet::{
    DismissedWorker, Fleet, FleetRules, FleetStatus, Refused, Reporter, SourceState, SourceStatus,
};
pub use found::{Found, Read, Refusal, SourceSnapshot};
pub use guard::GuardRules;
pub use leases::{LeaseError, LeaseRules, Leases};
pub use source::{Source, start};
pub use sources::dns::{DnsSource, DnsSourceConfig};
#[cfg(feature = "etcd")]
pub use sources::etcd::{EtcdSource, EtcdSourceConfig};
pub use sources::file::{FileFormat, FileSource, FileSourceConfig, has_known_syntax};
#[cfg(any(feature = "etcd", feature = "kubernetes"))]
pub use sources::http::TlsFiles;
#[cfg(feature = "kubernetes")]
pub use sources::kubernetes::{KubernetesSource, KubernetesSourceConfig, PortOfWorker, Resource};
pub use sources::scheme::Scheme;
