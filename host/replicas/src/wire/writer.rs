//! Writes messages.

use bytes::Bytes;
use pointsman_orchestration::{BindingKey, SessionChange};
use pointsman_workers::{BlockHash, DpRank, JournalEntry, Leg, LoadValues, WorkerKey};

use super::{
    ADD, ASK, BATCH, BIND, BYE, CLOCK, CLOSE, FREE, HAS_URL, Kind, MAX_ENTRIES, RESPONSE, SHARES_BLOCKS,
    SNAPSHOT, SPARSE, UPDATE, VERSION, bounded,
};
use crate::names::MAX_NAME;

/// A message that is being written.
#[derive(Debug)]
pub(crate) struct MessageWriter {
    bytes: Vec<u8>,
    entries: usize,
}

/// Header of each message of a gateway.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) incarnation: u64,
    pub(crate) sequence: u64,
    pub(crate) lease_ms: u64,
    pub(crate) block_size: u32,
}

impl MessageWriter {
    pub(crate) fn new(header: Header, kind: &Kind) -> Self {
        let mut writer = Self { bytes: Vec::with_capacity(512), entries: 0 };
        let code = match kind {
            Kind::Batch => BATCH,
            Kind::Snapshot { .. } => SNAPSHOT,
            Kind::Ask(_) => ASK,
            Kind::Bye => BYE,
        };
        writer.bytes.extend([VERSION, code]);
        writer.word(header.incarnation);
        writer.word(header.sequence);
        writer.number(header.lease_ms);
        writer.number(u64::from(header.block_size));
        match kind {
            Kind::Snapshot { number, part, parts } => {
                [number, part, parts].into_iter().for_each(|number| writer.number(u64::from(*number)));
            }
            Kind::Ask(name) => {
                let name = name.as_bytes().get(..MAX_NAME).unwrap_or(name.as_bytes());
                writer.bytes.push(u8::try_from(name.len()).unwrap_or(u8::MAX));
                writer.bytes.extend(name);
            }
            Kind::Batch | Kind::Bye => {}
        }
        writer
    }

    /// Returns whether an entry with this number of hashes fits into a message of `limit` bytes.
    pub(crate) fn has_room(&self, hashes: usize, limit: usize) -> bool {
        self.entries < MAX_ENTRIES && self.bytes.len() + entry_bytes(hashes) <= limit
    }

    /// Writes a booking with the first hashes of its prefix.
    pub(crate) fn add(&mut self, entry: &JournalEntry, hashes: &[BlockHash], values: LoadValues) {
        let worker = entry.worker();
        let mut flags = if entry.shares_blocks() { SHARES_BLOCKS } else { 0 };
        flags |= if entry.prefix().is_sparse() { SPARSE } else { 0 };
        flags |= if worker.url == worker.id.0 { 0 } else { HAS_URL };
        self.entry(ADD, entry.id());
        self.bytes.push(flags);
        self.word(worker.id.0);
        if flags & HAS_URL != 0 {
            self.word(worker.url);
        }
        self.number(u64::from(entry.rank().0));
        self.values(values);
        self.number(hashes.len() as u64);
        hashes.iter().for_each(|hash| self.word(hash.0));
    }

    pub(crate) fn update(&mut self, id: u64, values: LoadValues) {
        self.entry(UPDATE, id);
        self.values(values);
    }

    pub(crate) fn free(&mut self, id: u64) {
        self.entry(FREE, id);
    }

    /// Writes the time of this gateway's clock.
    pub(crate) fn clock(&mut self, at_us: u64) {
        self.entry(FREE, CLOCK | at_us);
    }

    /// Writes a binding to a worker.
    pub(crate) fn bind(&mut self, change: &SessionChange, worker: WorkerKey, rank: DpRank) {
        self.session(BIND, change);
        self.word(worker.id.0);
        self.word(worker.url);
        self.number(u64::from(rank.0));
        self.number(u64::try_from(change.ttl.as_millis()).unwrap_or(u64::MAX));
    }

    /// Writes the end of a binding.
    pub(crate) fn close(&mut self, change: &SessionChange) {
        self.session(CLOSE, change);
    }

    fn session(&mut self, tag: u8, change: &SessionChange) {
        self.entries += 1;
        self.bytes.push(tag);
        let (name, leg) = match change.key {
            BindingKey::Session(name, Leg::Aggregated) => (name, 0),
            BindingKey::Session(name, Leg::Prefill) => (name, 1),
            BindingKey::Session(name, Leg::Decode) => (name, 2),
            BindingKey::Response(name) => (name, RESPONSE),
        };
        self.word(name);
        self.word(change.stamp.at_us);
        self.bytes.push(leg);
    }

    pub(crate) fn finish(self) -> Bytes {
        self.bytes.into()
    }

    fn entry(&mut self, tag: u8, id: u64) {
        self.entries += 1;
        self.bytes.push(tag);
        self.number(id);
    }

    fn values(&mut self, values: LoadValues) {
        let LoadValues { prefill_tokens, unnamed_millis } = bounded(values);
        self.number(u64::from(prefill_tokens));
        self.number(unnamed_millis.unsigned_abs());
    }

    fn word(&mut self, word: u64) {
        self.bytes.extend(word.to_le_bytes());
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push((number & 0x7f) as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
    }
}

/// Returns the most bytes of an entry with this number of hashes.
pub(crate) fn entry_bytes(hashes: usize) -> usize {
    64 + hashes * 8
}
