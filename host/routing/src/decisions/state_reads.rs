//! What a policy read of its slot's state in one call: noted as words by the thread that decides, kept with the decision, and told as
//! what was there before the call.
//!
//! Every access of a key is noted in its order; the first one says what was there. A policy without state pays nothing.

use std::cell::RefCell;

use serde::{Serialize, Serializer};

use super::{encoding::Words, recorder::write_bytes};

/// Bytes of the keys and values that are noted of one call.
const ROOM: usize = 8_192;

/// There was nothing under the key.
const NOTHING: u32 = 0;
/// This was there.
const VALUE: u32 = 1;
/// The policy wrote it itself; what it reads there later says nothing of before.
const OWN: u32 = 2;

thread_local! {
    static NOTED: RefCell<Noted> = const { RefCell::new(Noted { words: Vec::new(), count: 0, cut: false }) };
}

struct Noted {
    words: Vec<u32>,
    count: u32,
    cut: bool,
}

/// Notes what was there.
pub(crate) fn note_read(key: &str, before: Option<&[u8]>) {
    note(if before.is_some() { VALUE } else { NOTHING }, key, before.unwrap_or_default());
}

/// Notes that the policy writes a key.
pub(crate) fn note_write(key: &str) {
    note(OWN, key, &[]);
}

fn note(kind: u32, key: &str, value: &[u8]) {
    NOTED.with_borrow_mut(|noted| {
        if noted.words.len() * size_of::<u32>() + key.len() + value.len() > ROOM {
            noted.cut = true;
            return;
        }
        noted.count += 1;
        noted.words.push(kind);
        write_bytes(key.as_bytes(), &mut noted.words);
        write_bytes(value, &mut noted.words);
    });
}

/// Moves what was noted since the last time to the end of `words`, as belonging to the stage of this number; whether there was anything.
pub(super) fn take(stage: u32, words: &mut Vec<u32>) -> bool {
    NOTED.with_borrow_mut(|noted| {
        let anything = noted.count > 0 || noted.cut;
        if anything {
            words.extend([stage, u32::from(noted.cut), noted.count]);
            words.append(&mut noted.words);
            (noted.count, noted.cut) = (0, false);
        }
        anything
    })
}

/// What one call read, as it is told.
#[derive(Debug)]
pub(super) struct Reads {
    pub(super) stage: u32,
    /// There was more than is kept.
    pub(super) cut: bool,
    before: Vec<(String, Option<Vec<u8>>)>,
}

impl Reads {
    /// Reads what [`take`] wrote.
    pub(super) fn parse(words: &mut Words<'_>) -> Option<Self> {
        let (stage, cut, count) = (words.word()?, words.word()? == 1, words.word()?);
        let mut first: Vec<(u32, String, Vec<u8>)> = Vec::new();
        for _ in 0..count {
            let (kind, key, value) = (words.word()?, words.text()?, words.bytes()?);
            if !first.iter().any(|(_, known, _)| *known == key) {
                first.push((kind, key, value));
            }
        }
        let theirs = first.into_iter().filter(|(kind, ..)| *kind != OWN);
        let before = theirs.map(|(kind, key, value)| (key, (kind == VALUE).then_some(value))).collect();
        Some(Self { stage, cut, before })
    }
}

impl Serialize for Reads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.before.iter().map(|(key, value)| (key, value.as_deref().map(Told))))
    }
}

/// A value: eight bytes are a number of the contract, anything else is told in hexadecimal.
struct Told<'a>(&'a [u8]);

impl Serialize for Told<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(number) = <[u8; 8]>::try_from(self.0) {
            return serializer.serialize_i64(i64::from_le_bytes(number));
        }
        let hex: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&format!("0x{hex}"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(words: &[u32]) -> (serde_json::Value, bool) {
        let reads = Reads::parse(&mut Words(words)).unwrap();
        (serde_json::to_value(&reads).unwrap(), reads.cut)
    }

    #[test]
    fn the_first_access_of_a_key_says_what_was_there() {
        let mut words = Vec::new();
        let _ = take(0, &mut words);
        words.clear();
        assert!(!take(0, &mut words) && words.is_empty(), "nothing was read, nothing is kept");
        note_read("count", Some(&7_i64.to_le_bytes()));
        note_write("mine");
        note_read("mine", Some(b"what it wrote"));
        note_read("none", None);
        note_read("text", Some(b"abc"));
        note_write("count");
        note_read("count", Some(&8_i64.to_le_bytes()));
        assert!(take(2, &mut words));
        assert_eq!(told(&words), (json!({ "count": 7, "none": null, "text": "0x616263" }), false));
        assert_eq!(words[0], 2);
        assert!(!take(2, &mut words), "it is taken once");
    }

    #[test]
    fn there_is_a_bound_and_that_it_was_met_is_told() {
        let mut words = Vec::new();
        let _ = take(0, &mut words);
        words.clear();
        (0..1_000).for_each(|number| note_read(&format!("key {number}"), Some(&[0; 8])));
        assert!(take(0, &mut words));
        assert!(words.len() * 4 <= ROOM + 64, "{}", words.len());
        let (map, cut) = told(&words);
        assert!(cut && map["key 100"] == 0 && map.get("key 999").is_none());
        assert!(!take(0, &mut words));
    }
}
