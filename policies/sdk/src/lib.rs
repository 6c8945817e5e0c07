//! SDK for routing policies in Rust.
//!
//! A policy is a type that implements [`Policy`] (its name, settings and facts) and one of [`Filter`],
//! [`Scorer`], [`Selector`] or [`DecodeOverride`]. [`export!`] turns the type into a WebAssembly component of
//! `wit/policy.wit`.
//!
//! A policy asks for its facts once, in [`Policy::configure`], with the constants in [`facts`]. Each call
//! then passes their values as slices, without copying: one value per request fact, and one column per worker
//! fact with one value per candidate. A candidate is a row; answers name rows by number, from 0. The same
//! code runs natively in tests (feature `testing`).
//!
//! # Example
//!
//! A selector that chooses the candidate with the fewest active requests:
//!
//! ```
//! use pointsman_policy_sdk::{self as sdk, Call, Column, Decision, Facts, Policy, Rng, Selector, Wants,
//! facts};
//!
//! struct FewestRequests { requests: Column<u32> }
//!
//! impl Policy for FewestRequests {
//!     const NAME: &'static str = "fewest-requests";
//!     type Settings = sdk::NoSettings;
//!     fn configure(_: Self::Settings, wants: &mut Wants) -> Result<Self, String> {
//!         Ok(Self { requests: wants.worker(facts::ACTIVE_REQUESTS) })
//!     }
//! }
//!
//! impl Selector for FewestRequests {
//!     fn select(&self, call: &Call, facts: &Facts<'_>) -> Result<Decision, sdk::Error> {
//!         let requests: Vec<f32> = self.requests.slice(facts).iter().map(|requests| *requests as
//! f32).collect();
//!         // Draws among equal workers: the first one alone would get every request.
//!         let row = sdk::least(&requests, &mut Rng::new(call.seed));
//!         Ok(row.map_or(Decision::Abstain, Decision::row))
//!     }
//! }
//! ```

#[cfg(target_family = "wasm")]
mod bindings;
pub mod facts;
mod least;
mod policy;
mod rng;
mod settings;
#[cfg(feature = "state")]
pub mod state;
#[cfg(feature = "testing")]
pub mod testing;
mod view;

pub use least::least;
pub use policy::{
    Call, Decision, DecodeOverride, Error, Filter, Leg, Moment, NoSettings, Outcome, Plan, Policy,
    RouterConfigOverride, Scorer, Selector, Shed, configure,
};
pub use rng::Rng;
pub use view::{Column, Facts, Slot, Wants};

#[cfg(target_family = "wasm")]
#[doc(hidden)]
pub use bindings::__glue;

/// Exports a policy type from the component.
///
/// `export!(selector MyPolicy)` exports a selector. The first argument is the world: `filter`, `scorer`,
/// `selector` or `decode_override`. The crate must enable the SDK feature of that name (`decode-override` for
/// the last). A policy that implements [`Policy::observe`] is exported with `export!(selector MyPolicy,
/// learning)` and the feature `learning`.
#[macro_export]
macro_rules! export {
    ($world:ident $policy:ty) => {
        #[cfg(target_family = "wasm")]
        #[expect(unsafe_code, reason = "generated component exports")]
        mod __pointsman_export {
            use super::*;
            $crate::__glue::$world::bind!($policy);
        }
    };
    ($world:ident $policy:ty, learning) => {
        #[cfg(target_family = "wasm")]
        #[expect(unsafe_code, reason = "generated component exports")]
        mod __pointsman_export {
            use super::*;
            $crate::__glue::$world::bind!($policy);
            $crate::__glue::learning::bind!($policy);
        }
    };
}
