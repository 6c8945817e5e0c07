//! Checks of a policy file before any of it runs: size, magic number, world, version, imports, compile. Each
//! has its own refusal. Knows neither settings nor instances.

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use pointsman_routing::World;
use wasmtime::{
    Engine, Module,
    component::{Component, Linker},
};
use wit_parser::{WorldId, WorldKey, decoding::DecodedWasm};

use crate::{
    access::{Access, Grant},
    capacity::{MEMORIES_PER_POLICY, TABLES_PER_POLICY},
    catch_panic::catch_panic,
    engine::Limits,
    guest::Guest,
    instance::Linked,
    outline::Outline,
    precheck::{self, Stopped},
    refusal::Refusal,
    split::{Split, import_name},
};

/// WASI interfaces that a guest may import. Their context is empty.
const WASI: [&str; 5] = ["wasi:cli/", "wasi:clocks/", "wasi:filesystem/", "wasi:io/", "wasi:random/"];
/// Package of the contract.
const PACKAGE: &str = "pointsman:policy/";
/// Prefix of the contract versions that this host serves.
const VERSION: &str = "0.1.";

/// How files begin that are taken for policies, and what they are.
const KNOWN: [(&[u8], &str); 10] = [
    (b"\0asm", "cut off, or of another version of WebAssembly"),
    (b"\x7fELF", "a native program or library (ELF)"),
    (b"\x1f\x8b", "compressed (gzip)"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)"),
    (b"PK\x03\x04", "an archive (zip)"),
    (b"(component", "WebAssembly text"),
    (b"(module", "WebAssembly text"),
    (b"<!DOCTYPE", "a page (HTML)"),
    (b"<html", "a page (HTML)"),
    (b"version https://git-lfs", "a pointer of Git LFS"),
];

/// Returns the component in `bytes`. A core module with embedded WIT metadata is encoded as a component.
pub(crate) fn component<'a>(bytes: &'a [u8], limits: &Limits) -> Result<Cow<'a, [u8]>, Refusal> {
    if bytes.len() > limits.file_bytes {
        return Err(Refusal::TooLarge { size: bytes.len(), limit: limits.file_bytes });
    }
    match bytes.get(..8) {
        Some([0, b'a', b's', b'm', _, _, 1, 0]) => {
            check_structure(bytes, limits, Refusal::Malformed)?;
            Ok(Cow::Borrowed(bytes))
        }
        Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {
            let refused = |error: &dyn std::fmt::Display| Refusal::NotAComponent(format!("{error:#}"));
            check_structure(bytes, limits, Refusal::NotAComponent)?;
            let encode = || {
                let encoder = wit_component::ComponentEncoder::default().validate(true).module(bytes);
                encoder.and_then(|mut encoder| encoder.encode())
            };
            match catch_panic(encode) {
                Ok(encoded) => encoded.map(Cow::Owned).map_err(|error| refused(&error)),
                Err(_) => Err(refused(&"its WIT metadata cannot be read")),
            }
        }
        _ => {
            // The file may be a link to a secret, and viewers see the refusal.
            let known = KNOWN.iter().find(|(begin, _)| bytes.starts_with(begin)).map(|(_, kind)| *kind);
            let unknown = || match bytes.len() {
                0 => "empty".to_owned(),
                length => format!("{length} bytes of an unknown type"),
            };
            Err(Refusal::NotWasm(known.map_or_else(unknown, str::to_owned)))
        }
    }
}

/// Checks size and nesting of everything in the file before another parser reads it. The component encoder
/// also panics over a truncated module.
fn check_structure(bytes: &[u8], limits: &Limits, refused: fn(String) -> Refusal) -> Result<(), Refusal> {
    precheck::check(bytes, limits.memory_bytes).map_err(|stopped| match stopped {
        Stopped::Malformed(text) => refused(text),
        Stopped::Exceeded(refusal) => refusal,
    })
}

/// Reads the world, the version and the imports from the types of the component.
pub(crate) fn outline(component: &[u8]) -> Result<Outline, Refusal> {
    let decoded =
        wit_parser::decoding::decode(component).map_err(|error| Refusal::Malformed(format!("{error:#}")))?;
    let DecodedWasm::Component(resolve, world) = decoded else {
        return Err(Refusal::WrongWorld("a WIT package".to_owned()));
    };
    let names = |keys: Vec<&WorldKey>| {
        keys.into_iter().map(|key| resolve.name_world_key(key)).collect::<BTreeSet<_>>()
    };
    let world: WorldId = world;
    let types = resolve.worlds.get(world).ok_or_else(|| Refusal::Malformed("no world".to_owned()))?;
    let imports = names(types.imports.keys().collect());
    let exports = names(types.exports.keys().collect());
    let (kind, version) = world_of(&exports)?;
    let mut needs = Vec::new();
    for import in &imports {
        let grant = grant_of(import).ok_or_else(|| Refusal::ForbiddenImport(import.clone()))?;
        needs.extend(grant.filter(|grant| !needs.contains(grant)));
    }
    let wasi = needs.contains(&Grant::Wasi);
    let learns = exports.iter().filter_map(|export| export.strip_prefix(PACKAGE));
    let learns = learns.into_iter().any(|export| export.starts_with("learning@"));
    Ok(Outline { world: kind, imports, exports, version, wasi, learns, needs })
}

