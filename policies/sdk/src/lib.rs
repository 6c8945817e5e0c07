//! Guest SDK: write a routing policy in ten lines.
//!
//! A policy is a type that implements [`Policy`] (who it is, what it wants) and one of [`Filter`], [`Scorer`], [`Selector`]
//! or [`DecodeOverride`]; [`export!`] turns it into a component of `wit/policy.wit`. Facts are asked for once, by the
//! constants of [`facts`], and read as slices without copying. The same code runs natively in tests (feature `testing`).
//!
//! ```
//! use pointsman_policy_sdk::{self as sdk, Call, Column, Decision, Facts, Policy, Selector, Wants, facts};
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
//!     fn select(&self, _: &Call, facts: &Facts<'_>) -> Result<Decision, sdk::Error> {
//!         let least = self.requests.slice(facts).iter().enumerate().min_by_key(|(_, requests)| **requests);
//!         Ok(least.map_or(Decision::Abstain, |(row, _)| Decision::row(row)))
//!     }
//! }
//! ```

#[cfg(target_family = "wasm")]
mod bindings;
pub mod facts;
mod least;
mod policy;
mod rng;
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

/// Turns a policy type into the component's exports: `export!(selector MyPolicy)`; the world is one of `filter`, `scorer`,
/// `selector`, `decode_override`, and the crate enables the SDK feature of that name. `export!(selector MyPolicy, learning)`, with the
/// feature `learning`, is for a policy with [`Policy::observe`].
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
