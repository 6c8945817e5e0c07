//! Copies the host's rooms that threads share without a lock, as they are, but for the names of what they are built on: atomics,
//! locks and threads are the model checker's. Each flaw is one more copy of all of them, with one rule broken.

use std::{env, fmt::Write as _, fs, path::Path};

#[path = "build/flaws.rs"]
mod flaws;

use flaws::{FLAWS, Flaw};

/// The host's rooms.
const ROOMS: [(&str, &str); 7] = [
    ("bytes", "workers/src/index/bytes.rs"),
    ("cells", "workers/src/index/cells.rs"),
    ("shards", "workers/src/index/shards.rs"),
    ("names", "workers/src/index/names.rs"),
    ("lookup", "workers/src/index/lookup.rs"),
    ("breaker", "workers/src/breaker.rs"),
    ("ticker", "policy-runtime/src/ticker.rs"),
];

/// What drives them.
const MODELS: [&str; 5] = ["cells", "shards", "lookup", "breaker", "ticker"];

/// What a copy says instead.
const NAMES: [(&str, &str); 9] = [
    ("use crate::sync::", "use crate::stand_in::sync::"),
    ("use std::", "use crate::stand_in::"),
    ("use arc_swap::", "use crate::stand_in::"),
    ("use parking_lot::", "use crate::stand_in::"),
    ("use tokio::", "use crate::stand_in::"),
    ("pub(super) ", "pub(crate) "),
    // Few, for each is made anew for every execution.
    ("const SHARDS: usize = 256;", "const SHARDS: usize = 2;"),
    ("const CHUNK: usize = 256;", "const CHUNK: usize = 2;"),
    // Its idle ticks are all alike.
    ("const LINGER: u32 = 3;", "const LINGER: u32 = 1;"),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let out = env::var("OUT_DIR")?;
    let here = env::var("CARGO_MANIFEST_DIR")?;
    println!("cargo::rerun-if-changed=build");
    let mut all = copy(&here, &out, "sound", None)?;
    let mut list = "pub(crate) const FLAWS: &[crate::Model] = &[\n".to_owned();
    for (number, flaw) in FLAWS.iter().enumerate() {
        let name = format!("flaw_{number}");
        all += &copy(&here, &out, &name, Some(flaw))?;
        let (room, what, model) = (flaw.room, flaw.what, flaw.model);
        writeln!(list, "(\"{room}: {what}\", {name}::{room}_model::{model}, 0),")?;
    }
    fs::write(Path::new(&out).join("all.rs"), all + &list + "];\n")?;
    Ok(())
}

/// Writes one copy of everything; answers the module that holds it.
fn copy(
    here: &str,
    out: &str,
    name: &str,
    flaw: Option<&Flaw>,
) -> Result<String, Box<dyn std::error::Error>> {
    let folder = Path::new(out).join(name);
    fs::create_dir_all(&folder)?;
    let mut module = format!("#[allow(dead_code, unreachable_pub, clippy::all)]\npub(crate) mod {name} {{\n");
    for (room, path) in ROOMS {
        let path = format!("{here}/../../host/{path}");
        println!("cargo::rerun-if-changed={path}");
        let text = fs::read_to_string(&path)?;
        let mut text = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
        for (from, to) in flaw.filter(|flaw| flaw.room == room).map_or(&[][..], |flaw| flaw.changes) {
            if text.matches(from).count() != 1 {
                return Err(format!("{path} has not once what a flaw changes: {from}").into());
            }
            text = text.replace(from, to);
        }
        for (from, to) in NAMES {
            text = text.replace(from, to);
        }
        let to = folder.join(format!("{room}.rs"));
        fs::write(&to, text)?;
        writeln!(module, "#[path = {to:?}]\npub(crate) mod {room};")?;
    }
    for model in MODELS {
        let path = format!("{here}/src/models/{model}.rs");
        writeln!(module, "#[path = {path:?}]\npub(crate) mod {model}_model;")?;
    }
    // What the index itself says of these.
    Ok(module + "pub(crate) use lookup_model::{Candidate, Matched, Shared};\n}\n")
}
