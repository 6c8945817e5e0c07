//! Ids that clients give to the media of a chat: vLLM keeps media under the `uuid` of their part, and takes a
//! later part with the `uuid` alone.

use std::{borrow::Cow, iter, mem, ops::Range};

use json_splice::JsonBody;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use crate::openai::endpoint::Endpoint;

/// Key of a chat's messages.
const MESSAGES: &str = "messages";

/// Parts of one request whose ids count.
const MAX_IDS: usize = 64;

/// Hashes of the ids of a request's media.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MediaIds {
    /// All of them. The engine that answers has these media.
    pub(crate) all: Vec<u64>,
    /// The first one that stands without its data.
    pub(crate) missing: Option<u64>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
}

/// A part of a content, with the keys that have the data of media.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Part<'a> {
    #[serde(borrow)]
    uuid: Option<Cow<'a, str>>,
    audio_embeds: Data,
    audio_url: Data,
    image_embeds: Data,
    image_pil: Data,
    image_url: Data,
    input_audio: Data,
    video_embeds: Data,
    video_url: Data,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Data {
    #[default]
    NoKey,
    Missing,
    Present,
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let is_missing = matches!(<&RawValue>::deserialize(from)?.get(), "null" | "{}" | "\"\"");
        Ok(if is_missing { Self::Missing } else { Self::Present })
    }
}

impl Part<'_> {
    fn data(&self) -> Data {
        let audio = [self.audio_embeds, self.audio_url];
        let image = [self.image_embeds, self.image_pil, self.image_url];
        let other = [self.input_audio, self.video_embeds, self.video_url];
        let mut all = audio.into_iter().chain(image).chain(other);
        all.find(|data| *data != Data::NoKey).unwrap_or_default()
    }
}

impl MediaIds {
    /// Returns the ids in the messages of a request, hashed by `hash`.
    pub(crate) fn of(endpoint: Endpoint, body: &JsonBody, hash: impl Fn(&str) -> u64) -> Self {
        let messages = body.get(MESSAGES).filter(|_| endpoint == Endpoint::ChatCompletions);
        let messages = messages.filter(|text| names_id_beside(text, body.long_strings(MESSAGES)));
        messages.map(|text| Self::among(text, hash)).unwrap_or_default()
    }

    fn among(messages: &str, hash: impl Fn(&str) -> u64) -> Self {
        let messages: Vec<Message<'_>> = serde_json::from_str(messages).unwrap_or_default();
        let contents = messages.iter().filter_map(|message| message.content.map(RawValue::get));
        let parts = contents
            .filter(|content| names_id(content))
            .flat_map(|content| serde_json::from_str::<Vec<&RawValue>>(content).unwrap_or_default());
        let mut ids = Self::default();
        for part in parts.map(RawValue::get).filter(|part| names_id(part)).take(MAX_IDS) {
            let part: Part<'_> = serde_json::from_str(part).unwrap_or_default();
            let data = part.data();
            let Some(id) = part.uuid.filter(|id| !id.is_empty() && data != Data::NoKey) else { continue };
            let id = hash(&id);
            ids.all.push(id);
            if data == Data::Missing && ids.missing.is_none() {
                ids.missing = Some(id);
            }
        }
        ids
    }
}

/// Returns whether a text may have the key of an id outside its long strings. Keys are never long, and long
/// strings are most of a chat.
fn names_id_beside(text: &str, long_strings: impl Iterator<Item = Range<usize>>) -> bool {
    let mut start = 0;
    let end = iter::once(text.len()..text.len());
    long_strings
        .chain(end)
        .any(|long| names_id(text.get(mem::replace(&mut start, long.end)..long.start).unwrap_or_default()))
}

/// Returns whether a text may have the key of an id.
fn names_id(text: &str) -> bool {
    memchr::memmem::find(text.as_bytes(), b"\"uuid\"").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i12_an_id_is_found_beside_long_strings() {
        let ids = |messages: &str| {
            let body = JsonBody::parse(format!(r#"{{"messages":{messages},"model":"m"}}"#).into()).unwrap();
            MediaIds::of(Endpoint::ChatCompletions, &body, |id| id.parse().unwrap()).all
        };
        let part = r#"{"type":"image_url","image_url":{"url":"data:,x"},"uuid":"1"}"#;
        let long = "x".repeat(json_splice::MIN_LONG_STRING);
        let text = format!(r#"{{"content":"{long}"}}"#);
        let media = format!(r#"{{"content":[{{"type":"text","text":"{long}"}},{part}]}}"#);
        let with_data = format!(r#"{{"content":[{{"type":"image_url","image_url":"{long}","uuid":"1"}}]}}"#);
        for (messages, want) in [
            (format!("[{media}]"), 1),
            (format!("[{text},{media}]"), 1),
            (format!("[{media},{text}]"), 1),
            (format!("[{with_data},{text},{with_data}]"), 2),
            (format!("[{text},{text}]"), 0),
            (format!("[{text},{}{media}]", format!("{text},").repeat(5_000)), 1),
        ] {
            // I12.11
            assert_eq!(ids(&messages), vec![1; want]);
        }
    }

    #[test]
    fn i12_an_id_without_data_is_told_from_one_with_data() {
        let ids = |messages: &str| {
            let ids = MediaIds::among(messages, |id| id.parse().unwrap());
            (ids.all, ids.missing)
        };
        let image = r#"{"type":"image_url","image_url":{"url":"data:,x"},"uuid":"1"}"#;
        for (part, missing) in [
            (image, None),
            (r#"{"type":"image_url","image_url":null,"uuid":"1"}"#, Some(1)),
            (r#"{"uuid":"1","image_url": {} ,"type":"image_url"}"#, Some(1)),
            (r#"{"type":"input_audio","input_audio":"","uuid":"1"}"#, Some(1)),
        ] {
            let messages = format!(r#"[{{"role":"user","content":[{{"type":"text","text":"a"}},{part}]}}]"#);
            // I12.11
            assert_eq!(ids(&messages), (vec![1], missing), "{part}");
        }
        let two = format!(
            r#"[{{"content":"\"uuid\""}},{{"content":[{image}]}},{{"content":[{{"image_url":null,"uuid":"2"}}]}}]"#
        );
        assert_eq!(ids(&two), (vec![1, 2], Some(2)));
        for none in [
            r#"[{"content":"a \"uuid\" of mine"}]"#,
            r#"[{"content":[{"type":"text","text":"a","uuid":"1"}]}]"#,
            r#"[{"content":[{"type":"image_url","image_url":null,"uuid":""}]}]"#,
            r#"[{"content":[{"type":"image_url","image_url":null,"uuid":1}]}]"#,
            r#"[{"content":{"uuid":"1"}}]"#,
            r#"{"uuid":"1"}"#,
        ] {
            assert_eq!(ids(none), (vec![], None), "{none}");
        }
        // A part that is a text.
        assert_eq!(ids(&format!(r#"[{{"content":["a",{image}]}}]"#)), (vec![1], None));
        // Parts count that may have an id: each one is read.
        let unread = r#"{"uuid":1},"#.repeat(MAX_IDS);
        assert_eq!(ids(&format!(r#"[{{"content":[{unread}{image}]}}]"#)), (vec![], None));
        let many: Vec<&str> = std::iter::repeat_n(image, 200).collect();
        assert_eq!(ids(&format!(r#"[{{"content":[{}]}}]"#, many.join(","))).0.len(), MAX_IDS);
    }
}
