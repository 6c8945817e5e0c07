//! Builds the built-in policies, so that a binary cannot be built without them.

use std::{env, error::Error, fs, path::PathBuf};

use pointsman_guest_build::GuestBuild;

const POLICIES: [&str; 9] = [
    "least-loaded",
    "kv-aware",
    "predicted-latency",
    "queue-kv-prefix",
    "cache-aware",
    "longest-prefix",
    "conditional-disagg",
    "predicted-disagg",
    "formula",
];

fn main() -> Result<(), Box<dyn Error>> {
    let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    for name in POLICIES {
        let bytes = GuestBuild::new(&workspace, &format!("policy-{name}")).build()?;
        fs::write(out.join(format!("{name}.wasm")), bytes)?;
        println!("cargo:rerun-if-changed=../{name}/src");
        println!("cargo:rerun-if-changed=../{name}/Cargo.toml");
    }
    let filter = GuestBuild::new(&workspace, "policy-formula").features("filter").build()?;
    fs::write(out.join("formula-filter.wasm"), filter)?;
    println!("cargo:rerun-if-changed=../../host/formula/src");
    println!("cargo:rerun-if-changed=../sdk/src");
    println!("cargo:rerun-if-changed=../../wit/policy.wit");
    Ok(())
}
