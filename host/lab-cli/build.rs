//! Builds the policy that the demo uses as a policy with an endless loop.

use std::{env, error::Error, fs, path::PathBuf};

use pointsman_guest_build::GuestBuild;

fn main() -> Result<(), Box<dyn Error>> {
    let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let bytes = GuestBuild::new(&workspace, "guest-hostile").build()?;
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("looping.wasm"), bytes)?;
    println!("cargo:rerun-if-changed=../../tests/guests/hostile");
    println!("cargo:rerun-if-changed=../../policies/sdk/src");
    println!("cargo:rerun-if-changed=../../wit/policy.wit");
    Ok(())
}
