//! Policies as OCI artifacts: in an image layout on disk or in a registry.

mod artifact;
mod error;
mod layout;
#[cfg(not(feature = "registry"))]
mod no_registry;
#[cfg(feature = "registry")]
mod registry;

pub(crate) use artifact::{Artifact, Metadata};
pub(crate) use layout::Layout;
#[cfg(not(feature = "registry"))]
pub(crate) use no_registry::RegistryArgs;
#[cfg(feature = "registry")]
pub(crate) use registry::RegistryArgs;
