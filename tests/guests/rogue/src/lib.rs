//! A guest that misbehaves as the script in its own binary says: tools replace that line in the built file,
//! so that one build of a world gives many bad policies, each with bytes of its own. Which world it fills is
//! a feature.

#[cfg(all(target_family = "wasm", feature = "filter"))]
mod filter;
#[cfg(all(target_family = "wasm", feature = "learning"))]
mod learner;
#[cfg(all(target_family = "wasm", feature = "decode-override"))]
mod planner;
#[cfg(all(target_family = "wasm", feature = "scorer"))]
mod scorer;
#[cfg(target_family = "wasm")]
mod script;
#[cfg(all(target_family = "wasm", feature = "selector"))]
mod selector;
