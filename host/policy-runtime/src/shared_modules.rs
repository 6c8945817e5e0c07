//! Modules of interpreters, which the policies that run share.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use pointsman_routing::Digest;
use wasmtime::{Engine, Module};

/// Modules by the SHA-256 of their bytes, as long as a policy has them.
#[derive(Default)]
pub(crate) struct SharedModules(Mutex<HashMap<Digest, Weak<Module>>>);

impl SharedModules {
    /// Returns the module: from a policy that has it, from the engine's cache, or a new one.
    pub(crate) fn module(
        &self,
        engine: &Engine,
        digest: Digest,
        bytes: &[u8],
    ) -> wasmtime::Result<Arc<Module>> {
        if let Some(module) = self.0.lock().get(&digest).and_then(Weak::upgrade) {
            return Ok(module);
        }
        let module = Arc::new(Module::from_binary(engine, bytes)?);
        let mut modules = self.0.lock();
        modules.retain(|_, module| module.strong_count() > 0);
        modules.insert(digest, Arc::downgrade(&module));
        Ok(module)
    }
}
