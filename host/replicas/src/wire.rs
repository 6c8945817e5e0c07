//! Messages between gateways: a header, then entries until the end. Integers are little-endian or LEB128.
//!
//! ```text
//! version u8 | kind u8 | incarnation u64 | sequence u64 | lease ms | block size | of the kind | entries
//! ```
//! A message says nothing about who sent it: the subject does, and the server can restrict who publishes on
//! it.

use std::sync::Arc;

use pointsman_orchestration::BindingKey;
use pointsman_workers::{BlockHash, DpRank, Leg, LoadValues, WorkerId, WorkerKey};
use prefix_index::Prefix;

mod reader;
mod writer;

use reader::Reader;
pub(crate) use writer::{Header, MessageWriter, entry_bytes};

/// Version of the format. It is also part of the subject, so that versions do not meet.
pub(crate) const VERSION: u8 = 1;
/// Maximum size of a message, bytes.
pub(crate) const MAX_MESSAGE: usize = 512 * 1024;
/// Maximum number of entries in a message.
pub(crate) const MAX_ENTRIES: usize = 65_536;
/// Maximum number of block hashes in one booking. The blocks after them are counted without hashes.
pub(crate) const MAX_HASHES: usize = 16_384;
/// Maximum number of prompt tokens in one booking.
const MAX_TOKENS: u32 = 16_000_000;
/// Maximum number of blocks in one booking, thousandths of a block.
const MAX_MILLIS: i64 = 16_000_000_000;

const BATCH: u8 = 0;
const SNAPSHOT: u8 = 1;
const ASK: u8 = 2;
const BYE: u8 = 3;

const ADD: u8 = 1;
const UPDATE: u8 = 2;
const FREE: u8 = 3;
const BIND: u8 = 4;
const CLOSE: u8 = 5;

/// In the place of a leg: a stored response is bound.
const RESPONSE: u8 = 3;

const SHARES_BLOCKS: u8 = 1;
const SPARSE: u8 = 2;
const HAS_URL: u8 = 4;

/// Marks the end of a booking that tells the time of the sender's clock instead. No booking has such an id:
/// gateways that do not know this entry skip it.
const CLOCK: u64 = 1 << 63;

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// When the sender's process began, in microseconds of its clock. Tells a restart.
    pub incarnation: u64,
    /// Number of the message, one more than that of the message before.
    pub sequence: u64,
    /// How long the sender counts as alive after this message, in milliseconds.
    pub lease_ms: u64,
    /// Tokens in a block of the sender.
    pub block_size: u32,
    /// Kind of the message.
    pub kind: Kind,
    /// Entries of the message.
    pub entries: Vec<Entry>,
}

/// Kind of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Changes. Without entries, it says that the sender is alive.
    Batch,
    /// A part of everything that the sender has booked.
    Snapshot {
        /// Number of the snapshot.
        number: u32,
        /// Number of the part, from 0.
        part: u32,
        /// Number of parts.
        parts: u32,
    },
    /// Asks a gateway for a snapshot; an empty name: all gateways.
    Ask(String),
    /// The sender stops.
    Bye,
}

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A booking. In a snapshot it may be known already.
    Add {
        /// Id of the booking, unique in the sender's process.
        id: u64,
        /// Names of the worker.
        worker: WorkerKey,
        /// Rank of the worker.
        rank: DpRank,
        /// Load.
        values: LoadValues,
        /// Blocks of the prompt.
        prefix: Prefix,
        /// Whether blocks of the prompt count once however many bookings have them. Otherwise the load has
        /// them.
        shares_blocks: bool,
    },
    /// New load of a booking.
    Update {
        /// Id of the booking.
        id: u64,
        /// Load.
        values: LoadValues,
    },
    /// The end of a booking.
    Free {
        /// Id of the booking.
        id: u64,
    },
    /// A session was bound to a worker, or a worker stored a response.
    Bind {
        /// The session or response.
        key: BindingKey,
        /// Names of the worker.
        worker: WorkerKey,
        /// Rank of the worker.
        rank: DpRank,
        /// How long the binding holds, in milliseconds.
        ttl_ms: u64,
        /// When it was made, in microseconds of the sender's clock.
        at_us: u64,
    },
    /// A session was closed, or a response deleted.
    Close {
        /// Sessions and responses that are no longer bound.
        key: BindingKey,
        /// When it was closed, in microseconds of the sender's clock.
        at_us: u64,
    },
    /// Time of the sender's clock when it wrote the message.
    Clock {
        /// Microseconds since 1970.
        at_us: u64,
    },
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// More bytes than a message may have.
    #[error("message of {0} bytes is too long: expected at most {MAX_MESSAGE}")]
    TooLong(usize),
    /// Another version of the format.
    #[error("unknown version {0} of the message format: expected {VERSION}")]
    Version(u8),
    /// A byte has an unknown value.
    #[error("unknown {what} {value} in a message")]
    Unknown {
        /// Meaning of the byte.
        what: &'static str,
        /// Its value.
        value: u8,
    },
    /// The message ends within a value.
    #[error("message ends within a value")]
    Short,
    /// A number is larger than it may be.
    #[error("{0} of a message is out of range")]
    Range(&'static str),
}

