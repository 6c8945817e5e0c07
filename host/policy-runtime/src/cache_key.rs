//! The name that wasmtime's cache gives to the code of some bytes.
//!
//! The daemon computes it itself, and takes from a compiler process the entry of that name and no other. A
//! test
//! compares it with what wasmtime writes. Should a release of wasmtime compute it differently, no entry
//! would be
//! found, and the daemon would compile.

use std::{
    borrow::Cow,
    hash::{Hash as _, Hasher},
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sha2::{Digest as _, Sha256};
use wasmtime::Engine;

struct Sha256Hasher(Sha256);

impl Hasher for Sha256Hasher {
    fn finish(&self) -> u64 {
        0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

/// Returns the file name of the entry for a component or module that `engine` compiles: a digest of the
/// settings, the compiler's version and the bytes.
pub(crate) fn cache_key(engine: &Engine, bytes: &[u8]) -> String {
    let none: Option<Cow<'_, [u8]>> = None;
    let mut hasher = Sha256Hasher(Sha256::new());
    // No debug information, and no intrinsics.
    (engine.precompile_compatibility_hash(), Cow::Borrowed(bytes), &none, &none).hash(&mut hasher);
    URL_SAFE_NO_PAD.encode(hasher.0.finalize())
}

#[cfg(test)]
mod tests {
    use crate::{Capacity, Limits, PolicyEngine};

    /// Returns the names of all entries in a cache.
    fn entries(dir: &std::path::Path) -> Vec<String> {
        let mut names = Vec::new();
        for version in std::fs::read_dir(dir.join("code/modules")).into_iter().flatten() {
            for entry in std::fs::read_dir(version.expect("a directory").path()).expect("readable") {
                let name = entry.expect("an entry").file_name().into_string().expect("text");
                names.extend((!name.contains('.')).then_some(name));
            }
        }
        names
    }

    #[test]
    fn the_key_is_the_name_of_the_entry_that_wasmtime_writes() {
        let dir = tempfile::tempdir().expect("a directory");
        let engine = PolicyEngine::with_cache(Limits::default(), Capacity::detect(), dir.path().to_owned());
        let engine = engine.expect("an engine");
        let component = wat::parse_str("(component)").expect("a component");
        let module = wat::parse_str("(module (func))").expect("a module");
        let key = |bytes: &[u8]| engine.cache_key(bytes);
        wasmtime::component::Component::new(engine.engine(), &component).expect("valid");
        assert_eq!(entries(dir.path()), [key(&component)]);
        wasmtime::Module::new(engine.engine(), &module).expect("valid");
        assert_eq!(entries(dir.path()).len(), 2);
        assert!(entries(dir.path()).contains(&key(&module)));
        assert_ne!(key(&module), key(&component));
    }
}
