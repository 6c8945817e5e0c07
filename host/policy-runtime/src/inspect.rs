//! Describes a policy file, for `pointsman policy inspect`. It runs the admission of production and keeps no
//! policy.

use pointsman_routing::{Digest, Origin, Policy, World};

use crate::{
    access::{Access, Grant},
    admission,
    capacity::Capacity,
    catch_panic::on_deep_stack,
    engine::{Limits, PolicyEngine},
    loaded::{compile, digest},
    refusal::Refusal,
};

/// Description of a policy file.
#[derive(Debug)]
pub struct Inspection {
    /// SHA-256 of the file's bytes.
    pub digest: Digest,
    /// Size of the file, bytes.
    pub size: usize,
    /// Whether the file is a core module, which the host encodes as a component.
    pub core_module: bool,
    /// World that its exports fit.
    pub world: World,
    /// Contract version that it was built against.
    pub contract: String,
    /// Imported interfaces.
    pub imports: Vec<String>,
    /// Grants that its slot must have.
    pub needs: Vec<Grant>,
    /// Exported interfaces.
    pub exports: Vec<String>,
    /// Results of `describe` and `configure`, or the reason for which a slot would refuse the file.
    pub policy: Result<Described, Refusal>,
}

/// Results of `describe` and `configure`.
#[derive(Debug)]
pub struct Described {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Names of the request facts that it asks for.
    pub request_facts: Vec<String>,
    /// Names of the worker facts that it asks for.
    pub worker_facts: Vec<String>,
}

/// Runs all checks of admission on a file, with `settings` and within `limits`. All imports are granted;
/// [`Inspection::needs`] lists what a slot would have to grant.
///
/// # Errors
/// [`Refusal`] when the file is not a component that fits a world.
pub fn inspect(bytes: &[u8], settings: &str, limits: Limits) -> Result<Inspection, Refusal> {
    // How much memory a slot would grant decides about admission, and not about what the file is.
    let of_any_size = Limits { memory_bytes: usize::MAX, ..limits };
    let outline = on_deep_stack(|| admission::outline(&admission::component(bytes, &of_any_size)?));
    let outline = outline.unwrap_or_else(|panic| Err(Refusal::Malformed(panic)))?;
    let engine = PolicyEngine::new(limits, Capacity { cpus: 1, policies: 1 })
        .map_err(|error| Refusal::Compile(format!("{error:#}")))?;
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
