//! Turns the changed bookings of this gateway into messages for the others.
//!
//! Entries have whole values, not differences. A booking that changed many times since the last batch is sent
//! once. A reader that missed a batch is correct again with the booking's next entry.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc::Receiver},
};

use bytes::Bytes;
use pointsman_workers::{BlockHash, JournalEntry, LoadValues, unix_us};

use crate::{
    bindings::NamedSession,
    wire::{Header, Kind, MAX_HASHES, MessageWriter, entry_bytes},
};

/// Maximum number of changed bookings in one batch; the others follow in the next one.
const MAX_CHANGES: usize = 65_536;
/// Smallest limit of a message for which bookings are cut, bytes.
pub(crate) const MIN_PAYLOAD: usize = 4 * 1024;
/// Largest message, bytes, whatever the server takes.
const MAX_PAYLOAD: usize = 256 * 1024;
/// Room of a header in a message.
const HEADER_BYTES: usize = 128;

/// Bookings of this gateway as the others know them.
#[derive(Debug)]
pub struct Outbox {
    changed: Receiver<Arc<JournalEntry>>,
    live: HashMap<u64, Live>,
    header: Header,
    /// Number of the next snapshot.
    snapshot: u32,
    /// Maximum size of a message, bytes.
    limit: usize,
}

/// A booking that has not ended.
#[derive(Debug)]
struct Live {
    entry: Arc<JournalEntry>,
    sent: LoadValues,
}

impl Outbox {
    /// Creates the outbox of a process that began at `incarnation`, which reads the changes of a journal.
    #[must_use]
    pub fn new(
        changed: Receiver<Arc<JournalEntry>>,
        incarnation: u64,
        lease_ms: u64,
        block_size: u32,
    ) -> Self {
        let header = Header { incarnation, sequence: 1, lease_ms, block_size };
        Self { changed, live: HashMap::new(), header, snapshot: 0, limit: MAX_PAYLOAD }
    }

    /// Sets the most bytes that the server takes in a message; 4 KiB are used at least.
    pub fn set_limit(&mut self, max_payload: usize) {
        self.limit = max_payload.clamp(MIN_PAYLOAD, MAX_PAYLOAD);
    }

    /// Returns the number of own bookings.
    #[must_use]
    pub fn bookings(&self) -> usize {
        self.live.len()
    }

    /// Returns messages with the bookings that changed since the last call, and with `sessions`. None if
    /// nothing changed.
    pub fn batch(&mut self, sessions: Vec<NamedSession>) -> Vec<Bytes> {
        let mut messages = Vec::new();
        let mut open: Option<MessageWriter> = None;
        let mut sessions = sessions.into_iter();
        for _ in 0..MAX_CHANGES {
            let change = if let Some(session) = sessions.next() {
                Some(Change::Session(session))
            } else if let Ok(entry) = self.changed.try_recv() {
                entry.allow_requeue();
                self.change(entry)
            } else {
                break;
            };
            let Some(change) = change else { continue };
            let hashes = change.hashes(self.max_hashes());
            let full = open.as_ref().is_some_and(|open| !open.has_room(hashes.len(), self.limit));
            if full {
                messages.extend(open.take().map(MessageWriter::finish));
            }
            let writer = open.get_or_insert_with(|| MessageWriter::new(next(&mut self.header), &Kind::Batch));
            change.write(writer, hashes);
        }
        messages.extend(open.map(MessageWriter::finish));
        messages
    }

    /// Takes changes without telling anybody, while there is no connection.
    pub fn skip(&mut self) {
        for _ in 0..MAX_CHANGES {
            let Ok(entry) = self.changed.try_recv() else { break };
            entry.allow_requeue();
            let _ = self.change(entry);
        }
    }

    /// Updates the table. Returns the messages to send.
    fn change(&mut self, entry: Arc<JournalEntry>) -> Option<Change> {
        if entry.ended() {
            return self.live.remove(&entry.id()).map(|live| Change::Free(live.entry.id()));
        }
        let values = values(&entry, self.max_hashes());
        if let Some(live) = self.live.get_mut(&entry.id()) {
            let sent = std::mem::replace(&mut live.sent, values);
            return (sent != values).then(|| Change::Update(entry.id(), values));
        }
        self.live.insert(entry.id(), Live { entry: entry.clone(), sent: values });
        Some(Change::Add(entry, values))
    }

