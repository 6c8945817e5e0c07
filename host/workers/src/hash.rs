//! Hashes of names.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Returns the hash by which policies know a name: of a session, a LoRA adapter or a tenant. Gateways with
/// the same salt compute the same hash.
#[must_use]
pub fn name_hash(name: &[u8], salt: u64) -> u64 {
    xxh3_64_with_seed(name, salt)
}
