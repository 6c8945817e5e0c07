#![doc = include_str!("../README.md")]

use std::{borrow::Cow, fmt, ops::Range};

use bytes::Bytes;
use bytestring::ByteString;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};

mod scan;

pub use scan::{Counts, MAX_DEPTH, MAX_KEYS, MIN_LONG_STRING};
use scan::{Fault, Key, Member, Scanned};

/// A JSON object with the places of its top-level values.
#[derive(Clone, Debug)]
pub struct JsonBody {
    text: ByteString,
    members: Vec<Member>,
    /// Starts and ends of the long strings, in order.
    long_strings: Vec<(u32, u32)>,
}

/// Why a body is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// The body is not a JSON object.
    #[error("the body is not a JSON object: {0}")]
    Syntax(String),
    /// The object has too many keys.
    #[error("the object has more than {MAX_KEYS} keys; send fewer")]
    Keys,
    /// The object is nested too deeply.
    #[error("lists and objects are nested more than {MAX_DEPTH} deep; send a flatter one")]
    Depth,
}

/// Maximum length of serde_json's text in an error, characters: it quotes the text.
const MAX_ERROR_TEXT: usize = 300;

/// Changes to the top level of a body.
#[derive(Debug)]
pub struct Edit<'a> {
    body: &'a JsonBody,
    set: Vec<(&'a str, Cow<'a, str>)>,
    removed: Vec<&'a str>,
    stripped: &'a [&'a str],
}

impl JsonBody {
    /// Validates the whole body and indexes its top-level keys.
    ///
    /// # Errors
    /// [`JsonError`]: a limit, or serde_json's message with line and column.
    pub fn parse(bytes: Bytes) -> Result<Self, JsonError> {
        let text = ByteString::try_from(bytes).map_err(|error| JsonError::Syntax(error.to_string()))?;
        let scanned = scan::scan(&text).map_err(|fault| JsonError::of(fault, &text))?;
        let Scanned { members, long_strings } = scanned;
        Ok(Self { text, members, long_strings })
    }

    /// Returns an empty object.
    #[must_use]
    pub fn empty() -> Self {
        Self { text: ByteString::from_static("{}"), members: Vec::new(), long_strings: Vec::new() }
    }

    /// The raw JSON of a value; of several under one key the last, as parsers do.
    #[inline]
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.text.get(self.member(key)?.value.clone())
    }

    /// Returns how many values the value of a key contains, by kind; zeros when the key is missing.
    #[inline]
    #[must_use]
    pub fn counts(&self, key: &str) -> Counts {
        self.member(key).map_or(Counts::default(), |member| member.counts)
    }

    /// Every key, as often as it is there, with how many values its value contains.
    #[inline]
    pub fn all_counts(&self) -> impl Iterator<Item = (&str, Counts)> {
        self.members.iter().map(|member| (member.key.text(&self.text), member.counts))
    }

    /// Ends of the objects in the list under a key, in order. If there are thousands, only the first ones are
    /// known.
    #[inline]
    #[must_use]
    pub fn object_ends(&self, key: &str) -> &[u32] {
        self.member(key).map_or(&[], |member| &member.object_ends)
    }

    /// Places of the strings within the value of a key that have [`MIN_LONG_STRING`] bytes or more, in order.
    /// They count from the beginning of the value, and include the quotes. Keys are not among them. If there
    /// are thousands, only the first ones of the body are known.
    pub fn long_strings(&self, key: &str) -> impl Iterator<Item = Range<usize>> {
        let (from, to) = self.member(key).map_or((0, 0), |member| (member.value.start, member.value.end));
        let first = self.long_strings.partition_point(|(start, _)| (*start as usize) < from);
        let places =
            self.long_strings.iter().skip(first).map(|(start, end)| (*start as usize, *end as usize));
        places.take_while(move |(_, end)| *end <= to).map(move |(start, end)| start - from..end - from)
    }

    /// Every key, as often as it is there.
    #[inline]
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.key.text(&self.text))
    }

    /// The object under a key, without a copy of its text; `None` when there is no object.
    #[must_use]
    pub fn object(&self, key: &str) -> Option<Result<Self, JsonError>> {
        let value = self.get(key).filter(|value| value.starts_with('{'))?;
        Some(Self::parse(self.text.as_bytes().slice_ref(value.as_bytes())))
    }

    #[inline]
    fn member(&self, key: &str) -> Option<&Member> {
        self.members.iter().rev().find(|member| member.key.is(key, self.text.as_bytes()))
    }

    /// A value as `T`; `Ok(None)` when missing or null.
    ///
    /// # Errors
    /// serde_json's error.
    pub fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, serde_json::Error> {
        self.get(key).map_or(Ok(None), serde_json::from_str)
    }

    /// The whole body.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        self.text.as_bytes()
    }

    /// Begins changes.
    #[inline]
    #[must_use]
    pub fn edit(&self) -> Edit<'_> {
        Edit { body: self, set: Vec::new(), removed: Vec::new(), stripped: &[] }
    }
}

