//! Ids that clients give to the media of a chat: vLLM keeps media under the `uuid` of their part, and takes a
//! later part with the `uuid` alone.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::openai::request::{Endpoint, Request};

/// Ids of one request that count.
const MAX_IDS: usize = 64;
/// Keys of parts that have the data of media.
const DATA: [&str; 8] = [
    "audio_embeds",
    "audio_url",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "video_embeds",
    "video_url",
];

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

impl MediaIds {
    /// Returns the ids in a request, hashed by `hash`.
    pub(crate) fn of(request: &Request, hash: impl Fn(&str) -> u64) -> Self {
        let messages = request.body.get("messages").filter(|_| request.endpoint == Endpoint::ChatCompletions);
        messages.filter(|text| names_id(text)).map(|text| Self::among(text, hash)).unwrap_or_default()
    }

    fn among(messages: &str, hash: impl Fn(&str) -> u64) -> Self {
        let messages: Vec<Message<'_>> = serde_json::from_str(messages).unwrap_or_default();
        let contents = messages.iter().filter_map(|message| message.content.map(RawValue::get));
        let mut ids = Self::default();
        for content in contents.filter(|content| names_id(content)) {
            let parts: Vec<HashMap<String, &RawValue>> = serde_json::from_str(content).unwrap_or_default();
            for part in parts {
                let id: Option<String> = part.get("uuid").and_then(|id| serde_json::from_str(id.get()).ok());
                let mut data = DATA.iter().filter_map(|key| part.get(*key).map(|value| value.get()));
                let (Some(id), Some(data)) = (id.filter(|id| !id.is_empty()), data.next()) else { continue };
                if ids.all.len() == MAX_IDS {
                    return ids;
                }
                let id = hash(&id);
                ids.all.push(id);
                if matches!(data, "null" | "{}" | "\"\"") && ids.missing.is_none() {
                    ids.missing = Some(id);
                }
            }
        }
        ids
    }
}

/// Returns whether a text may have the key of an id.
fn names_id(text: &str) -> bool {
    memchr::memmem::find(text.as_bytes(), b"\"uuid\"").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let many: Vec<&str> = std::iter::repeat_n(image, 200).collect();
        assert_eq!(ids(&format!(r#"[{{"content":[{}]}}]"#, many.join(","))).0.len(), MAX_IDS);
    }
}
