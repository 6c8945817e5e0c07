//! Messages that occurred before: the next turn of a conversation parses its new messages only.

use std::sync::Arc;

use minijinja::{Value, value::ValueKind};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::{Turn, read, read_one};
use crate::{
    byte_cache::{ByteCache, Weigh},
    content_format::ContentFormat,
    error::EncodeError,
    prompt_key::Item,
    rendered::SharedText,
};

/// Typical bytes of an entry, from which the cache estimates its number of entries.
const TYPICAL_MESSAGE: usize = 2 * 1024;
/// Estimated bytes of a message without its values.
const MESSAGE_BYTES: usize = 384;
/// Estimated bytes of a value without its text.
const VALUE_BYTES: usize = 96;
/// Minimum length of a text that is shared, bytes. Copying shorter ones costs nothing noticeable.
pub(crate) const MIN_SHARED: usize = 256;

/// A message, parsed.
#[derive(Debug)]
pub(crate) struct KnownMessage {
    pub(crate) turn: Turn,
    pub(crate) value: Value,
    pub(crate) texts: Vec<SharedText>,
    bytes: usize,
}

/// The messages of one model.
#[derive(Debug)]
pub(crate) struct KnownMessages {
    messages: ByteCache<Arc<KnownMessage>>,
    seed: u64,
}

impl Weigh for Arc<KnownMessage> {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl KnownMessages {
    /// Creates a cache of `budget` bytes. `seed` is random, so that clients cannot construct two texts with
    /// the same digest.
    pub(crate) fn new(budget: usize, seed: u64) -> Self {
        Self { messages: ByteCache::new(budget, TYPICAL_MESSAGE), seed }
    }

    /// Parses the `messages` of a request, except those that are known. `items` are their places; all are
    /// parsed where they are not known.
    pub(crate) fn read(
        &self,
        json: &str,
        items: &[Item],
        format: ContentFormat,
    ) -> Result<Vec<Arc<KnownMessage>>, EncodeError> {
        let mut fresh = Vec::new();
        let each = items.iter().map(|item| {
            // The same message has another form for another template.
            let key = item.digest.wrapping_add(u128::from(format == ContentFormat::Parts));
            if let Some(known) = self.messages.find(key) {
                return Some(known);
            }
            let message =
                Arc::new(KnownMessage::new(read_one(json.get(item.place.clone())?, format)?, self.seed));
            fresh.push((key, message.clone()));
            Some(message)
        });
        let messages: Option<Vec<_>> = each.collect();
        self.messages.put(fresh);
        match messages.filter(|messages| !messages.is_empty()) {
            Some(messages) => Ok(messages),
            // Also for an error that names its line and column.
            None => Ok(read(json, format)?.into_iter().map(|turn| Arc::new(turn.into())).collect()),
        }
    }
}

impl KnownMessage {
    fn new(turn: Turn, seed: u64) -> Self {
        let digest = |text: &Value| {
            let bytes = text.as_str().filter(|text| text.len() >= MIN_SHARED)?.as_bytes();
            Some(SharedText { text: text.clone(), digest: xxh3_128_with_seed(bytes, seed) })
        };
        let texts = turn.texts().filter_map(digest).collect();
        let value = Value::from(&turn);
        let bytes = MESSAGE_BYTES + bytes_of(&value);
        Self { texts, bytes, value, turn }
    }
}

impl From<Turn> for KnownMessage {
    /// A message that is not kept, and shares no text.
    fn from(turn: Turn) -> Self {
        Self { texts: Vec::new(), bytes: 0, value: Value::from(&turn), turn }
    }
}

/// Returns the bytes of a value of JSON.
fn bytes_of(value: &Value) -> usize {
    let within = match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq => value.try_iter().map_or(0, |items| items.map(|item| bytes_of(&item)).sum()),
        ValueKind::Map => value.try_iter().map_or(0, |keys| {
            keys.map(|key| bytes_of(&key) + value.get_item(&key).map_or(0, |value| bytes_of(&value))).sum()
        }),
        _ => 0,
    };
    within + VALUE_BYTES
}
