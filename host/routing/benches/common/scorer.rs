//! Shared by benches and examples: programs of one scorer with the facts of `kv-aware`.

use std::sync::Arc;

use pointsman_routing::{
    Digest, Normalize, Origin, Picker, Policy, PolicyInfo, Program, WeightedScorer, World, facts::Wants,
};

/// The columns of a candidate, in their order.
const WORKER: [&str; 7] = [
    "active-prefill-tokens",
    "decode-blocks",
    "active-requests",
    "cached-blocks-device",
    "cached-blocks-host",
    "cached-blocks-disk",
    "taint-preference",
];

/// Returns what a scorer is, which wants these facts of the request.
pub(crate) fn info(name: &str, request: &[&str]) -> PolicyInfo {
    PolicyInfo {
        name: name.into(),
        version: "1".into(),
        digest: Digest([7; 32]),
        settings_digest: None,
        world: World::Scorer,
        origin: Origin::Embedded,
        wants: Wants::resolve(request, &WORKER).unwrap(),
        remembers: false,
        learns: false,
    }
}

/// Returns a program of one scorer, whose lowest score wins.
pub(crate) fn program(policy: impl Policy + 'static) -> Program {
    let scorer = WeightedScorer { policy: Arc::new(policy), weight: 1.0, normalize: Normalize::None };
    Program::Scorers { filters: vec![], scorers: vec![scorer], picker: Picker::Min }
}
