//! State that gateways of one fleet share: what they agree on for each key, and which keys changed here.

use std::{collections::HashSet, sync::atomic::Ordering};

use parking_lot::Mutex;
use pointsman_routing::{ChangeRefused, SharedContent, SharedState, Stamp, StateChange};
use pointsman_workers::unix_us;

use super::{Entry, State, StateError};

/// Maximum number of gateways whose additions to one number are counted.
const MAX_PARTS: usize = 64;
/// How long a removed key is remembered, so that an older write does not bring it back.
const TOMBSTONE_MS: u64 = 300_000;
/// How far ahead the clock of another gateway may be.
const MAX_AHEAD_US: u64 = 10_000_000;

/// How gateways agree on a key.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    /// Last write or removal of the whole key.
    stamp: Stamp,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// The last write counts.
    Value,
    /// The parts add up.
    Number(Vec<Part>),
    Deleted,
}

/// Sum that one gateway added to a number.
#[derive(Clone, Copy, Debug)]
struct Part {
    writer: u64,
    sum: i64,
    expires_ms: u64,
    /// In the own part: the process before a restart whose additions it has, too; 0: none.
    adopted: u64,
}

/// Changes of this gateway.
#[derive(Debug)]
pub(super) struct Sharing {
    writer: u64,
    incarnation: u64,
    changed: Mutex<HashSet<Box<str>>>,
}

impl Origin {
    pub(super) fn size(&self) -> usize {
        let parts = if let Kind::Number(parts) = &self.kind { parts.len() } else { 0 };
        size_of::<Self>() + parts * size_of::<Part>()
    }

    /// Returns the entry without what has expired; `None` if nothing is left.
    pub(super) fn at(&self, entry: &Entry, now_ms: u64) -> Option<Entry> {
        match &self.kind {
            Kind::Value => Some(entry.clone()),
            Kind::Deleted => None,
            Kind::Number(parts) => {
                let live = parts.iter().filter(|part| part.expires_ms > now_ms).copied().collect();
                Some(number(self.stamp, live))
            }
        }
    }
}

impl Sharing {
    fn note(&self, key: &str, most: usize) {
        let mut changed = self.changed.lock();
        // Beyond the quota the connection is away. A new connection gets everything.
        if changed.len() < most && !changed.contains(key) {
            changed.insert(key.into());
        }
    }

    /// Returns a stamp for a write that replaces `old`.
    fn next(&self, old: Option<&Entry>) -> Stamp {
        Stamp { time_us: unix_us().max(stamp(old).time_us.saturating_add(1)), writer: self.writer }
    }
}