impl Message {
    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError`]. No bytes make this panic, or allocate more than a multiple of their number.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() > MAX_MESSAGE {
            return Err(WireError::TooLong(bytes.len()));
        }
        let mut reader = Reader(bytes);
        let version = reader.byte()?;
        if version != VERSION {
            return Err(WireError::Version(version));
        }
        let kind = reader.byte()?;
        let (incarnation, sequence) = (reader.word()?, reader.word()?);
        let lease_ms = reader.number()?;
        let block_size = reader.small("block size")?;
        let kind = match kind {
            BATCH => Kind::Batch,
            SNAPSHOT => Kind::Snapshot {
                number: reader.small("number of the snapshot")?,
                part: reader.small("part of the snapshot")?,
                parts: reader.small("parts of the snapshot")?,
            },
            ASK => Kind::Ask(reader.text()?),
            BYE => Kind::Bye,
            value => return Err(WireError::Unknown { what: "kind", value }),
        };
        let mut entries = Vec::new();
        while !reader.0.is_empty() {
            if entries.len() == MAX_ENTRIES {
                return Err(WireError::Range("number of entries"));
            }
            entries.push(Entry::decode(&mut reader)?);
        }
        Ok(Self { incarnation, sequence, lease_ms, block_size, kind, entries })
    }
}

impl Entry {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, WireError> {
        match reader.byte()? {
            ADD => {
                let (id, flags) = (reader.number()?, reader.byte()?);
                if flags & !(SHARES_BLOCKS | SPARSE | HAS_URL) != 0 {
                    return Err(WireError::Unknown { what: "flags", value: flags });
                }
                let worker = reader.word()?;
                let url = if flags & HAS_URL != 0 { reader.word()? } else { worker };
                let rank = DpRank(reader.small("rank")?);
                let values = decode_values(reader)?;
                let hashes = reader.words(MAX_HASHES)?.map(BlockHash).collect::<Arc<[_]>>();
                Ok(Self::Add {
                    id,
                    worker: WorkerKey { id: WorkerId(worker), url },
                    rank,
                    values,
                    prefix: Prefix::of_hashes(hashes, flags & SPARSE != 0),
                    shares_blocks: flags & SHARES_BLOCKS != 0,
                })
            }
            UPDATE => Ok(Self::Update { id: reader.number()?, values: decode_values(reader)? }),
            FREE => match reader.number()? {
                id if id & CLOCK != 0 => Ok(Self::Clock { at_us: id & !CLOCK }),
                id => Ok(Self::Free { id }),
            },
            BIND => {
                let (name, at_us) = (reader.word()?, reader.word()?);
                let key = decode_key(name, reader)?;
                let (id, url) = (WorkerId(reader.word()?), reader.word()?);
                let (rank, ttl_ms) = (DpRank(reader.small("rank")?), reader.number()?);
                Ok(Self::Bind { key, worker: WorkerKey { id, url }, rank, ttl_ms, at_us })
            }
            CLOSE => {
                let (name, at_us) = (reader.word()?, reader.word()?);
                Ok(Self::Close { key: decode_key(name, reader)?, at_us })
            }
            value => Err(WireError::Unknown { what: "entry", value }),
        }
    }
}

fn decode_key(name: u64, reader: &mut Reader<'_>) -> Result<BindingKey, WireError> {
    match reader.byte()? {
        0 => Ok(BindingKey::Session(name, Leg::Aggregated)),
        1 => Ok(BindingKey::Session(name, Leg::Prefill)),
        2 => Ok(BindingKey::Session(name, Leg::Decode)),
        RESPONSE => Ok(BindingKey::Response(name)),
        value => Err(WireError::Unknown { what: "leg", value }),
    }
}

fn decode_values(reader: &mut Reader<'_>) -> Result<LoadValues, WireError> {
    let prefill_tokens = reader.small("prefill tokens")?;
    let unnamed_millis = i64::try_from(reader.number()?).map_err(|_| WireError::Range("blocks"))?;
    if prefill_tokens > MAX_TOKENS || unnamed_millis > MAX_MILLIS {
        return Err(WireError::Range("load"));
    }
    Ok(LoadValues { prefill_tokens, unnamed_millis })
}

/// Returns load that a message may have.
pub(crate) fn bounded(values: LoadValues) -> LoadValues {
    LoadValues {
        prefill_tokens: values.prefill_tokens.min(MAX_TOKENS),
        unnamed_millis: values.unnamed_millis.clamp(0, MAX_MILLIS),
    }
}

#[cfg(test)]
mod tests;
