//! Assembles the modules that `src/main.rs` includes: the host's own files, and for every flaw the same files
//! with one rule broken.
//!
//! The host's files are compiled from where they are, with `cfg(loom)`; their `crate::sync` then gives them
//! loom's types. Only a flaw is a text: one file of the host with one change, written to `OUT_DIR`. The host
//! itself has no hooks for them.

use std::{env, fmt::Write as _, fs, path::Path};

#[path = "build/flaws.rs"]
mod flaws;

use flaws::{FLAWS, Flaw};

/// The host's files under test, as modules.
const FILES: [(&str, &str); 15] = [
    ("breaker", "workers/src/breaker.rs"),
    ("covers", "workers/src/index/covers.rs"),
    ("gates", "workers/src/index/gates.rs"),
    ("holder_rows", "workers/src/index/holder_rows.rs"),
    ("holders", "workers/src/index/holders.rs"),
    ("lockfree_map", "workers/src/index/lockfree_map.rs"),
    ("lookup", "workers/src/index/lookup.rs"),
    ("memory", "workers/src/index/memory.rs"),
    ("reach", "workers/src/index/reach.rs"),
    ("recorded", "workers/src/index/recorded.rs"),
    ("segments", "workers/src/index/segments.rs"),
    ("shared", "workers/src/index/shared.rs"),
    ("ticker", "policy-runtime/src/ticker.rs"),
    ("trail", "workers/src/index/trail.rs"),
    ("tree", "workers/src/index/tree.rs"),
];

/// The files of `src/models`; each has the models of the host's file of the same name.
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
    // The host's files import it from their parent.
    module += "pub(crate) use crate::id::Candidate;\n";
    for (file, path) in FILES {
        let mut path = format!("{here}/../../host/{path}");
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