impl State {
    /// Sets whether the operator wants the state shared. In a gateway without others that changes nothing.
    pub(crate) fn set_shared(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Relaxed);
    }

    /// Returns what notes changes, if the state is shared at present.
    pub(super) fn sharing(&self) -> Option<&Sharing> {
        self.sharing.get().filter(|_| self.is_shared())
    }

    pub(super) fn set_here(&self, sharing: &Sharing, key: &str, entry: &Entry) -> Result<(), StateError> {
        let mut shard = self.shard(key).lock();
        let origin = Origin { stamp: sharing.next(shard.get(key)), kind: Kind::Value };
        self.put(&mut shard, key, Entry { origin: Some(Box::new(origin)), ..entry.clone() })?;
        drop(shard);
        sharing.note(key, self.quota.keys);
        Ok(())
    }

    pub(super) fn delete_here(&self, sharing: &Sharing, key: &str) {
        let mut shard = self.shard(key).lock();
        let Some(old) = shard.get(key) else { return };
        let gone = deleted(sharing.next(Some(old)), unix_us() / 1_000);
        // Removing takes room only for a short key without a value: then it is only removed here.
        if self.put(&mut shard, key, gone).is_ok() {
            sharing.note(key, self.quota.keys);
        } else if let Some(old) = shard.remove(key) {
            self.release(1, old.size(key));
        }
    }

    /// Adds to this gateway's part of a number. A value that was set has no parts and is replaced.
    pub(super) fn increment_here(
        &self,
        sharing: &Sharing,
        (key, delta): (&str, i64),
        expires_ms: u64,
        now_ms: u64,
    ) -> Result<i64, StateError> {
        let mut shard = self.shard(key).lock();
        let old = shard.get(key);
        let value = old.filter(|old| old.is_value() && old.expires_ms > now_ms);
        let mut entry = match value.filter(|value| value.own_number(sharing.writer).is_none()) {
            Some(value) => {
                let mut value = value.clone();
                value.add(delta)?;
                let origin = Origin { stamp: sharing.next(Some(&value)), kind: Kind::Value };
                Entry { origin: Some(Box::new(origin)), ..value }
            }
            None => {
                let mut parts = live_parts(old, sharing.writer, now_ms);
                match parts.iter_mut().find(|part| part.writer == sharing.writer) {
                    Some(own) => own.sum = own.sum.saturating_add(delta),
                    None => parts.push(Part { writer: sharing.writer, sum: delta, expires_ms, adopted: 0 }),
                }
                number(stamp(old), parts)
            }
        };
        let sum = entry.add(0)?;
        self.put(&mut shard, key, entry)?;
        drop(shard);
        sharing.note(key, self.quota.keys);
        Ok(sum)
    }

    /// Returns a key's value as this gateway publishes it; `None` if others wrote all of it.
    fn change(&self, sharing: &Sharing, key: &str) -> Option<StateChange> {
        let shard = self.shard(key).lock();
        let entry = shard.get(key)?;
        let origin = entry.origin.as_ref()?;
        let own = origin.stamp.writer == sharing.writer;
        let content = match &origin.kind {
            Kind::Value if own => {
                SharedContent::Value { value: entry.value.to_vec(), expires_ms: entry.expires_ms }
            }
            Kind::Deleted if own => SharedContent::Deleted,
            Kind::Value | Kind::Deleted => return None,
            Kind::Number(parts) => {
                let part = parts.iter().find(|part| part.writer == sharing.writer)?;
                SharedContent::Part {
                    writer: part.writer,
                    incarnation: sharing.incarnation,
                    sum: part.sum,
                    expires_ms: part.expires_ms,
                }
            }
        };
        Some(StateChange { key: key.to_owned(), stamp: origin.stamp, content })
    }

    /// Applies a value or a removal of another gateway. Returns whether this gateway's later one has to be
    /// published again.
    fn apply_whole(
        &self,
        sharing: &Sharing,
        (key, new, at): (&str, Entry, Stamp),
    ) -> Result<bool, StateError> {
        let mut shard = self.shard(key).lock();
        let held = shard.get(key);
        if held.is_none() && new.is_deleted() {
            return Ok(false);
        }
        if held.is_some() && at <= stamp(held) {
            let whole = held.is_some_and(|held| held.is_value() || held.is_deleted());
            return Ok(whole && at < stamp(held) && stamp(held).writer == sharing.writer);
        }
        self.put(&mut shard, key, new)?;
        Ok(false)
    }

    /// Applies what one gateway added to a number. Returns whether this gateway's part has to be published
    /// again.
    fn apply_part(
        &self,
        sharing: &Sharing,
        (key, at): (&str, Stamp),
        (part, incarnation): (Part, u64),
        now_ms: u64,
    ) -> Result<bool, ChangeRefused> {
        let mut shard = self.shard(key).lock();
        let held = shard.get(key);
        // What this gateway counted before the slot was shared becomes its part of the number.
        let counted_alone = held.is_some_and(|held| held.own_number(sharing.writer).is_some());
        let is_value = !counted_alone && held.is_some_and(|held| held.is_value() && held.expires_ms > now_ms);
        if part.expires_ms <= now_ms || at < stamp(held) || (is_value && at == stamp(held)) {
            return Ok(false);
        }
        let mut parts = if at == stamp(held) { live_parts(held, sharing.writer, now_ms) } else { Vec::new() };
        let own = part.writer == sharing.writer;
        let is_full = parts.len() >= MAX_PARTS;
        match parts.iter_mut().find(|known| known.writer == part.writer) {
            _ if own && incarnation == sharing.incarnation => return Ok(false),
            Some(known) if own && known.adopted == incarnation => return Ok(false),
            Some(known) if own => {
                known.sum = known.sum.saturating_add(part.sum);
                known.adopted = incarnation;
            }
            Some(known) => *known = part,
            None if is_full => return Err(ChangeRefused::TooManyParts),
            None => parts.push(Part { adopted: if own { incarnation } else { 0 }, ..part }),
        }
        self.put(&mut shard, key, number(at, parts)).map_err(|_| ChangeRefused::NoRoom)?;
        Ok(own || counted_alone)
    }
}

impl SharedState for State {
    fn share(&self, writer: u64, incarnation: u64) {
        let _ = self.sharing.set(Sharing { writer, incarnation, changed: Mutex::default() });
    }

