//! Policies as OCI artifacts: in an image layout on disk.

mod artifact;
mod error;
mod layout;

pub(crate) use artifact::{Artifact, Metadata};
pub(crate) use layout::{Layout, replace};
