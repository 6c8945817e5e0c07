//! Assembles the modules that `src/main.rs` includes: files of the product, and for every flaw the same files
//! with one rule broken.
//!
//! The files are compiled from where they are, with `cfg(loom)`; their `crate::sync` then gives them loom's
//! types. Only a flaw is a text: one file with one change, written to `OUT_DIR`. The product itself has no
//! hooks for them.

use std::{env, fmt::Write as _, fs, path::Path};

#[path = "build/flaws.rs"]
mod flaws;

use flaws::{FLAWS, Flaw};

/// The files under test, as modules.
const FILES: [(&str, &str); 18] = [
    ("breaker", "host/workers/src/breaker.rs"),
    ("covers", "crates/prefix-index/src/index/covers.rs"),
    ("gates", "crates/prefix-index/src/index/gates.rs"),
    ("holder_rows", "crates/prefix-index/src/index/holder_rows.rs"),
    ("holders", "crates/prefix-index/src/index/holders.rs"),
    ("invariants", "crates/prefix-index/src/index/invariants.rs"),
    ("locate", "crates/prefix-index/src/index/locate.rs"),
    ("lockfree_map", "crates/prefix-index/src/index/lockfree_map.rs"),
    ("lookup", "crates/prefix-index/src/index/lookup.rs"),
    ("memory", "crates/prefix-index/src/index/memory.rs"),
    ("mixer", "crates/prefix-index/src/index/mixer.rs"),
    ("reach", "crates/prefix-index/src/index/reach.rs"),
    ("recorded", "crates/prefix-index/src/index/recorded.rs"),
    ("segments", "crates/prefix-index/src/index/segments.rs"),
    ("shared", "crates/prefix-index/src/index/shared.rs"),
    ("ticker", "host/policy-runtime/src/ticker.rs"),
    ("trail", "crates/prefix-index/src/index/trail.rs"),
    ("tree", "crates/prefix-index/src/index/tree.rs"),
];

/// The files of `src/models`; each has the models of the file of the same name.
const MODELS: [&str; 5] = ["breaker", "lockfree_map", "lookup", "ticker", "tree"];

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rustc-check-cfg=cfg(loom)");
    println!("cargo::rustc-cfg=loom");
    let out = env::var("OUT_DIR")?;
    let here = env::var("CARGO_MANIFEST_DIR")?;
    let mut all = module(&here, &out, "sound", None)?;
    let mut list = "pub(crate) const FLAWS: &[crate::Model] = &[\n".to_owned();
    for (number, flaw) in FLAWS.iter().enumerate() {
        let name = format!("flaw_{number}");
        all += &module(&here, &out, &name, Some(flaw))?;
        let Flaw { file, what, model, .. } = flaw;
        // The models of the tree are those of its segments.
        let models = if *file == "segments" { "tree" } else { *file };
        writeln!(list, "(\"{file}: {what}\", {name}::{models}_model::{model}, 0),")?;
    }
    fs::write(Path::new(&out).join("all.rs"), all + &list + "];\n")?;
    Ok(())
}

/// Returns a module with all files and models. The file that a flaw changes is its changed copy.
fn module(here: &str, out: &str, name: &str, flaw: Option<&Flaw>) -> Result<String> {
    let mut module = format!("#[allow(dead_code, unreachable_pub, clippy::all)]\npub(crate) mod {name} {{\n");
    // The files import it from their parent.
    module += "pub(crate) use crate::id::Candidate;\n";
    for (file, path) in FILES {
        let mut path = format!("{here}/../../{path}");
        println!("cargo::rerun-if-changed={path}");
        if let Some(flaw) = flaw.filter(|flaw| flaw.file == file) {
            let changed = format!("{out}/{name}_{file}.rs");
            fs::write(&changed, flaw.apply(&path, &fs::read_to_string(&path)?)?)?;
            path = changed;
        }
        writeln!(module, "#[path = {path:?}]\npub(crate) mod {file};")?;
    }
    for model in MODELS {
        writeln!(module, "#[path = \"{here}/src/models/{model}.rs\"]\npub(crate) mod {model}_model;")?;
    }
    Ok(module + "}\n")
}
