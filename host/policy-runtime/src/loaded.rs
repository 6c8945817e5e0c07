//! From bytes to a policy that serves: admission, configure, probe, warm instances.

use std::sync::Arc;

use pointsman_routing::{
    Call, Decision, Digest, Failure, Origin, Plan, Policy, PolicyInfo, RouterConfigOverride, World,
    facts::Wants,
};
use sha2::{Digest as _, Sha256};

use crate::{
    admission,
    engine::PolicyEngine,
    instance::{Instance, Linked},
    pool::Pool,
    probe,
    refusal::Refusal,
};

/// A policy with its warm instances.
#[derive(Debug)]
pub struct LoadedPolicy {
    info: PolicyInfo,
    pool: Arc<Pool>,
}

/// Admits, configures, probes and warms up a policy. Takes as long as a compile: never call it on a request's path.
///
/// # Errors
/// [`Refusal`] of the step that failed.
pub fn load(
    engine: &PolicyEngine,
    bytes: &[u8],
    origin: Origin,
    settings: &str,
) -> Result<LoadedPolicy, Refusal> {
    let _running = engine.running();
    let component = admission::component(bytes, engine.limits().file_bytes)?;
    let outline = admission::outline(&component)?;
    let linked = admission::link(engine, &component, &outline)?;
    let world = outline.world;
    let mut first = linked.instantiate(engine, Arc::from("?"))?;
    let about = first.introduce(settings)?;
    let wants = Wants::resolve(&about.request_facts, &about.worker_facts)
        .map_err(|unknown| Refusal::UnknownFact(unknown.to_string()))?;
    let name: Arc<str> = Arc::from(about.name);
    let info = PolicyInfo {
        name: name.clone(),
        version: Arc::from(about.version),
        digest: digest(bytes),
        world,
        origin,
        wants: wants.clone(),
    };
    prove(engine, &linked, first, world, &wants, settings)?;
    let builder = {
        let (engine, name, settings) = (engine.clone(), name.clone(), settings.to_owned());
        move || {
            let _running = engine.running();
            let mut fresh =
                linked.instantiate(&engine, name.clone()).map_err(|refusal| refusal.to_string())?;
            fresh.introduce(&settings).map_err(|refusal| refusal.to_string())?;
            // Touched once before it serves: the first call of a fresh instance faults its pages in.
            probe::ask(&mut fresh, world, &wants, 2).map_err(|failure| failure.to_string())?;
            Ok(fresh)
        }
    };
    let pool = Pool::new(engine, name, Box::new(builder)).map_err(Refusal::Instantiate)?;
    Ok(LoadedPolicy { info, pool })
}

/// SHA-256 of a file's bytes.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// Asks each probe question of two instances, and of the first one twice.
fn prove(
    engine: &PolicyEngine,
    linked: &Linked,
    mut first: Instance,
    world: World,
    wants: &Wants,
    settings: &str,
) -> Result<(), Refusal> {
    let mut second = linked.instantiate(engine, Arc::from("?"))?;
    second.introduce(settings)?;
    for rows in probe::ROWS {
        let ask = |instance: &mut Instance| {
            probe::ask(instance, world, wants, rows).map_err(|failure| Refusal::Probe { rows, failure })
        };
        let answer = ask(&mut first)?;
        if ask(&mut first)? != answer || ask(&mut second)? != answer {
            return Err(Refusal::NotDeterministic { rows });
        }
    }
    Ok(())
}

impl Policy for LoadedPolicy {
    fn info(&self) -> &PolicyInfo {
        &self.info
    }

    fn keep(&self, call: &Call, facts: &[u32], kept: &mut Vec<u32>) -> Result<(), Failure> {
        *kept = self.pool.call(|instance| instance.keep(call, facts))?;
        Ok(())
    }

    fn score(&self, call: &Call, facts: &[u32], costs: &mut Vec<f32>) -> Result<(), Failure> {
        *costs = self.pool.call(|instance| instance.score(call, facts))?;
        Ok(())
    }

    fn select(&self, call: &Call, facts: &[u32]) -> Result<Decision, Failure> {
        self.pool.call(|instance| instance.select(call, facts))
    }

    fn decide(&self, call: &Call, request: &[u32], decode: &[u32], prefill: &[u32]) -> Result<Plan, Failure> {
        self.pool.call(|instance| instance.decide(call, request, decode, prefill))
    }

    fn decode_config(&self, call: &Call, facts: &[u32]) -> Result<RouterConfigOverride, Failure> {
        self.pool.call(|instance| instance.decode_config(call, facts))
    }
}