/// Checks that the slot grants every import.
pub(crate) fn check_grants(outline: &Outline, access: &Access) -> Result<(), Refusal> {
    let missing = outline.imports.iter().find_map(|import| {
        let grant = grant_of(import)??;
        (!access.grants(grant)).then(|| Refusal::NotGranted { import: import.clone(), grant })
    });
    missing.map_or(Ok(()), Err)
}

/// Compiles, links and type-checks. Takes from milliseconds to seconds: never call it while a request waits.
pub(crate) fn link(
    engine: &Engine,
    linker: &Linker<Guest>,
    component: &[u8],
    outline: &Outline,
) -> Result<Linked, Refusal> {
    let compiled =
        Component::from_binary(engine, component).map_err(|error| Refusal::Compile(format!("{error:#}")))?;
    check_resources(&compiled)?;
    let pre = linker.instantiate_pre(&compiled);
    let pre = pre.map_err(|error| Refusal::Contract(format!("{error:#}")))?;
    Linked::new(outline.world, outline.wasi, outline.learns, pre, Vec::new())
}

/// Like [`link`], for a component whose large modules were taken out.
pub(crate) fn link_parts(
    engine: &Engine,
    linker: &Linker<Guest>,
    remainder: &[u8],
    modules: Vec<Arc<Module>>,
    outline: &Outline,
) -> Result<Linked, Refusal> {
    let compiled =
        Component::from_binary(engine, remainder).map_err(|error| Refusal::Compile(format!("{error:#}")))?;
    let refused = |error: wasmtime::Error| Refusal::Contract(format!("{error:#}"));
    let mut linker = linker.clone();
    for (number, module) in modules.iter().enumerate() {
        linker.root().module(&import_name(number), module).map_err(refused)?;
    }
    // The limits of its store bound memories and tables once more, whatever the process counted.
    let pre = linker.instantiate_pre(&compiled).map_err(refused)?;
    Linked::new(outline.world, outline.wasi, outline.learns, pre, modules)
}

/// Makes the checks of [`link`] for a component that is compiled in parts.
pub(crate) fn check_split(split: &Split) -> Result<(), Refusal> {
    check_counts(split.memories, split.tables)
}

/// Checks size and nesting of a part before it is compiled.
pub(crate) fn check_part(part: &[u8], limits: &Limits) -> Result<(), Refusal> {
    check_structure(part, limits, Refusal::Malformed)
}

/// Checks that an instance fits in what the pool reserves for one policy, with all the modules that it
/// instantiates.
fn check_resources(component: &Component) -> Result<(), Refusal> {
    let Some(required) = component.resources_required() else {
        return Err(Refusal::Contract("it imports a core module".to_owned()));
    };
    check_counts(required.num_memories, required.num_tables)
}

fn check_counts(memories: u32, tables: u32) -> Result<(), Refusal> {
    let bounds = [
        ("memories of all instances", memories, MEMORIES_PER_POLICY),
        ("tables of all instances", tables, TABLES_PER_POLICY),
    ];
    match bounds.into_iter().find(|(_, found, limit)| found > limit) {
        Some((what, found, limit)) => {
            Err(Refusal::ExceedsLimit { what: what.into(), found: found.into(), limit: limit.into() })
        }
        None => Ok(()),
    }
}

/// Finds the world and the contract version that the exports fit.
fn world_of(exports: &BTreeSet<String>) -> Result<(World, String), Refusal> {
    let interfaces = exports.iter().filter_map(|export| export.strip_prefix(PACKAGE)?.split_once('@'));
    let interfaces: Vec<(&str, &str)> = interfaces.collect();
    if let Some((interface, version)) = interfaces.iter().find(|(_, version)| !version.starts_with(VERSION)) {
        return Err(Refusal::WrongVersion { found: format!("{PACKAGE}{interface}@{version}") });
    }
    let worlds: Vec<(World, &str)> = interfaces
        .iter()
        .filter_map(|(interface, version)| match *interface {
            "filtering" => Some((World::Filter, *version)),
            "scoring" => Some((World::Scorer, *version)),
            "selecting" => Some((World::Selector, *version)),
            "disaggregation" => Some((World::DecodeOverride, *version)),
            _ => None,
        })
        .collect();
    let describes = interfaces.iter().any(|(interface, _)| *interface == "policy");
    match worlds.as_slice() {
        [(world, version)] if describes => Ok((*world, (*version).to_owned())),
        _ => {
            let names: Vec<&str> = exports.iter().map(String::as_str).collect();
            Err(Refusal::WrongWorld(if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }))
        }
    }
}

/// Returns the grant that an import needs: `Some(None)` for types, which need none, and `None` when no grant
/// permits it.
fn grant_of(import: &str) -> Option<Option<Grant>> {
    if let Some(interface) = import.strip_prefix(PACKAGE) {
        return match interface.split_once('@')?.0 {
            "types" => Some(None),
            "log" => Some(Some(Grant::Log)),
            "state" => Some(Some(Grant::State)),
            _ => None,
        };
    }
    WASI.iter().any(|interface| import.starts_with(interface)).then_some(Some(Grant::Wasi))
}
