//! `policies`: builds every policy of the tree into a component.

use std::path::PathBuf;

use anyhow::Context as _;
use pointsman_guest_build::GuestBuild;
use sha2::{Digest, Sha256};

use crate::{setup, sh};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Folder for the components [default: target/policies].
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Builds each folder of policies/ that has a policy.toml.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    setup::run()?;
    let out = args.out.clone().unwrap_or_else(|| sh::root().join("target/policies"));
    std::fs::create_dir_all(&out).with_context(|| out.display().to_string())?;
    let mut names = Vec::new();
    for entry in std::fs::read_dir(sh::root().join("policies"))? {
        let entry = entry?;
        if entry.path().join("policy.toml").is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    for name in names {
        let bytes = GuestBuild::new(&sh::root(), &format!("policy-{name}")).build()?;
        let path = out.join(format!("{name}.wasm"));
        std::fs::write(&path, &bytes).with_context(|| path.display().to_string())?;
        let digest: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        sh::print(&format!("{name:<20} {:>8} bytes  sha256 {digest}", bytes.len()));
    }
    Ok(())
}