impl<'a> Edit<'a> {
    /// Gives `key` this JSON value, in place where the key is, else at the end.
    #[must_use]
    pub fn set(mut self, key: &'a str, json: impl Into<Cow<'a, str>>) -> Self {
        self.set.retain(|(other, _)| *other != key);
        self.set.push((key, json.into()));
        self
    }

    /// Takes `key` out, wherever and however often it is.
    #[must_use]
    pub fn remove(mut self, key: &'a str) -> Self {
        self.set.retain(|(other, _)| *other != key);
        self.removed.push(key);
        self
    }

    /// Takes all of `keys` out, in upper and lower case: some parsers ignore the case.
    #[must_use]
    pub fn strip(mut self, keys: &'a [&'a str]) -> Self {
        self.stripped = keys;
        self
    }

    /// Returns whether a key is taken out, unless it gets another value.
    fn takes_out(&self, key: &str) -> bool {
        self.removed.contains(&key) || self.stripped.iter().any(|stripped| stripped.eq_ignore_ascii_case(key))
    }

    /// The edited body; the body itself when nothing changed.
    #[must_use]
    pub fn finish(self) -> Bytes {
        if self.set.is_empty() && !self.body.keys().any(|key| self.takes_out(key)) {
            return self.body.bytes().clone();
        }
        let bytes = self.body.bytes();
        let more: usize = self.set.iter().map(|(key, json)| key.len() + json.len() + 4).sum();
        let mut out = Vec::with_capacity(bytes.len() + more);
        let mut open = Members { out: &mut out, any: false };
        let mut done: Vec<&str> = Vec::new();
        // Text of a kept member is copied from after the comma (or brace) before it up to the end of its
        // value.
        let mut from = bytes.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        open.out.extend_from_slice(bytes.get(..from).unwrap_or_default());
        for Member { key, value: place, .. } in &self.body.members {
            let comma = comma_after(bytes, place.end);
            let close = comma.unwrap_or(place.end);
            let name = bytes.get(from..place.start).unwrap_or_default();
            let value = bytes.get(place.clone()).unwrap_or_default();
            let gap = bytes.get(place.end..close).unwrap_or_default();
            from = comma.map_or(close, |comma| comma + 1);
            let written = key.text(&self.body.text);
            if let Some((key, json)) = self.set.iter().find(|(key, _)| *key == written) {
                if !done.contains(key) {
                    done.push(key);
                    open.push(&[name, json.as_bytes(), gap]);
                }
            } else if !self.takes_out(written) {
                open.push(&[name, value, gap]);
            }
        }
        for (key, json) in self.set.iter().filter(|(key, _)| !done.contains(key)) {
            if key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                open.push(&[b"\"", key.as_bytes(), b"\":", json.as_bytes()]);
            } else {
                let quoted = serde_json::Value::from(*key).to_string();
                open.push(&[quoted.as_bytes(), b":", json.as_bytes()]);
            }
        }
        let tail = self.body.members.last().map_or(from, |member| member.value.end);
        out.extend_from_slice(bytes.get(tail..).unwrap_or_default());
        out.into()
    }
}

/// Writes members with commas between.
struct Members<'a> {
    out: &'a mut Vec<u8>,
    any: bool,
}

impl Members<'_> {
    fn push(&mut self, parts: &[&[u8]]) {
        if self.any {
            self.out.extend_from_slice(b",");
        }
        self.any = true;
        parts.iter().for_each(|part| self.out.extend_from_slice(part));
    }
}

/// The place of the comma that follows a value, if one does.
fn comma_after(bytes: &[u8], end: usize) -> Option<usize> {
    let rest = bytes.get(end..).unwrap_or_default();
    let gap = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    (rest.get(gap) == Some(&b',')).then_some(end + gap)
}

impl Key {
    /// Returns whether the key is meant to be `name`.
    #[inline]
    fn is(&self, name: &str, body: &[u8]) -> bool {
        match self {
            Self::Written(place) => {
                place.len() == name.len() && body.get(place.clone()) == Some(name.as_bytes())
            }
            Self::Unescaped(key) => **key == *name,
        }
    }

    /// The key as it is meant.
    #[inline]
    fn text<'a>(&'a self, body: &'a str) -> &'a str {
        match self {
            Self::Written(place) => body.get(place.clone()).unwrap_or_default(),
            Self::Unescaped(key) => key,
        }
    }
}

impl JsonError {
    /// Returns the error of a text with a fault; for a fault of syntax, serde_json's.
    fn of(fault: Fault, text: &str) -> Self {
        match fault {
            Fault::Keys => Self::Keys,
            Fault::Depth => Self::Depth,
            Fault::Syntax => {
                let error = serde_json::from_str::<Object>(text).err();
                let error = error.map_or_else(|| "it cannot be read".to_owned(), |error| error.to_string());
                Self::Syntax(shortened(&error))
            }
        }
    }
}

/// Returns the beginning of an error text.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_ERROR_TEXT) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// Any object; what is in it is looked at, and forgotten.
struct Object;

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Object, M::Error> {
                while map.next_entry::<String, IgnoredAny>()?.is_some() {}
                Ok(Object)
            }
        }

        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
mod tests;
