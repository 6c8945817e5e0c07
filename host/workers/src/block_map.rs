//! Hash maps by block hash. The hash is used as it is.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::id::BlockHash;

/// A hash map by block hash.
pub(crate) type BlockMap<V> = HashMap<BlockHash, V, BuildHasherDefault<IdentityHasher>>;

/// A hasher that returns its input.
#[derive(Debug, Default)]
pub(crate) struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn write(&mut self, bytes: &[u8]) {
        // Not called for u64 keys.
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
