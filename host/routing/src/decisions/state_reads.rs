//! State that a policy read in one call, as its decision's record shows it: the values before the call.
//!
//! The first access of a key decides. A key that the policy wrote first says nothing about the state before.

use serde::{Serialize, Serializer};

use crate::{
    encoding::WordReader,
    state_accesses::{VALUE, WRITTEN},
};

/// The reads of one stage.
#[derive(Debug)]
pub(super) struct StateReads {
    pub(super) stage: u32,
    /// There were more accesses than a record keeps.
    pub(super) truncated: bool,
    before: Vec<(String, Option<Vec<u8>>)>,
}

impl StateReads {
    /// Decodes what [`crate::state_accesses::StateAccesses::move_to`] wrote.
    pub(super) fn parse(words: &mut WordReader<'_>) -> Option<Self> {
        let (stage, truncated, count) = (words.word()?, words.word()? == 1, words.word()?);
        let mut first: Vec<(u32, String, Vec<u8>)> = Vec::new();
        for _ in 0..count {
            let (kind, key, value) = (words.word()?, words.text()?, words.bytes()?);
            if !first.iter().any(|(_, known, _)| *known == key) {
                first.push((kind, key, value));
            }
        }
        let read = first.into_iter().filter(|(kind, ..)| *kind != WRITTEN);
        let before = read.map(|(kind, key, value)| (key, (kind == VALUE).then_some(value))).collect();
        Some(Self { stage, truncated, before })
    }
}

impl Serialize for StateReads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.before.iter().map(|(key, value)| (key, value.as_deref().map(Value))))
    }
}

/// A value: eight bytes are a number of the contract, anything else is shown in hexadecimal.
struct Value<'a>(&'a [u8]);

impl Serialize for Value<'_> {
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
    use crate::state_accesses::{MAX_NOTED_BYTES, StateAccesses};

    fn parsed(words: &[u32]) -> (serde_json::Value, bool) {
        let reads = StateReads::parse(&mut WordReader(words)).unwrap();
        (serde_json::to_value(&reads).unwrap(), reads.truncated)
    }

    #[test]
    fn the_first_access_of_a_key_tells_the_value_before_the_call() {
        let (mut accesses, mut words) = (StateAccesses::default(), Vec::new());
        assert!(!accesses.move_to(0, &mut words) && words.is_empty(), "nothing was read, nothing is kept");
        accesses.note_read("count", Some(&7_i64.to_le_bytes()));
        accesses.note_write("mine");
        accesses.note_read("mine", Some(b"what it wrote"));
        accesses.note_read("none", None);
        accesses.note_read("text", Some(b"abc"));
        accesses.note_write("count");
        accesses.note_read("count", Some(&8_i64.to_le_bytes()));
        assert!(accesses.move_to(2, &mut words));
        assert_eq!(parsed(&words), (json!({ "count": 7, "none": null, "text": "0x616263" }), false));
        assert_eq!(words[0], 2);
        assert!(!accesses.move_to(2, &mut words), "accesses are moved once");
    }

    #[test]
    fn accesses_are_bounded_and_the_record_says_when_some_were_dropped() {
        let (mut accesses, mut words) = (StateAccesses::default(), Vec::new());
        (0..1_000).for_each(|number| accesses.note_read(&format!("key {number}"), Some(&[0; 8])));
        assert!(accesses.move_to(0, &mut words));
        assert!(words.len() * 4 <= MAX_NOTED_BYTES + 64, "{}", words.len());
        let (map, truncated) = parsed(&words);
        assert!(truncated && map["key 100"] == 0 && map.get("key 999").is_none());
        assert!(!accesses.move_to(0, &mut words));
    }
}
