//! Mixes the hashes that are keys of tables with numbers that each process draws. Block hashes come from
//! prompts and engines: a stranger could otherwise choose thousands that share one place in a table, and each
//! search for one would pass the others.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

/// The numbers of this process: what a hash is combined with, and an odd factor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixer {
    addend: u64,
    factor: u64,
}

impl Default for Mixer {
    fn default() -> Self {
        static DRAWN: LazyLock<Mixer> = LazyLock::new(|| {
            let state = RandomState::new();
            Mixer { addend: state.hash_one(0), factor: state.hash_one(1) | 1 }
        });
        // Models choose keys that share a place.
        if cfg!(loom) { Self::NONE } else { *DRAWN }
    }
}

impl Mixer {
    /// Leaves the upper half of a hash as it is.
    pub(super) const NONE: Self = Self { addend: 0, factor: 1 };

    /// Returns a hash of a hash; no two have the same.
    pub(super) fn mix(self, hash: u64) -> u64 {
        let mixed = (hash ^ self.addend).wrapping_mul(self.factor);
        mixed ^ (mixed >> 32)
    }
}

#[cfg(test)]
impl Mixer {
    /// Returns the hash that this mixer mixes to `mixed`.
    pub(super) fn unmix(self, mixed: u64) -> u64 {
        // Each step doubles the number of right bits of the inverse (Newton).
        let inverse = (0..6).fold(self.factor, |inverse, _| {
            inverse.wrapping_mul(2_u64.wrapping_sub(self.factor.wrapping_mul(inverse)))
        });
        (mixed ^ (mixed >> 32)).wrapping_mul(inverse) ^ self.addend
    }
}
