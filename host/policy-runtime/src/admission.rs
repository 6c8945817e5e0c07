//! Admission before a byte runs: size, magic, world, version, imports, compile. Each step has its own refusal.

use std::collections::BTreeSet;

use pointsman_routing::World;
use wasmtime::component::Component;
use wit_parser::{WorldId, WorldKey, decoding::DecodedWasm};

use crate::{
    access::{Access, Grant},
    catch_panic::catch_panic,
    engine::PolicyEngine,
    instance::Linked,
    refusal::Refusal,
};

/// WASI interfaces a guest may import; all of them answer from an empty context.
const WASI: [&str; 5] = ["wasi:cli/", "wasi:clocks/", "wasi:filesystem/", "wasi:io/", "wasi:random/"];
/// The contract's package, and the line of versions this host serves.
const PACKAGE: &str = "pointsman:policy/";
const VERSION: &str = "0.1.";

/// What a component is, as its types say.
#[derive(Debug)]
pub(crate) struct Outline {
    pub(crate) world: World,
    pub(crate) imports: BTreeSet<String>,
    pub(crate) exports: BTreeSet<String>,
    /// The contract's version it was built against.
    pub(crate) version: String,
    pub(crate) wasi: bool,
    /// It exports `learning`.
    pub(crate) learns: bool,
    /// What its imports need, beyond types.
    pub(crate) needs: Vec<Grant>,
}

/// The component in `bytes`: as it is, or made from a core module with embedded WIT metadata.
pub(crate) fn component(bytes: &[u8], limit: usize) -> Result<Vec<u8>, Refusal> {
    if bytes.len() > limit {
        return Err(Refusal::TooLarge { size: bytes.len(), limit });
    }
    match bytes.get(..8) {
        Some([0, b'a', b's', b'm', _, _, 1, 0]) => Ok(bytes.to_vec()),
        Some([0, b'a', b's', b'm', 1, 0, 0, 0]) => {
            let refused = |error: &dyn std::fmt::Display| Refusal::NotAComponent(format!("{error:#}"));
            whole(bytes).map_err(|error| refused(&error))?;
            let encode = || {
                let encoder = wit_component::ComponentEncoder::default().validate(true).module(bytes);
                encoder.and_then(|mut encoder| encoder.encode())
            };
            match catch_panic(encode) {
                Ok(encoded) => encoded.map_err(|error| refused(&error)),
                Err(_) => Err(refused(&"its metadata cannot be read")),
            }
        }
        _ => {
            let head: Vec<String> = bytes.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            Err(Refusal::NotWasm(if head.is_empty() {
                "nothing: it is empty".to_owned()
            } else {
                head.join(" ")
            }))
        }
    }
}

/// Whether every section is there to its end: what makes components of modules panics over one that was cut off.
fn whole(module: &[u8]) -> Result<(), wasmparser::BinaryReaderError> {
    wasmparser::Parser::new(0).parse_all(module).try_for_each(|section| section.map(drop))
}

/// Reads the world, the version and the imports from the component's own types.
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
    let (kind, version) = kind_of(&exports)?;
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

/// Everything that is imported was granted by the operator.
pub(crate) fn granted(outline: &Outline, access: &Access) -> Result<(), Refusal> {
    let missing = outline.imports.iter().find_map(|import| {
        let grant = grant_of(import)??;
        (!access.grants(grant)).then(|| Refusal::NotGranted { import: import.clone(), grant })
    });
    missing.map_or(Ok(()), Err)
}

/// Compiles, links and type-checks. Slow: never on a request's path.
pub(crate) fn link(engine: &PolicyEngine, component: &[u8], outline: &Outline) -> Result<Linked, Refusal> {
    let compiled = Component::from_binary(engine.engine(), component)
        .map_err(|error| Refusal::Compile(format!("{error:#}")))?;
    let pre = engine.linker(outline.wasi).instantiate_pre(&compiled);
    let pre = pre.map_err(|error| Refusal::Contract(format!("{error:#}")))?;
    Linked::new(outline.world, outline.wasi, outline.learns, pre)
}

fn kind_of(exports: &BTreeSet<String>) -> Result<(World, String), Refusal> {
    let ours = exports.iter().filter_map(|export| export.strip_prefix(PACKAGE)?.split_once('@'));
    let ours: Vec<(&str, &str)> = ours.collect();
    if let Some((interface, version)) = ours.iter().find(|(_, version)| !version.starts_with(VERSION)) {
        return Err(Refusal::WrongVersion { found: format!("{PACKAGE}{interface}@{version}") });
    }
    let worlds: Vec<(World, &str)> = ours
        .iter()
        .filter_map(|(interface, version)| match *interface {
            "filtering" => Some((World::Filter, *version)),
            "scoring" => Some((World::Scorer, *version)),
            "selecting" => Some((World::Selector, *version)),
            "disaggregation" => Some((World::DecodeOverride, *version)),
            _ => None,
        })
        .collect();
    let introduces = ours.iter().any(|(interface, _)| *interface == "policy");
    match worlds.as_slice() {
        [(world, version)] if introduces => Ok((*world, (*version).to_owned())),
        _ => {
            let names: Vec<&str> = exports.iter().map(String::as_str).collect();
            Err(Refusal::WrongWorld(if names.is_empty() { "nothing".to_owned() } else { names.join(", ") }))
        }
    }
}

/// What an import needs: nothing for types, a grant, or `None` when no grant would do.
fn grant_of(import: &str) -> Option<Option<Grant>> {
    if let Some(ours) = import.strip_prefix(PACKAGE) {
        return match ours.split_once('@')?.0 {
            "types" => Some(None),
            "log" => Some(Some(Grant::Log)),
            "state" => Some(Some(Grant::State)),
            _ => None,
        };
    }
    WASI.iter().any(|interface| import.starts_with(interface)).then_some(Some(Grant::Wasi))
}
