//! Builds the test guests, so that a missing one is a compile error of the tests.

use std::{env, error::Error, fs, path::PathBuf};

use pointsman_guest_build::{GuestBuild, Target};

fn main() -> Result<(), Box<dyn Error>> {
    let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../..");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let hostile = GuestBuild::new(&workspace, "guest-hostile");
    fs::write(out.join("hostile.wasm"), hostile.build()?)?;
    fs::write(out.join("hostile-core.wasm"), hostile.core_module().build()?)?;
    let chatty = GuestBuild::new(&workspace, "guest-chatty").target(Target::Wasip2);
    fs::write(out.join("chatty.wasm"), chatty.build()?)?;
    let rogue = GuestBuild::new(&workspace, "guest-rogue");
    fs::write(out.join("rogue-planner.wasm"), rogue.clone().features("decode-override").build()?)?;
    fs::write(
        out.join("rogue-learning-planner.wasm"),
        rogue.clone().features("decode-override,learning").build()?,
    )?;
    let learner = rogue.features("selector,state,learning");
    fs::write(out.join("rogue-learner.wasm"), learner.clone().build()?)?;
    fs::write(out.join("rogue-wasi-learner.wasm"), learner.target(Target::Wasip2).build()?)?;
    for name in ["learned-ttft", "low-queue", "tenant-limit", "weighted-random"] {
        fs::write(
            out.join(format!("{name}.wasm")),
            GuestBuild::new(&workspace, &format!("policy-{name}")).build()?,
        )?;
        println!("cargo:rerun-if-changed=../../policies/{name}/src");
    }
    for path in [
        "hostile/src",
        "chatty/src",
        "rogue/src",
        "rogue/Cargo.toml",
        "../../policies/sdk/src",
        "../../wit/policy.wit",
    ] {
        println!("cargo:rerun-if-changed={path}");
    }
    Ok(())
}