    /// Returns the messages of a snapshot: every booking that has not ended, and these bindings.
    pub fn snapshot(&mut self, bindings: Vec<NamedSession>) -> Vec<Bytes> {
        // Ends that found the journal full are noticed here.
        self.live.retain(|_, live| !live.entry.ended());
        let max_hashes = self.max_hashes();
        let mut changes: Vec<Change> = self
            .live
            .values_mut()
            .map(|live| {
                live.sent = values(&live.entry, max_hashes);
                Change::Add(live.entry.clone(), live.sent)
            })
            .collect();
        changes.extend(bindings.into_iter().map(Change::Session));
        let mut parts: Vec<&[Change]> = Vec::new();
        let mut rest = changes.as_slice();
        loop {
            let mut bytes = HEADER_BYTES;
            let fits = rest.iter().take(crate::wire::MAX_ENTRIES).take_while(|change| {
                bytes += entry_bytes(change.hashes(max_hashes).len());
                bytes <= self.limit
            });
            let (part, after) = rest.split_at_checked(fits.count().max(1)).unwrap_or((rest, &[]));
            parts.push(part);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        self.snapshot = self.snapshot.wrapping_add(1);
        let (number, count) = (self.snapshot, u32::try_from(parts.len()).unwrap_or(u32::MAX));
        let header = &mut self.header;
        let message = |(part, changes): (u32, &[Change])| {
            let kind = Kind::Snapshot { number, part, parts: count };
            let mut writer = MessageWriter::new(next(header), &kind);
            changes.iter().for_each(|change| change.write(&mut writer, change.hashes(max_hashes)));
            if part == 0 {
                writer.clock(unix_us());
            }
            writer.finish()
        };
        (0..).zip(parts).map(message).collect()
    }

    /// Returns a heartbeat: this gateway is alive, and its clock says this.
    pub fn heartbeat(&mut self) -> Bytes {
        let mut writer = MessageWriter::new(next(&mut self.header), &Kind::Batch);
        writer.clock(unix_us());
        writer.finish()
    }

    /// Returns a message that asks a gateway for a snapshot; an empty name: all gateways.
    pub fn ask(&mut self, name: &str) -> Bytes {
        self.empty(&Kind::Ask(name.to_owned()))
    }

    /// Returns the message that announces the stop of this gateway.
    pub(crate) fn stop_message(&mut self) -> Bytes {
        self.empty(&Kind::Bye)
    }

    fn empty(&mut self, kind: &Kind) -> Bytes {
        MessageWriter::new(next(&mut self.header), kind).finish()
    }

    /// Returns the most hashes of a booking that fit into a message.
    fn max_hashes(&self) -> usize {
        MAX_HASHES.min(self.limit.saturating_sub(HEADER_BYTES + entry_bytes(0)) / 8)
    }
}

/// Entry to send for one booking.
#[derive(Debug)]
enum Change {
    Add(Arc<JournalEntry>, LoadValues),
    Update(u64, LoadValues),
    Free(u64),
    Session(NamedSession),
}

impl Change {
    /// Returns the first hashes of a new booking, at most `most`.
    fn hashes(&self, most: usize) -> &[BlockHash] {
        match self {
            Self::Add(entry, _) => first_hashes(entry, most),
            Self::Update(..) | Self::Free(_) | Self::Session(_) => &[],
        }
    }

    fn write(&self, writer: &mut MessageWriter, hashes: &[BlockHash]) {
        match self {
            Self::Add(entry, values) => writer.add(entry, hashes, *values),
            Self::Update(id, values) => writer.update(*id, *values),
            Self::Free(id) => writer.free(*id),
            Self::Session((change, Some((worker, rank)))) => writer.bind(change, *worker, *rank),
            Self::Session((change, None)) => writer.close(change),
        }
    }
}

fn first_hashes(entry: &JournalEntry, most: usize) -> &[BlockHash] {
    let hashes = entry.prefix().hashes();
    hashes.get(..most).unwrap_or(hashes)
}

/// Returns the load of a booking. Blocks without hashes in the message count only by their number.
fn values(entry: &JournalEntry, most: usize) -> LoadValues {
    let mut values = entry.values();
    let prefix = entry.prefix();
    if entry.shares_blocks() && prefix.hashes().len() > most {
        let named = prefix.blocks(u32::try_from(most).unwrap_or(u32::MAX));
        values.unnamed_millis += i64::from(prefix.named_blocks().saturating_sub(named)) * 1_000;
    }
    values
}

/// Returns the header of the next message.
fn next(header: &mut Header) -> Header {
    let this = *header;
    header.sequence += 1;
    this
}
