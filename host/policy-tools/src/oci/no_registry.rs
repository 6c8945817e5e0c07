//! Stands in for registries in a build without the feature `registry`.

use anyhow::bail;
use clap::Args;

use super::artifact::Artifact;
use crate::place::Reference;

/// Options of registries: none.
#[derive(Debug, Args)]
pub(crate) struct RegistryArgs {}

impl RegistryArgs {
    /// Fails: this build cannot push to registries.
    pub(crate) fn push(&self, reference: &Reference, _artifact: &Artifact) -> anyhow::Result<String> {
        bail!("cannot push {reference}: {PROBLEM}")
    }

    /// Fails: this build cannot pull from registries.
    pub(crate) fn pull(&self, reference: &Reference) -> anyhow::Result<(Artifact, String)> {
        bail!("cannot pull {reference}: {PROBLEM}")
    }
}

const PROBLEM: &str = "this binary was built without the feature `registry`; \
                       use an image layout (oci:DIR:TAG) and copy it with an OCI tool";
