//! What a file is, for `pointsman policy inspect`: the same admission as in production, told instead of used.

use pointsman_routing::{Digest, Origin, Policy, World};

use crate::{
    access::{Access, Grant},
    admission,
    engine::{Limits, PolicyEngine},
    loaded::{compile, digest},
    refusal::Refusal,
};

/// What is known of a policy file.
#[derive(Debug)]
pub struct Inspection {
    /// SHA-256 of the file.
    pub digest: Digest,
    /// Bytes of the file.
    pub size: usize,
    /// Whether it was a core module that had to be made a component.
    pub core_module: bool,
    /// The world it fills.
    pub world: World,
    /// The contract's version it was built against.
    pub contract: String,
    /// What it imports.
    pub imports: Vec<String>,
    /// What its slot has to grant.
    pub needs: Vec<Grant>,
    /// What it exports.
    pub exports: Vec<String>,
    /// Its name, version and facts; or why it would not be admitted.
    pub policy: Result<Described, Refusal>,
}

/// What a policy says of itself.
#[derive(Debug)]
pub struct Described {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Request facts it asks for.
    pub request_facts: Vec<String>,
    /// Worker facts it asks for.
    pub worker_facts: Vec<String>,
}

/// Reads a policy file, and runs the whole of admission on it with `settings` and within `limits`. Everything
/// is granted; what a slot would have to grant is told.
///
/// # Errors
/// [`Refusal`] when it is no policy at all.
pub fn inspect(bytes: &[u8], settings: &str, limits: Limits) -> Result<Inspection, Refusal> {
    let component = admission::component(bytes, limits.file_bytes)?;
    let outline = admission::outline(&component)?;
    let engine = PolicyEngine::new(limits).map_err(|error| Refusal::Compile(format!("{error:#}")))?;
    let policy = compile(&engine, bytes, &Access::new(&Access::ALL));
    let policy = policy.and_then(|policy| policy.configure(Origin::Embedded, settings)).map(|policy| {
        let info = policy.info();
        Described {
            name: info.name.to_string(),
            version: info.version.to_string(),
            request_facts: info.wants.request.iter().map(|fact| fact.name().to_owned()).collect(),
            worker_facts: info.wants.worker.iter().map(ToString::to_string).collect(),
        }
    });
    Ok(Inspection {
        digest: digest(bytes),
        size: bytes.len(),
        core_module: bytes.get(4) == Some(&1),
        world: outline.world,
        contract: format!("pointsman:policy@{}", outline.version),
        imports: outline.imports.into_iter().collect(),
        needs: outline.needs,
        exports: outline.exports.into_iter().collect(),
        policy,
    })
}