    fn is_shared(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    fn take_changes(&self, most: usize) -> Vec<StateChange> {
        let Some(sharing) = self.sharing() else { return Vec::new() };
        let keys: Vec<Box<str>> = {
            let mut changed = sharing.changed.lock();
            let keys: Vec<Box<str>> = changed.iter().take(most).cloned().collect();
            for key in &keys {
                changed.remove(key);
            }
            keys
        };
        keys.iter().filter_map(|key| self.change(sharing, key)).collect()
    }

    fn note_all(&self) {
        let Some(sharing) = self.sharing() else { return };
        for shard in &self.shards {
            let keys: Vec<Box<str>> = shard.lock().keys().cloned().collect();
            keys.iter().for_each(|key| sharing.note(key, self.quota.keys));
        }
    }

    fn note_again(&self, key: &str) {
        if let Some(sharing) = self.sharing() {
            sharing.note(key, self.quota.keys);
        }
    }

    fn apply(&self, change: StateChange, now_ms: u64) -> Result<(), ChangeRefused> {
        let Some(sharing) = self.sharing() else { return Ok(()) };
        let StateChange { key, stamp: at, content } = change;
        let length = if let SharedContent::Value { value, .. } = &content { value.as_slice() } else { &[] };
        self.check(&key, length).map_err(|_| ChangeRefused::TooLong)?;
        if at.time_us > now_ms.saturating_mul(1_000).saturating_add(MAX_AHEAD_US) {
            return Err(ChangeRefused::ClockAhead);
        }
        let whole = |new: Entry| {
            let applied = self.with_sweep(now_ms, || self.apply_whole(sharing, (&key, new.clone(), at)));
            applied.map_err(|_| ChangeRefused::NoRoom)
        };
        let again = match content {
            SharedContent::Value { expires_ms, .. } if expires_ms <= now_ms => false,
            SharedContent::Value { value, expires_ms } => {
                let origin = Some(Box::new(Origin { stamp: at, kind: Kind::Value }));
                whole(Entry { value: value.into(), expires_ms, origin })?
            }
            SharedContent::Deleted => whole(deleted(at, now_ms))?,
            SharedContent::Part { writer, incarnation, sum, expires_ms } => {
                let part = (Part { writer, sum, expires_ms, adopted: 0 }, incarnation);
                match self.apply_part(sharing, (&key, at), part, now_ms) {
                    Err(ChangeRefused::NoRoom) if self.sweep(now_ms) => {
                        self.apply_part(sharing, (&key, at), part, now_ms)?
                    }
                    applied => applied?,
                }
            }
        };
        if again {
            sharing.note(&key, self.quota.keys);
        }
        Ok(())
    }
}

impl Entry {
    fn is_value(&self) -> bool {
        self.origin.as_ref().is_none_or(|origin| matches!(origin.kind, Kind::Value))
    }

    /// A number that was written while the state was not shared, as the part of this gateway.
    fn own_number(&self, writer: u64) -> Option<Part> {
        let number = <[u8; 8]>::try_from(&*self.value).ok().filter(|_| self.origin.is_none())?;
        Some(Part { writer, sum: i64::from_le_bytes(number), expires_ms: self.expires_ms, adopted: 0 })
    }

    fn is_deleted(&self) -> bool {
        self.origin.as_ref().is_some_and(|origin| matches!(origin.kind, Kind::Deleted))
    }
}

fn stamp(entry: Option<&Entry>) -> Stamp {
    entry.and_then(|entry| entry.origin.as_ref()).map(|origin| origin.stamp).unwrap_or_default()
}

fn live_parts(entry: Option<&Entry>, writer: u64, now_ms: u64) -> Vec<Part> {
    let own = entry.and_then(|entry| entry.own_number(writer));
    let parts = match entry.and_then(|entry| entry.origin.as_ref()).map(|origin| &origin.kind) {
        Some(Kind::Number(parts)) => parts.as_slice(),
        _ => own.as_slice(),
    };
    parts.iter().filter(|part| part.expires_ms > now_ms).copied().collect()
}

/// A number that lives as long as the last of its parts.
fn number(stamp: Stamp, parts: Vec<Part>) -> Entry {
    let sum = parts.iter().fold(0_i64, |sum, part| sum.saturating_add(part.sum));
    let expires_ms = parts.iter().map(|part| part.expires_ms).max().unwrap_or(0);
    let origin = Some(Box::new(Origin { stamp, kind: Kind::Number(parts) }));
    Entry { value: sum.to_le_bytes().into(), expires_ms, origin }
}

fn deleted(stamp: Stamp, now_ms: u64) -> Entry {
    let origin = Some(Box::new(Origin { stamp, kind: Kind::Deleted }));
    Entry { value: Box::default(), expires_ms: now_ms.saturating_add(TOMBSTONE_MS), origin }
}

#[cfg(test)]
mod tests;
