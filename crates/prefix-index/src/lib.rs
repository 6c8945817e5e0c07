#![doc = include_str!("../README.md")]

pub mod events;
mod hash;
mod id;
mod index;
mod prefix;
mod sync;

pub use hash::{Salt, block_hashes};
pub use id::{BlockHash, DpRank, WorkerId};
pub use index::{
    CandidateRows, IndexConfig, IndexStats, Invariant, Matched, OverlapReader, Overlaps, PrefixIndex,
    ProvisionalRecord,
};
pub use prefix::{Prefix, PrefixBuilder};
