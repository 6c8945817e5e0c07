//! Maps by block hash, which is a hash already: it is not hashed again.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

use crate::id::BlockHash;

/// A map by block hash.
pub(crate) type BlockMap<V> = HashMap<BlockHash, V, BuildHasherDefault<AsItIs>>;

/// Block hashes are hashes already.
#[derive(Debug, Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        // Not used for u64 keys; any mixing will do.
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
