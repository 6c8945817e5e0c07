//! A part of a message's content.

use minijinja::{Value, value::ValueKind};

use crate::{error::EncodeError, json};

/// A text, or a reference to a tool.
#[derive(Clone, Debug)]
pub(crate) enum Part {
    Text {
        text: Value,
        /// Keys that are not part of OpenAI's API. Templates that expect lists see them.
        extra: Vec<(Value, Value)>,
    },
    ToolReference(Value),
}

/// Types and keys of parts that contain media.
const MEDIA: [&str; 13] = [
    "audio_embeds",
    "audio_url",
    "file",
    "image",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "input_image",
    "prompt_embeds",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Keys of the API, which are not passed as extra keys.
const KNOWN: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Header line that one client puts before its system prompt, with a value that changes in each request. vLLM
/// drops it.
const BILLING: &str = "x-anthropic-billing-header";

/// Parses a part; `None` for a null text.
pub(crate) fn read_part(part: &Value) -> Result<Option<Part>, EncodeError> {
    if part.as_str().is_some() {
        return Ok(Some(Part::of_text(part.clone())));
    }
    let invalid = |problem: &str| EncodeError::invalid("messages", problem);
    let object = part.as_object().filter(|_| part.kind() == ValueKind::Map);
    let Some(entries) = object.and_then(|object| object.try_iter_pairs()) else {
        return Err(invalid("a part is neither text nor an object"));
    };
    let entries: Vec<(Value, Value)> = entries.collect();
    let get = |name| entries.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value);
    let kind = get("type").and_then(Value::as_str);
    if let Some(medium) = MEDIA.into_iter().find(|medium| kind == Some(medium) || get(medium).is_some()) {
        return Err(EncodeError::Multimodal(medium.to_owned()));
    }
    let kind = kind.ok_or_else(|| invalid("a part has no type"))?;
    let field = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" | "thinking" => kind,
        "tool_reference" => "name",
        _ => return Err(EncodeError::invalid("messages", format_args!("`{kind}` is not a type of a part"))),
    };
    match get(field).filter(|value| !value.is_none()) {
        Some(name) if kind == "tool_reference" => Ok(Some(Part::ToolReference(name.clone()))),
        Some(text) if text.as_str().is_some() => {
            let text = text.clone();
            let extra = |(key, _): &(Value, Value)| key.as_str().is_some_and(|key| !KNOWN.contains(&key));
            Ok(Some(Part::Text { text, extra: entries.into_iter().filter(extra).collect() }))
        }
        None if matches!(kind, "text" | "refusal") => Ok(None),
        _ => Err(EncodeError::invalid("messages", format_args!("`{field}` of a part is not a text"))),
    }
}

/// Joins the parts to one text, for templates that expect a string.
pub(crate) fn join(mut parts: Vec<Part>) -> Value {
    if parts.len() == 1 {
        match parts.pop() {
            Some(Part::Text { text, .. } | Part::ToolReference(text)) => return text,
            None => {}
        }
    }
    let text = |part: &Part| match part {
        Part::Text { text, .. } | Part::ToolReference(text) => text.as_str().unwrap_or_default().to_owned(),
    };
    Value::from(parts.iter().map(text).collect::<Vec<_>>().join("\n"))
}

impl Part {
    pub(crate) fn of_text(text: Value) -> Self {
        Self::Text { text, extra: Vec::new() }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text { text, .. } => text.as_str(),
            Self::ToolReference(_) => None,
        }
    }

    pub(crate) fn text_value(&self) -> Option<&Value> {
        match self {
            Self::Text { text, .. } => Some(text),
            Self::ToolReference(_) => None,
        }
    }

    pub(crate) fn text_mut(&mut self) -> Option<&mut Value> {
        match self {
            Self::Text { text, .. } => Some(text),
            Self::ToolReference(_) => None,
        }
    }

    /// Removes the billing line; `None` if nothing is left.
    pub(crate) fn without_billing(self) -> Option<Self> {
        match self {
            Self::Text { text, extra } if text.as_str().is_some_and(|text| text.starts_with(BILLING)) => {
                let (_, rest) = text.as_str()?.split_once('\n')?;
                (!rest.is_empty()).then(|| Self::Text { text: Value::from(rest), extra })
            }
            other => Some(other),
        }
    }
}

impl From<Part> for Value {
    fn from(part: Part) -> Self {
        let pair = |key: &str, value| (Value::from(key), value);
        let kind = |kind: &str| pair("type", Value::from(kind));
        match part {
            Part::Text { text, extra } => {
                json::map([kind("text"), pair("text", text)].into_iter().chain(extra))
            }
            Part::ToolReference(name) => json::map([kind("tool_reference"), pair("name", name)]),
        }
    }
}
